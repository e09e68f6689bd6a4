"""Process-group setup and collective operations."""
