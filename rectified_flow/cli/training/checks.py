"""Checks of the sides of the data and of the memory that a run needs."""

from math import gcd, prod

from accelerate import PartialState

from rectified_flow.cli.flags.model import UNET
from rectified_flow.cli.flags.training import TrainConfig
from rectified_flow.errors import UsageError
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.space import Space
from rectified_flow.system.machine import require_memory

LEAST_ACTIVATIONS = {False: 80, True: 32}
"""Lower bound of the activations of the Unet in bf16, without and with gradient checkpointing: bytes for each pixel and
each of ``dim`` channels. A Unet of one level and one block has 92 and 40 at dim 128."""


def check_sides(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if the levels of the Unet cannot halve the sides of the pictures, or of their latents."""
    size, levels = config.data.image_size, len(config.network.dim_mults)
    divisor = 2 ** (levels - 1)
    if isinstance(space, Latents):
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


def require_room_for_batch(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if a batch cannot fit into a CPU's memory, where the system would kill the process.

    Before the memory is full, a single layer could take minutes, during which signals are not handled.

    Args:
        config: all flags.
        space: the space of the flow.
    """
    state, pixels = PartialState(), prod((space.shape or (0,))[1:])
    if state.device.type != "cpu" or config.network.network != UNET:
        return
    count = config.run.split_batch(state.num_processes).per_process
    activations = LEAST_ACTIVATIONS[config.network.gradient_checkpointing] * count * config.network.dim * pixels
    remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
    require_memory(activations, f"a batch of {count} images of {config.data.framing.size_text} px", remedy)
