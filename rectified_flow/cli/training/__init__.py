"""Preparation of a training run: choice of flags, generation of data, and checks."""
