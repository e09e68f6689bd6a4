"""A fingerprint of any dataset, by which a run notices that it resumes on other data."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow.data.stream import Batches

PROBES = 64
"""Items that are hashed."""


def fingerprint_of(dataset: Dataset[Any]) -> str:
    """The dataset's own ``fingerprint``, or else a hash of its length and of some 64 items spread over it.

    Items with random augmentation are read with fixed seeds. If they still differ from one read to the next, only the
    length counts.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own)
    length = len(dataset)  # type: ignore[arg-type]
    first, again = (_hash_items(dataset, length) for _ in range(2))
    return first if first == again else length_only(length)


def length_only(length: int) -> str:
    """The fingerprint of a dataset of which only the length is known; version 0.1 knew no more."""
    return f"{length} items"


def _hash_items(dataset: Dataset[Any], length: int) -> str:
    digest = blake2b(str(length).encode(), digest_size=16)
    batches = Batches(dataset)
    for index in np.unique(np.linspace(0, length - 1, min(length, PROBES)).astype(int)).tolist():
        with _fixed_seeds():
            item = batches.__getitems__([index])
        for name, value in sorted(item.items()):
            digest.update(name.encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(value: object) -> bytes:
    if isinstance(value, Tensor):
        header = f"{value.dtype} {tuple(value.shape)}".encode()
        return header + value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return repr(value).encode()


@contextmanager
def _fixed_seeds() -> Iterator[None]:
    """The generators of Python, NumPy and torch seeded inside the block, and as they were after it."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
