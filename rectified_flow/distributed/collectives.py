"""Collective operations. Every process must call each of these functions, in the same order."""

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather
from einops import rearrange
from torch import Tensor

from rectified_flow.errors import RunError
from rectified_flow.system.signals import Interrupted

T = TypeVar("T")


def set_collective_timeout(seconds: float) -> None:
    """Set the timeout of all later collectives. A process that waits longer for the others fails."""
    if dist.is_initialized():
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=seconds))


def on_main(accelerator: Accelerator | PartialState, action: Callable[[], T]) -> T:
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


def any_rank(accelerator: Accelerator | PartialState, value: bool) -> bool:
    """Return whether ``value`` is true on any process, without waiting for the devices."""
    if accelerator.num_processes == 1:
        return value
    # A group that was created elsewhere may have no backend for the CPU.
    device = "cpu" if "cpu:" in dist.get_backend_config() else accelerator.device
    vote = torch.tensor(int(value), device=device)
    dist.all_reduce(vote, dist.ReduceOp.MAX)
    return bool(vote)


def gather_scalars(accelerator: Accelerator, values: dict[str, Tensor]) -> dict[str, list[float]]:
    """Return the values of each scalar by rank, gathered in one collective."""
    if not values:
        return {}
    by_rank = accelerator.gather(torch.stack(list(values.values())).float()[None])
    return dict(zip(values, by_rank.T.tolist(), strict=True))


def map_over_ranks(state: Accelerator | PartialState, total: int, function: Callable[[list[int]], Tensor]) -> Tensor:
    """Apply a function to an equal share of ``total`` items on every process, and gather the rows of all items.

    Rank ``k`` of ``n`` takes the items ``k, k + n, k + 2 n, ...``. Every rank takes equally many: items past the end
    start again at item 0, and their rows are dropped.

    A stop request may interrupt the function on one process alone. So the processes agree on that before they gather,
    and none waits for rows that never come.

    Args:
        state: Accelerate's state of the processes.
        total: number of items.
        function: maps the numbers of some items to a row for each, ``[n, ...]``. It contains no collectives.

    Returns:
        The rows in the order of the items, ``[total, ...]``, on the CPU.

    Raises:
        Interrupted: on every process, if the function raised it on one.
    """
    rows, request, world_size = None, "", state.num_processes
    try:
        rows = function([(state.process_index + world_size * i) % total for i in range(-(-total // world_size))])
    except Interrupted as interrupted:
        request = str(interrupted)
    if any_rank(state, rows is None) or rows is None:
        raise Interrupted(request or "on another process")
    by_rank = gather(rows.to(state.device))
    return rearrange(by_rank, "(world s) ... -> (s world) ...", world=world_size)[:total].cpu()


def check_equal_weights(accelerator: Accelerator, parameters: Iterable[Tensor]) -> None:
    """Compare a checksum of each parameter between the processes.

    Raises:
        RunError: if they differ; the message names the ranks whose weights differ from those of the majority.
    """
    # The bits of each value, as an integer of its size.
    bits = [p.detach().view(getattr(torch, f"int{8 * p.element_size()}")) for p in parameters]
    sums = [each.sum(dtype=torch.int64) for each in bits]
    by_rank = [tuple(row) for row in accelerator.gather(torch.stack(sums)[None]).tolist()]
    (most, count), *_ = Counter(by_rank).most_common()
    if count < len(by_rank):
        strangers = ", ".join(str(rank) for rank, row in enumerate(by_rank) if row != most)
        difference = f"the weights on rank {strangers} differ from those on the others, so nothing is saved"
        raise RunError(f"{difference}: check that machine's memory and GPU, then run the same command to resume")
