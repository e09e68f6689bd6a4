"""The data: scikit-learn's handwritten digits as clouds of points on the sphere, which need no download."""

from collections.abc import Sequence
from hashlib import sha256

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow import Labels, randomness
from sphere import exp

DIGITS, SIDE = 10, 8
EXTENT = 1.2
"""Half the side of a digit [radians]."""
UPWARDS = torch.tensor([1.0, -1.0])
"""Factors from rows that count downwards to coordinates that point upwards."""


class Digits(Dataset[dict[str, Tensor]]):
    """Items with ``clouds`` ``[n, 3]`` and ``labels``.

    Args:
        points: number of points of a cloud.
    """

    def __init__(self, points: int) -> None:
        from sklearn.datasets import load_digits

        pictures, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
        self.entries = {"clouds": to_sphere(scatter(pictures, points)), "labels": labels}
        self.conditions = {"labels": Labels(DIGITS)}
        self.description = f"{len(self):,} clouds of {points} points"
        self.fingerprint = sha256(self.entries["clouds"].numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.entries["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.entries.items()}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the entries of some items, ``[b, ...]``."""
        return {name: values[torch.as_tensor(indices)] for name, values in self.entries.items()}


def scatter(pictures: Tensor, points: int) -> Tensor:
    """Draw points ``[b, n, 2]`` in the square [-1, 1], with the ink of a pixel as its probability."""
    draw = randomness.generator("cpu", "digits")
    pixels = pictures.multinomial(points, replacement=True, generator=draw)
    places = torch.stack((pixels % SIDE, pixels // SIDE), dim=2) + torch.rand(*pixels.shape, 2, generator=draw)
    return (places * (2 / SIDE) - 1) * UPWARDS


def to_sphere(flat: Tensor) -> Tensor:
    """Wrap points of the square around the pole."""
    pole = torch.tensor([0.0, 0.0, 1.0]).expand(*flat.shape[:-1], 3)
    return exp(pole, EXTENT * F.pad(flat, (0, 1)))
