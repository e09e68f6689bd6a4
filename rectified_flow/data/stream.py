"""The order in which the items of a dataset are read, and the batches of each process and micro-batch."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from rectified_flow.data import GlobalBatch
from rectified_flow.randomness import mix

Indices = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Batch = dict[str, Any]  # a batch of a dataset: tensors [b, ...] by name, and other values such as captions


def image_indices(positions: Sequence[int] | Indices, length: int, seed: int) -> Indices:
    """Return the image index at each position of the endless stream over ``length`` images."""
    epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), length)
    different, which = np.unique(epochs, return_inverse=True)  # many, if a large batch is of few images
    return permuted(offsets, length, [mix(seed, "epoch", epoch) for epoch in different.tolist()], which)


def permuted(offsets: Indices, length: int, keys: Sequence[int], which: Indices | int = 0) -> Indices:
    """Return the image of each offset under the permutation of ``range(length)`` chosen by the key ``keys[which]``.

    A Feistel network on the smallest even number of bits that covers ``length``, walked until it lands inside (Black &
    Rogaway 2002, "Ciphers with arbitrary finite domains"): no table, however many images there are.
    """
    which = np.broadcast_to(which, offsets.shape)
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    rounds = np.array([[mix(key, round_) for key in keys] for round_ in range(6)], np.uint64)[:, which]
    values = _feistel(offsets.astype(np.uint64), half, rounds)
    while (outside := values >= length).any():
        values[outside] = _feistel(values[outside], half, rounds[:, outside])
    return values.astype(np.int64)


def _feistel(values: Words, half: int, rounds: Words) -> Any:
    mask = np.uint64(2**half - 1)
    left, right = values >> np.uint64(half), values & mask
    for keys in rounds:
        mixed = (right ^ keys) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << np.uint64(half)) | right


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return ``most`` of the numbers, or all if there are fewer, in their order. A larger ``most`` only adds numbers.

    The choice is pseudorandom with a fixed seed, and stratified: each half, quarter, eighth and so on of the numbers
    has its share of it (Owen 1995, "Randomly permuted (t,m,s)-nets"). A constant stride would miss classes that
    alternate with the same period.
    """
    if most >= len(numbers):
        return [*numbers]
    ranks = np.zeros(1, np.int64)
    while len(ranks) < len(numbers):  # each place becomes two, and a random one of them keeps the rank
        second = permuted(np.arange(len(ranks)), len(ranks), [mix("spread", len(ranks))]) % 2
        ranks = np.stack((ranks + second * len(ranks), ranks + (1 - second) * len(ranks)), axis=1).flatten()
    return [numbers[place] for place in np.sort(np.argsort(ranks[: len(numbers)])[:most]).tolist()]


@dataclass(frozen=True)
class StreamSampler:
    """Endless batch sampler of one rank: the numbers of its micro-batches' images from ``position`` on.

    The number of an image is its index in the dataset, plus ``length`` for each epoch before.
    """

    length: int
    seed: int
    batch: GlobalBatch
    rank: int = 0
    position: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        position = self.position
        while True:
            end = position + self.batch.total
            for micro_batch in range(self.batch.accumulation):
                rows = self.batch.rows(self.rank, micro_batch)
                positions = np.arange(position + rows.start, end, rows.step)
                epochs = positions // self.length
                yield (epochs * self.length + image_indices(positions, self.length, self.seed)).tolist()
            position = end


class Batches(Dataset[dict[str, Any]]):
    """Any map-style dataset, for a loader that fetches batches whole.

    Where the dataset has a method ``read_batch(indices)``, as :class:`ImageDataset` has, that returns a dict of tensors
    in one read. Else its items are stacked. The loader's collate function is ``dict``, as batches arrive complete.
    If the dataset has a true attribute ``varies``, ``read_batch`` gets the numbers of :class:`StreamSampler`, and may
    return other values for an item in each epoch; otherwise it gets indices below the length.

    Args:
        dataset: items are dicts of tensors, ``image``, or ``(image, label)``.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        batch = getattr(self.dataset, "read_batch", None)
        if not getattr(self.dataset, "varies", False):
            length = len(self.dataset)  # type: ignore[arg-type]
            indices = [index % length for index in indices]
        if batch is not None:
            return dict(batch(indices))
        fetch = getattr(self.dataset, "__getitems__", None)
        return collate(fetch(indices) if fetch is not None else [self.dataset[index] for index in indices])


def collate(items: Sequence[Any]) -> dict[str, Any]:
    """Stack items, dicts of tensors, ``image``, or ``(image, label)``, into the dict that a flow takes by keyword."""
    with torch.autocast("cpu", enabled=False):  # which cannot stack float16
        batch = default_collate(list(items))
    if isinstance(batch, dict):
        return batch
    values = [batch] if isinstance(batch, Tensor) else batch
    return dict(zip(("images", "labels"), values, strict=False))


PROBES = 64  # items that are hashed


def fingerprint_of(dataset: Dataset[Any]) -> str:
    """Return the dataset's own ``fingerprint``, or else a hash of its length and of some 64 items spread over it.

    Items with random augmentation are read with fixed seeds. If they still differ from one read to the next, only the
    length counts.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own)
    length = len(dataset)  # type: ignore[arg-type]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        first, again = (_hash_items(dataset, length) for _ in range(2))
    random.setstate(states[0])
    np.random.set_state(states[1])
    return first if first == again else f"{length} items"


def _hash_items(dataset: Dataset[Any], length: int) -> str:
    digest = blake2b(str(length).encode(), digest_size=16)
    for index in np.unique(np.linspace(0, length - 1, min(length, PROBES)).astype(int)).tolist():
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        for name, value in sorted(Batches(dataset).__getitems__([index]).items()):
            digest.update(name.encode() + _bytes(value))
    return digest.hexdigest()


def _bytes(value: object) -> bytes:
    if isinstance(value, Tensor):
        header = f"{value.dtype} {tuple(value.shape)}".encode()
        return header + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return repr(value).encode()
