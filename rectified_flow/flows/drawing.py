"""Samples by number: sample ``i`` of seed ``s`` is the same in any batch, on any process and device."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rectified_flow.flows.flow import Flow
from rectified_flow.randomness import Samples, deterministic


def draw(
    flow: Flow,
    numbers: Sequence[int],
    *,
    seed: int = 0,
    batch_size: int = 64,
    conditions: Mapping[str, Tensor] | None = None,
    start: Tensor | None = None,
    with_alpha: bool = False,
    **options: Any,
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield numbers of samples, and a picture of each, uint8 ``[b, 3, h, w]``, a batch at a time.

    Args:
        flow: the flow to sample from.
        numbers: which samples.
        seed: of all of them.
        batch_size: at most so many at once.
        conditions: sample ``i`` has row ``i % n`` of each of these ``[n, ...]``; one that is left out is drawn.
        start: sample ``i`` starts from row ``i % n`` of these data ``[n, ...]``.
        with_alpha: of pictures with transparency, yield RGBA ``[b, 4, h, w]`` and not their colours over white.
        options: further arguments of ``flow.sample``.
    """
    device = next(flow.parameters()).device
    to_picture = flow.space.draw_with_alpha if with_alpha else flow.space.draw
    for first in range(0, len(numbers), batch_size):
        some = numbers[first : first + batch_size]
        given = {name: _rows(values, some).to(device) for name, values in (conditions or {}).items()}
        if start is not None:
            options["start"] = _rows(start, some)
        with deterministic(Samples(seed, some), device):
            yield some, to_picture(flow.sample(len(some), **given, **options))


def _rows(values: Tensor, numbers: Sequence[int]) -> Tensor:
    return values[[number % len(values) for number in numbers]]
