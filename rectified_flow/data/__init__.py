"""Data: from a hub id, a folder or our own drawing to a uint8 memory map and a deterministic stream over it."""

OXFORD_FLOWERS = "nelorth/oxford-flowers"
