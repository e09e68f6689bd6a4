"""Process-group setup, and collective operations, which every process must call in the same order."""

import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, parse_flag_from_env
from einops import rearrange
from torch import Tensor

from rectified_flow.errors import RunError, UsageError
from rectified_flow.system.signals import Interrupted

T = TypeVar("T")
STARTUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives before the first step: other processes may be reading data, compiling, or not started yet."""
SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Backends of Accelerate that shard the weights, by the name in their environment variable."""


def launched_processes() -> int:
    """Return the number of processes of this launch, which may not have been joined yet."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes() -> PartialState:
    """Join the process group of this launch, on the CPU if there is no accelerator, unless it was joined before."""
    world_size = launched_processes()
    if "RANK" in os.environ:
        # Launchers of one process per machine leave it out, and without it accelerate finds no backend for GPUs.
        os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.accelerator.is_available() or (world_size > 1 and torch.backends.mps.is_available()):
        # Without this, accelerate creates no process group, and each process runs as if it were the only one.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    cpu, gpus = parse_flag_from_env("ACCELERATE_USE_CPU"), torch.cuda.device_count()
    here = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)
    if not cpu and 0 < gpus < here:
        raise UsageError(f"there are more processes than the {gpus} GPUs of this machine: start at most {gpus}")
    if any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in SHARDING):
        raise UsageError("FSDP, DeepSpeed and Megatron-LM are not supported: launch with the type MULTI_GPU")
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} and not dist.is_initialized():
        # Accelerate adopts this group, whose second backend communicates without waiting for the devices.
        device = None if cpu else torch.accelerator.current_accelerator()
        backend = "gloo" if device is None else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend, timeout=STARTUP_TIMEOUT)
    state = PartialState(cpu=cpu)
    if (seen := state.num_processes) != world_size:
        raise UsageError(f"Accelerate has found {seen} of {world_size} processes: start them with torchrun")
    if state.device.type == "cuda":
        _check_kernels(state.device)
    return state


def _check_kernels(gpu: torch.device) -> None:
    """Raise a UsageError if the installed torch has no kernels for a GPU, on which any operation would fail."""
    names = torch.cuda.get_arch_list() if torch.version.cuda else []  # ROCm names its kernels differently
    capability = torch.cuda.get_device_capability(gpu)
    kinds = [(name.partition("_")[0], divmod(int(re.sub(r"\D", "", name)), 10)) for name in names]
    # Machine code runs on GPUs of the same major version, and intermediate code ("compute") on all later ones.
    runs = (v <= capability and (kind == "compute" or v[0] == capability[0]) for kind, v in kinds)
    if kinds and not any(runs):
        lacks = f"the installed torch {torch.__version__} has no kernels for the {torch.cuda.get_device_name(gpu)}"
        remedy = "install a version that has (pytorch.org/get-started), or set ACCELERATE_USE_CPU=true"
        raise UsageError(f"{lacks} (sm_{capability[0]}{capability[1]}): {remedy}")


def check_equal(state: Accelerator | PartialState, facts: Callable[[], Mapping[str, object]]) -> None:
    """Compare ``facts()``, and the code that runs, between the processes. Collective.

    ``facts`` returns values by a name that is printed in the error.
    """
    if state.num_processes == 1:
        return
    (main_host, ours), *others = gather_object([(platform.node(), {**_versions(), **facts()})])
    for rank, (host, theirs) in enumerate(others, 1):
        pairs = {key: (theirs.get(key), ours.get(key)) for key in ours | theirs}
        differ = [f"{key} is {its!s:.60}, not {main!s:.60}" for key, (its, main) in pairs.items() if its != main]
        if differ:
            first = f"rank {rank} on {host} differs from rank 0 on {main_host}: {'; '.join(differ[:3])}"
            raise UsageError(f"{first}: start every process with the same flags, data and versions")


def check_shared(state: Accelerator | PartialState, output_dir: Path) -> None:
    """Check that all processes see the files that the main one writes into ``output_dir``. Collective."""
    if state.num_processes == 1:
        return
    # A process that is killed leaves an empty hidden file.
    probe = output_dir / on_main(state, lambda: f".shared.{token_hex(4)}.tmp")
    try:
        on_main(state, probe.touch)
        check_equal(state, lambda: {"access to the files of rank 0 in `output_dir`": probe.exists()})
    finally:
        if state.is_main_process:
            probe.unlink(missing_ok=True)


@cache
def _versions() -> dict[str, str]:
    """Return torch's version and a hash of this package's source, since machines may hold different copies."""
    package = Path(__file__).resolve().parent
    source = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    digest = blake2b(source, digest_size=6).hexdigest()
    return {"the version of torch": torch.__version__, f"the source of {package.name}": digest}


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
    return bool(largest(accelerator, int(value)))


def largest(accelerator: Accelerator | PartialState, value: int) -> int:
    """Return the largest ``value`` of all processes, without waiting for the devices."""
    if accelerator.num_processes == 1:
        return value
    # A group that was created elsewhere may have no backend for the CPU.
    device = "cpu" if "cpu:" in dist.get_backend_config() else accelerator.device
    vote = torch.tensor(value, device=device)
    dist.all_reduce(vote, dist.ReduceOp.MAX)
    return int(vote)


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
    """Compare a checksum of each parameter between the processes."""
    # The bits of each value, as an integer of its size.
    bits = [p.detach().view(getattr(torch, f"int{8 * p.element_size()}")) for p in parameters]
    sums = [each.sum(dtype=torch.int64) for each in bits]
    by_rank = [tuple(row) for row in accelerator.gather(torch.stack(sums)[None]).tolist()]
    (most, count), *_ = Counter(by_rank).most_common()
    if count < len(by_rank):
        strangers = ", ".join(str(rank) for rank, row in enumerate(by_rank) if row != most)
        raise RunError(f"the weights on rank {strangers} differ from those on other ranks: check memory and GPU")
