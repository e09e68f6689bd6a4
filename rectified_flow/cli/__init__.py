"""The programs: from a command line to the parts of a run, and their exit codes."""
