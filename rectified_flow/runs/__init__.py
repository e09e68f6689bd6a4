"""Runs on disk: the flags, the folder, its log, checkpoints, and where a run resumes."""
