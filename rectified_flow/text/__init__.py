"""Text: frozen encoders, captions as a condition, their store and score, and the encoder as an exported program."""

from rectified_flow.text.caption import Caption

__all__ = ["Caption"]
