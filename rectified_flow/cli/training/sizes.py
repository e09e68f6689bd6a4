"""The sizes of networks that a plan chooses from."""

from collections.abc import Sequence
from math import gcd
from typing import Any

from rectified_flow.cli.flags.training import TrainConfig, TrainRectifiedFlow
from rectified_flow.cli.training import recipe

SIZES = {16: 0, 24: 4_000, 32: 16_000, 48: 60_000, 64: 250_000}
"""Values of ``--dim`` in rising order, and the least number of images for which each is better than the one before."""
STARTER_DIM = 32
"""Channels of the network whose weights are those of ``--init_from starter``."""
STARTER_SIDE = 32
"""Least side of the pictures of a run that starts from the starter; more than 85% of its weights then come from it."""
MOST_LEVELS = 5
"""Largest number of levels of the network."""


def chooses_network(config: TrainConfig) -> bool:
    """Return whether the plan chooses the network, with levels that fit the sides of the data."""
    is_free = recipe.budget_of(config) is not None and recipe.fixed_flags(config).isdisjoint(recipe.NETWORK_FLAGS)
    return is_free and config.teacher_data is None


def suits_starter(config: TrainConfig) -> bool:
    """Return whether this run can start from the starter, an RGB rectified flow that predicts velocities."""
    data, unlike = config.data, {"init_from", "prediction", "flow", "space", "alpha", "autoencoder"} & config.given
    own_pictures = data.dataset_path is not None and data.space is None
    return isinstance(config, TrainRectifiedFlow) and own_pictures and not unlike


def flags_of(dim: int, sides: Sequence[int]) -> dict[str, Any]:
    """Return the flags of a network of a width for data of these sides.

    The network has up to five levels. Each level after the first halves the sides, as long as they stay integers and
    the shorter one stays at least 8.
    """
    levels = 1
    while levels < MOST_LEVELS and min(sides) // 2**levels >= recipe.SMALLEST_SIDE and gcd(*sides) % 2**levels == 0:
        levels += 1
    options = ("blocks_per_level=1", f"attention_sides=[{min(sides) // 2 ** (levels - 1)}]")
    mults = (*[1] * (levels - 3), *(1, 2, 3)[:levels])
    return {"dim": dim, "dim_mults": mults, "network_options": options, "dropout": 0.0}
