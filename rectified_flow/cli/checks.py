"""Checks of the sides of the data."""

from math import gcd

from rectified_flow.cli.config import UNET, TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.spaces.space import Space


def check_sides(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if the levels of the Unet cannot halve the sides of the pictures, or of their latents."""
    size, levels = config.data.image_size, len(config.network.dim_mults)
    divisor = 2 ** (levels - 1)
    if space.autoencoder is not None:
        common = (space.shape or (0,))[-1]
        sides = f"has latents of side {common}, which is"
        remedy = "pass fewer levels, or a larger power of two as --image_size"
    else:
        _, height, width = config.data.framing.shape
        common = gcd(height, width)
        sides = "is" if height == width else f"with --aspect_ratio {config.data.aspect_ratio} gives sides that are"
        multiple = divisor * (size // common)
        remedy = f"pass {max(1, round(size / multiple)) * multiple}"
    if config.network.network == UNET and common % divisor > 0:
        problem = f"--image_size {size} {sides} not divisible by {divisor}"
        raise UsageError(f"{problem}, as the {levels} levels of --dim_mults require; {remedy}")
