"""The operating system: files, artifacts, signals, terminal, machine, and picture files."""
