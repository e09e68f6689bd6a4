"""Randomness as a function of (seed, purpose, step), never as a state.

Training enters :func:`rows_of` around each forward pass. Every draw made inside is then drawn for the *global* batch
and cut down to the rows this process holds, so a run draws the same numbers on any number of processes, with any
gradient accumulation, and after any restart. Sampling enters it with :class:`Items`, each a picture with draws of its
own. Outside of it the draws come from torch's default generator.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of one step's global batch that a forward pass works on.

    Args:
        seed: the run's seed.
        step: the optimizer step the draws belong to.
        total: rows in the global batch.
        index: which of them are present, in order.
    """

    seed: int
    step: int
    total: int
    index: slice | Sequence[int]


@dataclass(frozen=True)
class Items:
    """Rows that stand alone: what each draws is a function of its number, not of how many others there are.

    Drawn on the CPU and then moved, so that every device has the same.

    Args:
        seed: of all of them.
        index: the number of each row that is present, in order.
    """

    seed: int
    index: Sequence[int]

    @property
    def total(self) -> int:
        """How many are present."""
        return len(self.index)


class _Ambient:
    rows: Rows | Items | None = None
    dropout_keys: Tensor | None = None


_ambient = _Ambient()


@contextmanager
def rows_of(rows: Rows | Items, device: torch.device | str = "cpu") -> Iterator[None]:
    """Make every draw inside the block a function of ``rows``; ``device`` is where dropout will happen.

    A backward pass that computes activations again belongs inside, too.
    """
    previous = _ambient.rows, _ambient.dropout_keys
    _ambient.rows = rows
    _ambient.dropout_keys = randint("dropout", 2**31 - 1, (rows.total,), device).to(torch.int32)
    try:
        yield
    finally:
        _ambient.rows, _ambient.dropout_keys = previous


def mix(*values: int | str) -> int:
    """Hash the values into 63 bits, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: torch.device | str, *values: int | str) -> torch.Generator:
    """A generator whose stream is a function of ``values``."""
    return torch.Generator(device).manual_seed(mix(*values))


def randn(purpose: str, shape: Sequence[int], device: torch.device | str, instead: Tensor | None = None) -> Tensor:
    """Standard normal draws ``[b, ...]`` for this process's rows, or ``instead`` for those of the global batch."""
    return _draw(torch.randn, purpose, shape, device, instead)


def rand(purpose: str, shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Uniform draws ``[b, ...]`` in [0, 1) for this process's rows."""
    return _draw(torch.rand, purpose, shape, device)


def randint(purpose: str, high: int, shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Integer draws ``[b, ...]`` in [0, high) for this process's rows."""
    return _draw(partial(torch.randint, high), purpose, shape, device)


def _draw(
    source: Callable[..., Tensor],
    purpose: str,
    shape: Sequence[int],
    device: torch.device | str,
    instead: Tensor | None = None,
) -> Tensor:
    rows = _ambient.rows
    if rows is None:
        drawn = source(tuple(shape), device=device)
        return drawn if instead is None else drawn[instead]
    if isinstance(rows, Items):
        streams = (generator("cpu", rows.seed, purpose, index) for index in rows.index)
        return torch.stack([source(tuple(shape[1:]), generator=stream) for stream in streams]).to(device)
    stream = generator(device, rows.seed, purpose, rows.step)
    return source((rows.total, *shape[1:]), device=device, generator=stream)[rows.index if instead is None else instead]


def dropout(x: Tensor, probability: float, layer: int) -> Tensor:
    """Inverted dropout of ``x`` ``[b, ...]`` whose mask is a hash of (row's key, layer, element).

    A hash needs no generator: the mask is the same in a second pass over the same rows or the first few of them (as
    mean flow makes), inside a compiled graph, and on every number of processes.
    """
    keys = _ambient.dropout_keys
    if keys is None:
        return F.dropout(x, probability)
    row = x[:1]
    numbers = torch.arange(row.numel(), device=x.device, dtype=torch.int32).view(row.shape)
    elements = torch.empty_like(row, dtype=torch.int32).copy_(numbers)  # in the memory format of x
    rows = keys[: len(x)].view(-1, *[1] * (x.ndim - 1))
    bits = _mix(_mix(elements + layer * 0x3779B9) ^ rows)
    keep = bits >= int(probability * 2**32) - 2**31
    return x * keep * (1 / (1 - probability))


def _mix(x: Tensor) -> Tensor:
    """Spread the bits of int32 ``x``, the highest best, in the manner of MurmurHash3 (Appleby, public domain).

    That the shift copies the sign costs one bit of 32.
    """
    x = x * -0x7A143595
    return x.bitwise_xor_(x >> 15).mul_(-0x3D4D51CB)
