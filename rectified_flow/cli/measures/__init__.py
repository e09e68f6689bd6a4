"""Measurements of evaluate.py beside distances of features."""
