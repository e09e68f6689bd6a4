"""The flags of the programs, one dataclass a group. Imports no torch, so that ``--help`` answers at once."""
