"""Processes that find each other at the start of a launch, and check that they are about to do the same.

torch's rendezvous and collectives wait in silence, cannot be interrupted, and name at best after their timeout who is
missing (``monitored_barrier``). Here each process writes into the store of the process group when it arrives, and polls
the store for the others.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from secrets import token_hex
from threading import Timer
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import RunError, UsageError, first_line

STARTUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives before the first step: other processes may be reading data, compiling, or not started yet."""
SHARED_TIMEOUT = timedelta(seconds=60)
"""Time in which a file of the main process must appear everywhere: an NFS client may cache a folder for as long
(acdirmax)."""
POLL = 0.1
"""Seconds between two checks of a condition."""
INTERVAL = 30.0
"""Seconds between two lines about a wait."""
SHOWN_FACTS = 3
SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""Backends of Accelerate that shard the weights, by the name in their environment variable."""
_meetings = count()


def wait_for(awaited: Callable[[], str | None], timeout: timedelta) -> str | None:
    """Poll ``awaited`` until it returns None or the timeout expires, and return its last text.

    A text that is not empty is printed to stderr every :data:`INTERVAL` seconds. A signal interrupts this wait, unlike
    the waits inside torch.
    """
    start = printed = time.monotonic()
    while (text := awaited()) is not None and time.monotonic() - start <= timeout.total_seconds():
        if time.monotonic() - printed > INTERVAL:
            printed = time.monotonic()
            if text:
                print(f"waiting for {text}", file=sys.stderr, flush=True)
        time.sleep(POLL)
    return text


def meet(store: Store, name: str, rank: int, world_size: int, absent: str) -> None:
    """Return when all processes have called this function; meanwhile the lowest rank that waits names the missing ones.

    Args:
        store: a store of all processes.
        name: the meeting, each under a name of its own.
        rank: the rank of this process.
        world_size: the number of processes.
        absent: the end of the line about missing ranks.

    Raises:
        RunError: if a process is still missing after :data:`STARTUP_TIMEOUT`.
    """
    keys = [f"meeting/{name}/{each}" for each in range(world_size)]
    store.set(keys[rank], "")

    def missing() -> str | None:
        if store.check(keys):
            return None
        ranks = [each for each in range(world_size) if not store.check([keys[each]])]
        is_lowest = all(each in ranks for each in range(rank))
        return f"{in_words(ranks)} (of {world_size} processes) {absent}" if ranks and is_lowest else ""

    if wait_for(missing, STARTUP_TIMEOUT) is not None:
        raise RunError(f"not all of {world_size} processes came within {STARTUP_TIMEOUT}: start all at once")


def in_words(ranks: Sequence[int]) -> str:
    """Return the ranks as a text, such as ``rank 1`` or ``ranks 1, 2, 3``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def join_processes() -> PartialState:
    """Join the process group of this launch, on the CPU if there is no accelerator; do nothing if it was joined before.

    Raises:
        UsageError: if there are more processes than GPUs, if the processes do not see each other and would each train
            alone, or if the launcher is configured to shard the weights.
        RunError: if the other processes do not come, or no connection to them is possible.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ:
        # Launchers of one process per machine leave it out, and without it accelerate finds no backend for GPUs.
        os.environ.setdefault("LOCAL_RANK", "0")
    if not torch.accelerator.is_available() or (world_size > 1 and torch.backends.mps.is_available()):
        # Without this, accelerate creates no process group, and each process runs as if it were the only one.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    cpu, gpus = parse_flag_from_env("ACCELERATE_USE_CPU"), torch.cuda.device_count()
    here = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0")) + 1)
    fits = cpu or gpus == 0 or here <= gpus
    if not fits:
        raise UsageError(f"there are more processes than the {gpus} GPUs of this machine: start at most {gpus}")
    sharded = any(parse_flag_from_env(f"ACCELERATE_USE_{name}") for name in SHARDING)
    if sharded:
        raise UsageError("FSDP, DeepSpeed and Megatron-LM are not supported: launch with --multi_gpu")
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} and not dist.is_initialized():
        _create_group(cpu, world_size)
    state = PartialState(cpu=cpu)
    seen = state.num_processes
    if seen != world_size:
        raise UsageError(f"Accelerate has found {seen} of {world_size} processes: start them with torchrun")
    return state


def _create_group(cpu: bool, world_size: int) -> None:
    """Create the process group, which Accelerate then adopts.

    Besides the backend of the devices, the group has a CPU backend, which communicates without waiting for the devices.
    After a restart by torchrun on one machine, the processes use a new prefix in torchrun's store, since the store
    still holds the addresses of the dead processes. (On several machines the restart count is not shared, and torchrun
    must create a new store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.)
    """
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = _open_store(rank, address)
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        store = PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    device = None if cpu else torch.accelerator.current_accelerator()
    backend = "gloo" if device is None else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    absent = f"at {address[0]}:{address[1]}, where it has not come yet: is it started, and can it reach that address?"
    meet(store, "joining", rank, world_size, absent)
    unconnected = f"rank {rank} on {platform.node()} cannot connect to the other processes"
    # gloo connects within a call that cannot poll, and may take until the timeout.
    slow = Timer(INTERVAL, lambda: print(f"{unconnected} yet: {_remedy()}", file=sys.stderr))
    slow.start()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=STARTUP_TIMEOUT)
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise RunError(f"{unconnected} ({first_line(error)}): {_remedy()}") from error
    finally:
        slow.cancel()


def _open_store(rank: int, address: tuple[str, int]) -> Store:
    """Open the store at which the processes meet, hosted by rank 0 or its launcher."""
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = f"rank 0 at {address[0]}:{address[1]}"

    def no_answer() -> str | None:
        # torch reports no reason for a failed connection.
        try:
            socket.create_connection(address, timeout=10).close()
        except OSError as error:
            text = f"{place}, which gives rank {rank} on {platform.node()} no answer ({error})"
            return text if os.environ["LOCAL_RANK"] == "0" else ""  # one line from each machine
        return None

    if not hosts and wait_for(no_answer, STARTUP_TIMEOUT) is not None:
        raise RunError(f"no answer from {place} within {STARTUP_TIMEOUT}: check that it is running and reachable")
    # `meet` waits for the workers, and names the missing ones.
    return TCPStore(*address, is_master=hosts, timeout=STARTUP_TIMEOUT, wait_for_workers=False, multi_tenant=True)


def _remedy() -> str:
    """Return a remedy where gloo cannot connect to the addresses that hostnames resolve to."""
    name, own = socket.gethostname(), "nothing"
    with suppress(OSError):
        own = socket.gethostbyname(name)
    interfaces = [
        interface
        for interface, addresses in psutil.net_if_addrs().items()
        if any(each.family == socket.AF_INET and not each.address.startswith("127.") for each in addresses)
    ]
    return (
        f"{name} resolves to {own} on its own machine; open all ports between the machines, or set "
        f"GLOO_SOCKET_IFNAME={' or '.join(interfaces)}, the network interface between the machines, on each"
    )


def check_equal(state: Accelerator | PartialState, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Compare ``facts()``, and the code that runs, between the processes. Collective.

    While a process is missing, a line every 30 seconds names it.

    Args:
        state: Accelerate's state of the processes.
        facts: returns values by a name that a person understands; not called if there is a single process.

    Raises:
        UsageError: on all processes, if they differ; the sentence names the first rank that differs from rank 0, its
            host, and the differences.
        RunError: if a process is still missing after :data:`STARTUP_TIMEOUT`.
    """
    if state.num_processes == 1:
        return
    store, name = dist.distributed_c10d._get_default_store(), f"agreement-{next(_meetings)}"
    absent = "to start: reading data takes long there, or the process hangs"
    mine = {**_versions(), **facts()}
    meet(store, name, state.process_index, state.num_processes, absent)
    (main_host, ours), *others = gather_object([(platform.node(), mine)])
    for rank, (host, theirs) in enumerate(others, 1):
        pairs = {key: (theirs.get(key), ours.get(key)) for key in ours | theirs}
        shown = [f"{key} is {its!s:.60}, not {main!s:.60}" for key, (its, main) in pairs.items() if its != main]
        more = f", and {len(shown) - SHOWN_FACTS} more" * (len(shown) > SHOWN_FACTS)
        difference = f"rank {rank} on {host} differs from rank 0 on {main_host}: {'; '.join(shown[:SHOWN_FACTS])}{more}"
        if shown:
            raise UsageError(f"{difference}: start every process with the same flags, data and versions")


