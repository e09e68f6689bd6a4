"""Checks of the sides of the data."""

from math import gcd

from rectified_flow.cli.config import UNET, TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import name_of
from rectified_flow.spaces.space import Space
from rectified_flow.system.terminal import size_text


def check_sides(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if the levels of the Unet cannot halve the sides of the pictures, or of their latents."""
    size, levels = config.data.image_size, len(config.network.dim_mults)
    shape = space.shape or config.data.framing.shape
    if len(shape) < 3:  # items that are not pictures, for a registered network
        return
    height, width = shape[-2:]
    divisor, common = 2 ** (levels - 1), gcd(height, width)
    if name_of(config.network.network) == UNET and common % divisor > 0:
        kind = "pictures" if space.autoencoder is None else "latents"
        problem = f"--image_size {size} gives {kind} of {size_text(width, height)}, not divisible by {divisor}"
        multiple = divisor * (size // common)
        remedy = f"pass {max(1, round(size / multiple)) * multiple}"
        raise UsageError(f"{problem}, as the {levels} levels of --dim_mults require: {remedy}")
