"""A dataset and a condition of one's own: grey ramps, conditioned on how bright they are."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from rectified_flow import randomness, register
from rectified_flow.condition import Condition


@register
@dataclass(frozen=True)
class Level(Condition):
    """A number in [0, 1], float32 ``[b]``; -1 stands for "none"."""

    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count,), -1.0, device=device)

    def draw(self, name: str, count: int, device: torch.device) -> Tensor:
        return randomness.rand(f"sample {name}", (count,), device)

    def embedding(self, dim: int) -> nn.Module:
        return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, dim))


class Ramps(Dataset[dict[str, Tensor]]):
    """Items are dicts of tensors; everything after ``__getitem__`` is optional."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        picture = torch.linspace(-1, 1, 192).reshape(3, 8, 8) * index / 20
        return {"images": picture, "level": torch.tensor(index / 20)}

    description = "20 grey ramps"
    fingerprint = "ramps, version 1"
    conditions: dict[str, Any] = {"level": Level()}  # noqa: RUF012


@register(role="dataset")
def ramps() -> Ramps:
    """Return the ramps."""
    return Ramps()
