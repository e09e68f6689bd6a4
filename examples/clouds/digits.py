"""The data: scikit-learn's handwritten digits as clouds of points, which need no download."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from conditions import Vector
from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import PointClouds
from rectified_flow import Labels, randomness
from rectified_flow.condition import Condition

DIGITS, SIDE = 10, 8
PICTURES = 1797
"""Pictures of scikit-learn's dataset."""
GEOMETRIES: dict[str, Geometry] = {"plane": Euclidean(2), "sphere": Sphere(3), "torus": FlatTorus(2)}
EXTENT = {"plane": 2.0, "sphere": 1.2, "torus": 0.4}
"""Half the side of a digit: in the plane, in radians, and as a share of the way around."""
UPWARDS = torch.tensor([1.0, -1.0])
"""Factors from rows that count downwards to coordinates that point upwards."""
TINY = 1e-6


class Digits:
    """Digits as points of the square ``[-1, 1]^2``, and wrapped onto a geometry.

    Args:
        name: name of the geometry.
        points: largest number of points of a cloud; the smallest is half of it.
        missing: share of the training clouds whose conditions are missing, each on its own.
    """

    def __init__(self, name: str, points: int, missing: float = 0.0) -> None:
        from sklearn.datasets import load_digits

        self.geometry, self.extent, self.missing = GEOMETRIES[name], EXTENT[name], missing
        pictures, labels = load_digits(return_X_y=True)
        self.pictures, self.labels = torch.tensor(pictures), torch.tensor(labels)
        self.clouds = [self.wrap(self._scatter(number, points)) for number in range(len(self.labels))]
        self.moments = torch.stack([self.moments_of(cloud, cloud.new_ones(len(cloud))) for cloud in self.clouds])
        self.kinds: dict[str, Condition] = {"labels": Labels(DIGITS), "moments": Vector.of(self.moments)}

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

    def moments_of(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return width, height and slant ``[..., 3]`` of clouds ``[..., n, d]`` with weights ``[..., n]``.

        They are the standard deviations of the unwrapped points across and upwards, and their correlation.
        """
        w, flat = weights / weights.sum(dim=-1, keepdim=True), self.unwrap(x)
        centred = flat - (w[..., None] * flat).sum(dim=-2, keepdim=True)
        spread = (w[..., None] * centred.square()).sum(dim=-2).sqrt().clamp(min=TINY)
        product = (w * centred.prod(dim=-1)).sum(dim=-1)
        return torch.cat((spread, (product / spread.prod(dim=-1))[..., None]), dim=-1)

    def rasterise(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return pictures ``[b, 64]`` of clouds ``[b, n, d]``, each with sum 1."""
        pixels = ((self.unwrap(x) * UPWARDS + 1) * (SIDE / 2)).floor()
        inside = ((pixels >= 0) & (pixels < SIDE)).all(dim=2)
        numbers = (pixels[..., 1] * SIDE + pixels[..., 0]).long() * inside
        pictures = torch.zeros(len(x), SIDE * SIDE).scatter_add_(1, numbers, weights * inside)
        return pictures / pictures.sum(dim=1, keepdim=True).clamp(min=TINY)

    def split(self, held_out: int) -> tuple[PointClouds, PointClouds, PointClouds]:
        """Return the clouds to train on, and twice ``held_out`` other clouds with equally many of each digit."""
        each = held_out // DIGITS
        rows = [(self.labels == digit).nonzero().flatten() for digit in range(DIGITS)]
        first, second, rest = zip(*(numbers.tensor_split((each, 2 * each)) for numbers in rows), strict=True)
        one, two = (self._part(torch.cat(numbers).tolist()) for numbers in (first, second))
        return self._part(torch.cat(rest).tolist(), self.missing), one, two

    def _part(self, rows: Sequence[int], missing: float = 0.0) -> PointClouds:
        values = {"labels": self.labels[rows], "moments": self.moments[rows]}
        for name, known in values.items() if missing else ():
            lost = torch.rand(len(rows), generator=randomness.generator("cpu", f"missing {name}")) < missing
            none = self.kinds[name].none_like(known)
            values[name] = torch.where(lost.reshape(-1, *[1] * (known.ndim - 1)), none, known)
        # All parts are padded alike: the noise of a sample has as many points as a training cloud.
        size = max(map(len, self.clouds))
        clouds = [self.clouds[row] for row in rows]
        return PointClouds(clouds, self.geometry, conditions=values, kinds=self.kinds, size=size)
