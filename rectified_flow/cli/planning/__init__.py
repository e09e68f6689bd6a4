"""The settings that a run chooses by itself, from its pictures, its time and the speed of this machine."""
