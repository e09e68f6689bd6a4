"""The parts of export.py."""
