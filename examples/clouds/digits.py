"""The data: scikit-learn's handwritten digits as clouds of points, which need no download."""

import torch
import torch.nn.functional as F
from torch import Tensor

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import PointClouds
from rectified_flow import randomness

DIGITS, SIDE = 10, 8
PICTURES = 1797
"""Pictures of scikit-learn's dataset."""
GEOMETRIES: dict[str, Geometry] = {"plane": Euclidean(2), "sphere": Sphere(3), "torus": FlatTorus(2)}
EXTENT = {"plane": 2.0, "sphere": 1.2, "torus": 0.4}
"""Half the side of a digit: in the plane, in radians, and as a share of the way around."""
UPWARDS = torch.tensor([1.0, -1.0])
"""Factors from rows that count downwards to coordinates that point upwards."""


class Digits:
    """Digits as points of the square ``[-1, 1]^2``, and wrapped onto a geometry.

    Args:
        name: name of the geometry.
        points: largest number of points of a cloud; the smallest is half of it.
    """

    def __init__(self, name: str, points: int) -> None:
        from sklearn.datasets import load_digits

        self.geometry, self.extent = GEOMETRIES[name], EXTENT[name]
        pictures, labels = load_digits(return_X_y=True)
        self.pictures, self.labels = torch.tensor(pictures), torch.tensor(labels)
        self.clouds = [self.wrap(self._scatter(number, points)) for number in range(len(self.labels))]

    def _scatter(self, number: int, points: int) -> Tensor:
        """Draw points in the pixels of a picture, with the ink of a pixel as its probability."""
        draw = randomness.generator("cpu", "digit", number)
        count = int(torch.randint(points // 2, points + 1, (), generator=draw))
        pixels = self.pictures[number].multinomial(count, replacement=True, generator=draw)
        places = torch.stack((pixels % SIDE, pixels // SIDE), dim=1) + torch.rand(count, 2, generator=draw)
        return (places * (2 / SIDE) - 1) * UPWARDS

    def wrap(self, flat: Tensor) -> Tensor:
        """Map points of the square around the sphere's pole, or across the torus's edges."""
        padded = F.pad(flat, (0, self.geometry.dim - 2))
        return self.geometry.exp(self._centre.expand_as(padded), self.extent * padded)

    def unwrap(self, x: Tensor) -> Tensor:
        """Map points back to the square, or beside it."""
        return self.geometry.log(self._centre.to(x).expand_as(x), x)[..., :2] / self.extent

    @property
    def _centre(self) -> Tensor:
        """The pole of the sphere, else the origin."""
        return torch.tensor([0.0] * (self.geometry.dim - 1) + [float(isinstance(self.geometry, Sphere))])

    def rasterise(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return pictures ``[b, 64]`` of clouds ``[b, n, d]``, each with sum 1."""
        pixels = ((self.unwrap(x) * UPWARDS + 1) * (SIDE / 2)).floor()
        inside = ((pixels >= 0) & (pixels < SIDE)).all(dim=2)
        numbers = (pixels[..., 1] * SIDE + pixels[..., 0]).long() * inside
        pictures = torch.zeros(len(x), SIDE * SIDE).scatter_add_(1, numbers, weights * inside)
        return pictures / pictures.sum(dim=1, keepdim=True).clamp(min=1e-6)

    def split(self, held_out: int) -> tuple[PointClouds, PointClouds, PointClouds]:
        """Return the clouds to train on, and twice ``held_out`` other clouds with equally many of each digit."""
        each, size = held_out // DIGITS, max(map(len, self.clouds))
        rows = [(self.labels == digit).nonzero().flatten() for digit in range(DIGITS)]
        first, second, rest = zip(*(numbers.tensor_split((each, 2 * each)) for numbers in rows), strict=True)
        # All parts are padded alike: the noise of a sample has as many points as a training cloud.
        one, two, training = (self._part(torch.cat(numbers), size) for numbers in (first, second, rest))
        return training, one, two

    def _part(self, rows: Tensor, size: int) -> PointClouds:
        clouds = [self.clouds[row] for row in rows.tolist()]
        return PointClouds(clouds, self.labels[rows], self.geometry, classes=DIGITS, size=size)
