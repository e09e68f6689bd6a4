"""Score augmentation (Hou et al. 2025, arXiv:2508.07926): noisy pictures and their targets are transformed alike."""

import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.condition import AugmentationLabels, Kinds, Values
from rectified_flow.flows.flow import expand
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.augmentation import CONTRAST, SHIFT

TOLD: Kinds = {"augmentation": AugmentationLabels(5)}
"""What the network must take: shifts, the cosine and sine of the turn, and the factor, 0 where nothing was done."""


class ScoreAugmented(RectifiedFlow):
    """A rectified flow that is trained on transformed noisy pictures, and told how.

    The transformations are linear: quarter turns, whole-pixel shifts that leave zeros behind, and a factor. So the
    transformed ``x_t`` lies between the transformed ``x_0`` and the transformed noise.

    Args:
        network: takes the conditions :data:`TOLD`.
        probability: of each kind of transformation.
        settings: those of :class:`RectifiedFlow`.
    """

    def __init__(self, network: nn.Module, probability: float, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.probability = probability

    def draw_batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Values]:
        x_0, noise, conditions = super().draw_batch(batch)
        count, device = len(x_0), x_0.device
        happens = (randomness.rand("score augmentation", (count, 3), device) < self.probability).float()
        turns = randomness.randint("quarter turns", 4, (count,), device) * happens[:, 0]
        sizes = randomness.randn("score augmentation sizes", (count, 3), device)
        shifts = (sizes[:, :2] * happens[:, 1:2] * SHIFT * x_0.shape[-1]).round()
        factor = sizes[:, 2] * happens[:, 2] * CONTRAST
        cos, sin = (turns * math.pi / 2).cos().round(), (turns * math.pi / 2).sin().round()
        told = torch.stack((*(shifts / SHIFT / x_0.shape[-1]).T, cos - 1, sin, factor / CONTRAST), dim=1)
        changed = (transformed(each, cos, sin, shifts) * expand(2**factor, each) for each in (x_0, noise))
        return next(changed), next(changed), {**conditions, "augmentation": told}


def transformed(x: Tensor, cos: Tensor, sin: Tensor, shifts: Tensor) -> Tensor:
    """Square pictures ``[b, c, s, s]``, turned by quarters and moved by whole pixels ``[b, 2]``, with zeros behind."""
    moved = 2 * shifts / x.shape[-1]
    rotation = torch.stack((torch.stack((cos, -sin), dim=1), torch.stack((sin, cos), dim=1)), dim=1)
    grid = F.affine_grid(torch.cat((rotation, moved[:, :, None]), dim=2), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)
