"""How near generated pictures are to real ones, in numbers."""
