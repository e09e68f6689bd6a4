"""Values and their tangents (`torch.func.jvp`), and the values that two passes over the same rows share.

Mean flow evaluates the network with gradient, and then takes its derivative at the first of the same rows. Layers that
:func:`share` their values compute them in the first pass only, and their tangents in the second.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

LEVEL = 0
"""The index of PyTorch's only level of forward-mode derivatives."""


@dataclass
class _Passes:
    kept: list[Tensor] | None = None
    """By the pass that computes."""
    reused: Iterator[Tensor] | None = None
    """By the pass that comes after, of which ``count`` rows."""
    count: int = 0


_passes = _Passes()


def unpack(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The value of ``x`` and its tangent, if it has one."""
    # Without an explicit level, the compiler would look it up once, find none, and treat that as a constant.
    value, tangent = forward_ad.unpack_dual(x, level=LEVEL if torch.compiler.is_compiling() else None)
    return value, tangent


def with_tangent(value: Tensor, tangent: Tensor) -> Tensor:
    """``value`` with a tangent."""
    return forward_ad.make_dual(value, tangent, level=LEVEL)


@contextmanager
def keeping_values(*, wanted: bool = True) -> Iterator[list[Tensor]]:
    """Inside the block, shared values are kept in the list, if wanted, for :func:`reusing_values`."""
    kept: list[Tensor] = []
    _passes.kept = kept if wanted else None
    try:
        yield kept
    finally:
        _passes.kept = None


def keep_no_more() -> None:
    """Before code whose values do not outlive it; the pass that reuses values computes the later ones again."""
    _passes.kept = None


@contextmanager
def reusing_values(kept: list[Tensor], count: int) -> Iterator[None]:
    """Inside the block, shared values are the first ``count`` rows of those in ``kept``, in their order.

    The network and its draws must be the same as in the pass that kept them, and the inputs its first rows.
    """
    _passes.reused, _passes.count = iter(kept), count
    try:
        yield
    finally:
        _passes.reused = None


def share(compute: Callable[[], Tensor], *, has_tangent: bool) -> Tensor:
    """A value ``[b, ...]``, computed now or in the pass before, which only a value with a tangent can be."""
    if _passes.kept is not None:
        value = compute()
        _passes.kept.append(value.detach())
        return value
    kept = next(_passes.reused, None) if has_tangent and _passes.reused is not None else None
    # A copy: PyTorch wants a tangent laid out like its value.
    return compute() if kept is None else kept[: _passes.count].clone()
