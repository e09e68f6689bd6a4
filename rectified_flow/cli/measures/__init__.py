"""Parts of evaluate.py: scores of fields, and likelihoods."""
