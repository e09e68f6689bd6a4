"""Flows: modules that hold a network, return a loss, and sample."""
