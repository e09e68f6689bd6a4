"""A vector of numbers as a condition of a network, with missing values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rectified_flow import UsageError, register
from rectified_flow.condition import WrittenCondition, as_number

MISSING = "nan"


@register
@dataclass(frozen=True)
class Vector(WrittenCondition):
    """Vectors, float32 ``[b, k]``; a value of NaN is missing, and a row of NaN stands for "none".

    On a command line, the values of a vector are separated by spaces: ``--set "moments=0.4 0.6 nan"``.

    Args:
        mean: mean of each value in the training data, which the network subtracts.
        std: standard deviation of each value, by which the network divides.
    """

    column_type: ClassVar[str] = "vector"
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Return the condition of training data ``[n, k]``, some of which may be NaN."""
        known = values.double().nanmean(dim=0)
        spread = (values.double() - known).square().nanmean(dim=0).sqrt()
        # A column without values, or with equal ones, gets the scale 1.
        spread = torch.where(spread > 0, spread, 1.0)
        return cls(tuple(known.nan_to_num().tolist()), tuple(spread.tolist()))

    @classmethod
    def fit(cls, texts: Sequence[str], **options: Any) -> Self:
        """Return the condition of a column of written vectors."""
        return cls.of(parse_vectors(texts, len(texts[0].split())))

    def parse(self, texts: Sequence[str]) -> Tensor:
        """Return the vectors ``[n, k]`` that are written."""
        return parse_vectors(texts, len(self.mean))

    def none(self, count: int, device: torch.device) -> Tensor:
        """Return ``count`` rows of "none"."""
        return torch.full((count, len(self.mean)), torch.nan, device=device)

    def embedding(self, dim: int) -> nn.Module:
        """Return a module that embeds values as ``[b, dim]``."""
        return VectorEmbedding(self, dim)


def parse_vectors(texts: Sequence[str], size: int) -> Tensor:
    """Return vectors ``[n, size]`` of texts with ``size`` numbers each, of which some may be ``nan``.

    Raises:
        UsageError: if a text has another number of values, or one that is no number.
    """
    rows = []
    for text in texts:
        values = [torch.nan if word.lower() == MISSING else as_number(word) for word in text.split()]
        numbers = [value for value in values if value is not None]
        if len(numbers) != size or len(values) != size:
            raise UsageError(f"{text!r} is not a vector: write {size} numbers, separated by spaces")
        rows.append(numbers)
    return torch.tensor(rows)


class VectorEmbedding(nn.Module):
    """A small network of the known values, and of the map of missing ones."""

    mean: Tensor
    std: Tensor

    def __init__(self, kind: Vector, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(kind.mean), persistent=False)  # the description has it
        self.register_buffer("std", torch.tensor(kind.std), persistent=False)
        self.layers = nn.Sequential(nn.Linear(2 * len(kind.mean), dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, values: Tensor) -> Tensor:
        """Return embeddings ``[b, dim]`` of ``values`` ``[b, k]``."""
        missing = values.isnan()
        known = ((values.float() - self.mean) / self.std).masked_fill(missing, 0.0)
        return self.layers(torch.cat((known, missing.float()), dim=1))
