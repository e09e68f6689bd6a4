"""Data spaces: between what a dataset stores and what a flow works on."""
