"""The sample stream: which images the global batch at a position holds, found without state.

A position is the number of images consumed so far. Positions ``[e n, (e + 1) n)`` of a dataset of ``n`` images are
epoch ``e``: a permutation that is a function of (seed, e), so each epoch visits every image once and batches run across
its end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from rectified_flow.randomness import mix

Indices = np.ndarray[Any, np.dtype[np.int64]]


def image_indices(positions: Sequence[int] | Indices, length: int, seed: int) -> Indices:
    """The image index at each position of the endless stream over ``length`` images."""
    epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), length)
    indices = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        now = epochs == epoch
        indices[now] = permuted(offsets[now], length, mix(seed, "epoch", int(epoch)))
    return indices


def permuted(offsets: Indices, length: int, key: int) -> Indices:
    """The images of ``offsets`` under a permutation of ``range(length)`` chosen by ``key``.

    A Feistel network on the smallest even number of bits that covers ``length``, walked until it lands inside (Black &
    Rogaway 2002, "Ciphers with arbitrary finite domains"): no table, however many images there are.
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    keys = [mix(key, round_) for round_ in range(6)]
    values = _feistel(offsets.astype(np.uint64), half, keys)
    while (outside := values >= length).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray[Any, np.dtype[np.uint64]], half: int, keys: list[int]) -> Any:
    mask = np.uint64(2**half - 1)
    left, right = values >> np.uint64(half), values & mask
    for key in keys:
        mixed = (right ^ np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << np.uint64(half)) | right


@dataclass(frozen=True)
class GlobalBatch:
    """How one step's global batch is cut over processes and accumulation.

    Micro-batch ``m`` of rank ``k`` takes every ``(world_size * accumulation)``-th row, starting at row
    ``m * world_size + k``.
    """

    per_process: int
    world_size: int = 1
    accumulation: int = 1

    @property
    def parts(self) -> int:
        """Micro-batches in the global batch."""
        return self.world_size * self.accumulation

    @property
    def total(self) -> int:
        """Rows in the global batch."""
        return self.per_process * self.parts

    def rows(self, rank: int, micro_batch: int) -> slice:
        """The rows of one rank's micro-batch."""
        return slice(micro_batch * self.world_size + rank, None, self.parts)

    def __str__(self) -> str:
        return (
            f"{self.per_process} per process x {self.world_size} process{'es' * (self.world_size > 1)}"
            f" x {self.accumulation} accumulation = {self.total}"
        )


@dataclass(frozen=True)
class StreamSampler:
    """Endless batch sampler of one rank: the image indices of its micro-batches from ``position`` on."""

    length: int
    seed: int
    batch: GlobalBatch
    rank: int = 0
    position: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position
        while True:
            indices = image_indices(np.arange(position, position + self.batch.total), self.length, self.seed)
            for micro_batch in range(self.batch.accumulation):
                yield indices[self.batch.rows(self.rank, micro_batch)].tolist()
            position += self.batch.total


def collate(items: Any) -> dict[str, Tensor]:
    """Make the dict of tensors that a flow takes by keyword.

    Accepts what a dataset's ``__getitems__`` has batched, or a list of dicts, ``image``, or ``(image, label)`` items.
    """
    batch = items if isinstance(items, dict) else default_collate(items)
    if isinstance(batch, Tensor):
        return {"images": batch}
    if isinstance(batch, dict):
        return batch
    return dict(zip(("images", "labels"), batch, strict=False))
