"""Limits by the number of pictures: the held-out share, the augmentation and the length of training.

The measurements are in docs/measurements/small_data.md and budget.md.
"""

from math import ceil
from typing import Any

FEW, AUGMENT = 16_000, 0.15  # 1,400 pictures need augmentation in long runs (small_data.md); the limit is a guess
MIN_TO_HOLD_OUT, HELD_OUT = 125, 30  # of 125 pictures, the 30 that a measurement needs are a quarter
# Most passes over the pictures, without augmentation and with it. After them, 1% of the samples are copies on pixels
# (64 pictures of 16 px), and 2% to 6% on latents (60 and 30 of 128 px); 500 is a guess (small_data.md)
PASSES = {"pixels": (400, 1000), "latents": (200, 500)}
# Number of pictures from which latents have as many passes as pixels: of the samples of a run on 473 pictures, 0.8% are
# copies after 400 passes (small_data.md)
MANY = 400
UNAUGMENTED_PASSES = 50  # no copies of 64 to 1,400 pictures without augmentation (small_data.md)
# On latents, a run with augmentation needs this many times the images of the longest run without it to be as good
# (small_data.md)
AUGMENTED_LENGTH = 2.5
# Minimum of the limit on training images, without augmentation and with it: in a shorter run, a network learns too
# little, however few the pictures are (small_data.md)
MIN_LIMITS = {"pixels": (192_000, 192_000), "latents": (6_000, 15_000)}
MIN_IMAGES = 4_000  # the shortest measured run whose samples look like pictures had 4,800 images (budget.md)


def for_pictures(count: int, *, augmentable: bool = True) -> dict[str, Any]:
    """Return the flags of the data that suit a number of pictures."""
    few = count < FEW
    flags: dict[str, Any] = {"augment": AUGMENT} if few and augmentable else {}
    if count >= MIN_TO_HOLD_OUT:
        flags["holdout"] = proposed_share(count, least=0.05 if few else 0.01)
    return flags


def proposed_share(count: int, least: float = 0.05) -> float:
    """Return the value of ``--holdout`` that holds out enough of ``count`` pictures, between ``least`` and 0.5."""
    return min(0.5, max(least, ceil(100 * HELD_OUT / count) / 100))


def passes_of(pictures: int, augment: float, *, latents: bool) -> int:
    """Return the number of passes over the pictures after which the network memorises them."""
    return PASSES["latents" if latents and pictures < MANY else "pixels"][augment > 0]


def limit_of(pictures: int, augment: float, *, latents: bool) -> int:
    """Return the largest number of training images, repeats included, for a number of pictures."""
    least = MIN_LIMITS["latents" if latents else "pixels"][augment > 0]
    return max(least, passes_of(pictures, augment, latents=latents) * pictures)
