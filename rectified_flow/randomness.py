"""Random draws as a function of (seed, purpose, step), without generator state.

Training wraps each forward pass in :func:`deterministic`. Every draw inside is made for the *global* batch and then
indexed with the rows of this process. A run therefore draws the same numbers on any number of processes, with any
gradient accumulation, and after any restart. Sampling passes :class:`Samples` instead, where each image has its own
draws. Outside of :func:`deterministic`, draws come from torch's default generator.

Inside, torch's default generators are seeded, too, differently on each rank and for each micro-batch. So a module that
calls plain ``torch.randn`` or ``nn.Dropout`` draws other numbers on every rank, and the same ones after a resume.
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
class BatchRows:
    """The rows of one step's global batch that a forward pass processes.

    Args:
        seed: the run's seed.
        step: the optimizer step of the draws.
        total: number of rows in the global batch.
        index: the rows that are present, in order.
    """

    seed: int
    step: int
    total: int
    index: slice | Sequence[int]


@dataclass(frozen=True)
class Samples:
    """Independent samples: the draws of each are a function of (seed, its number), however many others there are.

    They are made on the CPU and then moved, so that every device gets the same numbers.

    Args:
        seed: the seed of all samples.
        index: the number of each sample that is present, in order.
    """

    seed: int
    index: Sequence[int]


Rows = BatchRows | Samples
Device = torch.device | str


class _Draws:
    rows: Rows | None = None
    dropout_keys: Tensor | None = None


_draws = _Draws()


@contextmanager
def deterministic(rows: Rows, device: Device = "cpu") -> Iterator[None]:
    """Make every draw inside the block a function of ``rows``; ``device`` is the device of the forward pass.

    torch's default generators are seeded inside the block, and restored after it. With gradient checkpointing, the
    backward pass must be inside the block, too, since it recomputes activations.
    """
    previous = _draws.rows, _draws.dropout_keys
    _draws.rows = rows
    # The rows determine the first dimension of a random draw.
    _draws.dropout_keys = randint("dropout", 2**31 - 1, (1,), device).to(torch.int32)
    device = torch.device(device)
    # Numbers that differ between ranks, micro-batches and steps, or between samples.
    place: tuple[int | str, ...] = (
        ("samples", *rows.index[:1]) if isinstance(rows, Samples) else (rows.step, rows.total, str(rows.index))
    )
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            _seed(device, mix(rows.seed, "torch", *place))
            yield
    finally:
        _draws.rows, _draws.dropout_keys = previous


def _seed(device: torch.device, seed: int) -> None:
    """Seed torch's generators of the CPU and of ``device``; for all devices, torch.manual_seed takes much longer."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def mix(*values: int | str) -> int:
    """Hash the values to 63 bits. The result is the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(device: Device, *values: int | str) -> torch.Generator:
    """Return a generator seeded with a hash of ``values``."""
    return torch.Generator(device).manual_seed(mix(*values))


def randn(purpose: str, shape: Sequence[int], device: Device, global_rows: Tensor | None = None) -> Tensor:
    """Draw standard normal numbers ``[b, ...]`` for this process's rows, or for ``global_rows`` of the global batch."""
    return _draw(torch.randn, purpose, shape, device, global_rows)


def rand(purpose: str, shape: Sequence[int], device: Device) -> Tensor:
    """Draw uniform numbers ``[b, ...]`` in [0, 1) for this process's rows."""
    return _draw(torch.rand, purpose, shape, device)


def strata(purpose: str, count: int, device: Device) -> Tensor:
    """Draw uniform numbers ``[b]`` in [0, 1), one in each of as many equal parts as the global batch has rows."""
    return _draw(_strata, purpose, (count,), device)


def _strata(shape: Sequence[int], device: Device | None = None, generator: torch.Generator | None = None) -> Tensor:
    u = torch.rand(shape, device=device, generator=generator)
    return (torch.randperm(len(u), device=device, generator=generator) + u) / len(u) if u.ndim else u


def randint(purpose: str, high: int, shape: Sequence[int], device: Device) -> Tensor:
    """Draw integers ``[b, ...]`` in [0, high) for this process's rows."""
    return _draw(partial(torch.randint, high), purpose, shape, device)


def _draw(
    source: Callable[..., Tensor], purpose: str, shape: Sequence[int], device: Device, global_rows: Tensor | None = None
) -> Tensor:
    rows = _draws.rows
    if rows is None:
        drawn = source(tuple(shape), device=device)
        return drawn if global_rows is None else drawn[global_rows]
    if isinstance(rows, Samples):
        streams = (generator("cpu", rows.seed, purpose, index) for index in rows.index)
        return torch.stack([source(tuple(shape[1:]), generator=stream) for stream in streams]).to(device)
    stream = generator(device, rows.seed, purpose, rows.step)
    drawn = source((rows.total, *shape[1:]), device=device, generator=stream)
    return drawn[rows.index if global_rows is None else global_rows]


def dropout(x: Tensor, probability: float, layer: int) -> Tensor:
    """Apply inverted dropout to ``x`` ``[b, ...]`` with a mask that is a hash of (row's key, layer, element).

    A hash needs no generator. The mask is the same in a second pass over the same rows or over the first few of them
    (mean flow has such passes), inside a compiled graph, and on any number of processes.
    """
    keys = _draws.dropout_keys
    if keys is None:
        return F.dropout(x, probability)
    row = x[:1]
    numbers = torch.arange(row.numel(), device=x.device, dtype=torch.int32).view(row.shape)
    elements = torch.empty_like(row, dtype=torch.int32).copy_(numbers)  # in the memory format of x
    rows = keys[: len(x)].view(-1, *[1] * (x.ndim - 1))
    # Without the 0, a compiler for GPUs takes sum and product for an index, which overflows.
    bits = _mix(_mix((elements + layer * 0x3779B9) ^ 0) ^ rows)
    keep = bits >= int(probability * 2**32) - 2**31
    return x * keep * (1 / (1 - probability))


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int32 ``x``, the highest bits best, in the manner of MurmurHash3 (Appleby, public domain).

    The right shift copies the sign bit, which costs one bit of 32.
    """
    x = x * -0x7A143595
    return x.bitwise_xor_(x >> 15).mul_(-0x3D4D51CB)
