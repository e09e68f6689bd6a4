"""Pictures by number: a flow's picture ``i`` of seed ``s`` is the same in any batch, on any process and device."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rectified_flow.flows.flow import Flow
from rectified_flow.randomness import Items, rows_of


def draw(
    flow: Flow,
    numbers: Sequence[int],
    *,
    seed: int = 0,
    batch_size: int = 64,
    classes: Sequence[int] = (),
    images: Tensor | None = None,
    **how: Any,
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield numbers of pictures, and the pictures, uint8 ``[b, c, h, w]``, a batch at a time.

    Args:
        flow: what to sample from.
        numbers: which pictures.
        seed: of all of them.
        batch_size: at most so many at once.
        classes: picture ``i`` has the label ``classes[i % len(classes)]``; drawn if there are none.
        images: picture ``i`` starts from ``images[i % len(images)]``, uint8 ``[n, c, h, w]``.
        how: further arguments of ``flow.sample``.
    """
    device = next(flow.parameters()).device
    for start in range(0, len(numbers), batch_size):
        some = numbers[start : start + batch_size]
        if classes:
            how["labels"] = torch.tensor([classes[i % len(classes)] for i in some], device=device)
        if images is not None:
            how["images"] = images[[i % len(images) for i in some]]
        with rows_of(Items(seed, some), device):
            drawn = flow.sample(len(some), **how)
        yield some, drawn.mul(255).round().to(torch.uint8)
