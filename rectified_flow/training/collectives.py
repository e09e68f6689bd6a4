"""Everything the processes do together. All of them must call each of these, in the same order."""

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from einops import rearrange
from torch import Tensor, nn

T = TypeVar("T")


def on_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Run ``action`` on the main process; every process returns its result or raises its exception."""
    outcome: list[object] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if isinstance(outcome[1], Exception):
        raise outcome[1]
    return outcome[0]  # type: ignore[return-value]


def mean_over_ranks(accelerator: Accelerator, values: dict[str, Tensor]) -> dict[str, float]:
    """The mean of each scalar over all processes, in one reduction."""
    if not values:
        return {}
    means = accelerator.reduce(torch.stack(list(values.values())).float(), reduction="mean")
    return dict(zip(values, means.tolist(), strict=True))


def gather_interleaved(accelerator: Accelerator, share: Tensor, total: int) -> Tensor:
    """Join shares ``[s, ...]`` in which rank ``k`` holds items ``k, k + world_size, ...`` into ``[total, ...]``."""
    everything = accelerator.gather(share)
    return rearrange(everything, "(world s) ... -> (s world) ...", world=accelerator.num_processes)[:total]


def check_equal_weights(accelerator: Accelerator, module: nn.Module) -> None:
    """Compare a checksum of every weight over the processes.

    Raises:
        RuntimeError: naming the ranks whose weights differ from the main process's.
    """
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().view(bits[p.element_size()]).sum(dtype=torch.int64) for p in module.parameters()]
    by_rank = accelerator.gather(torch.stack(sums)[None])
    strangers = (by_rank != by_rank[:1]).any(dim=1).nonzero().flatten().tolist()
    if strangers:
        raise RuntimeError(f"the weights on rank {', '.join(map(str, strangers))} differ from those on rank 0")
