"""What sample.py generates: its inputs, and the choice of pictures by its flags."""
