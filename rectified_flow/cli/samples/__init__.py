"""Inputs of sample.py, and the choice of the pictures to generate."""