def check_shared(state: Accelerator | PartialState, folders: Mapping[str, Path]) -> None:
    """Check that all processes see the files that the main one writes. Collective.

    Args:
        state: Accelerate's state of the processes.
        folders: folders that exist on the main process, by the flag that names them.

    Raises:
        UsageError: on all processes, if one does not; the sentence names its rank, its host and the folder.
    """
    if state.num_processes == 1:
        return

    def write() -> str:
        name = f".shared.{token_hex(4)}.tmp"  # a process that is killed leaves an empty hidden file
        for folder in folders.values():
            (folder / name).touch()
        return name

    name = on_main(state, write)

    def unseen() -> str | None:
        places = [f"--{flag} {folder}" for flag, folder in folders.items() if not os.path.exists(folder / name)]
        return f"the files of rank 0 in {places[0]} on {platform.node()}" if places else None

    awaited = wait_for(unseen, SHARED_TIMEOUT)
    blind = gather_object([(state.process_index, awaited)] if awaited else [])
    if state.is_main_process:
        for folder in folders.values():
            (folder / name).unlink(missing_ok=True)
    if blind:
        ranks = in_words([rank for rank, _ in blind])
        raise UsageError(f"{ranks} cannot see {blind[0][1]}: choose a folder that all machines share")


@cache
def _versions() -> dict[str, str]:
    """Return torch's version and a hash of this package's source, since machines may hold different copies."""
    package = Path(__file__).resolve().parent.parent
    source = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    digest = blake2b(source, digest_size=6).hexdigest()
    return {"the version of torch": torch.__version__, f"the source of {package.name}": digest}
