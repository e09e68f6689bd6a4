"""A degradation of one's own: fewer levels of brightness."""

from torch import Tensor

from rectified_flow import register
from rectified_flow.spaces.degradations import Degradation


@register
class Posterised(Degradation):
    """Values rounded to ``levels`` levels in [-1, 1]."""

    is_projection = True

    def __init__(self, levels: int) -> None:
        self.levels = levels

    def __call__(self, x: Tensor) -> Tensor:
        return ((x + 1) / 2 * (self.levels - 1)).round() / (self.levels - 1) * 2 - 1
