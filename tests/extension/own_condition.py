"""A kind of column of one's own: angles in degrees, of which 0 and 360 are the same."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from rectified_flow import register
from rectified_flow.condition import WrittenCondition
from tests.extension.own_pictures import Squares


@register
class Angle(WrittenCondition):
    """Angles, float32 ``[b]``; NaN stands for "none"."""

    column_type = "angle"

    @classmethod
    def fit(cls, texts: Sequence[str], **options: Any) -> Self:
        return cls()

    def parse(self, texts: Sequence[str]) -> Tensor:
        return torch.tensor([float(text) for text in texts])

    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), torch.nan, device=device)

    def embedding(self, dim: int) -> nn.Module:
        return OnCircle(dim)


class OnCircle(nn.Linear):
    """A linear map of sine and cosine; its bias alone for "none"."""

    def __init__(self, dim: int) -> None:
        super().__init__(2, dim)

    def forward(self, values: Tensor) -> Tensor:
        angles = values.deg2rad()
        return super().forward(torch.stack((angles.sin(), angles.cos()), dim=1).nan_to_num())


class Dials(Squares):
    """The squares, each with an angle."""

    def read_table(self) -> dict[str, list[int]]:
        return {"turn": [18 * index for index in range(20)]}


@register(role="dataset")
def dials() -> Dials:
    """Return the dials."""
    return Dials()
