"""Metrics that compare generated images with real ones."""
