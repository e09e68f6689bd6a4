"""Process-group setup."""

import os
import platform
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rectified_flow.distributed.waiting import Meeting, reported, wait_until
from rectified_flow.errors import RunError, UsageError, first_line

STARTUP_TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives before the first step: other processes may be reading data, compiling, or not started yet."""

LOOPBACK = "127."

OTHER_WAYS = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
"""Unsupported training backends that a launcher may request, by the name in its environment variable."""


def join_processes() -> PartialState:
    """Join the process group of this launch, on the CPU if there is no accelerator; a no-op if it was joined before.

    Raises:
        UsageError: if there are more processes than GPUs, if the processes do not see each other and would each train
            alone, or if the launcher is configured to shard the weights.
        RunError: if the other processes do not come, or no connection to them is possible.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ:
        # Launchers of one process per machine leave it out, and without it accelerate finds no backend for GPUs.
        os.environ.setdefault("LOCAL_RANK", "0")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.accelerator.is_available() or (world_size > 1 and torch.backends.mps.is_available()):
        # Without this, accelerate creates no process group, and each process runs as if it were the only one.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    gpus = torch.cuda.device_count()
    if not cpu and 0 < gpus <= local_rank:
        _refuse(f"there are more processes than the {gpus} GPUs of this machine: start {gpus}", local_rank == gpus)
    if os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} and not dist.is_initialized():
        _meet(cpu, world_size)
    for name, called in OTHER_WAYS.items():
        if parse_flag_from_env(f"ACCELERATE_USE_{name}"):
            raise UsageError(
                f"{called} is not supported, since every process keeps a full copy of the weights: launch with "
                "--multi_gpu (distributed_type: MULTI_GPU in a config file)"
            )
    state = PartialState(cpu=cpu)
    if state.num_processes != world_size:
        _refuse(
            f"{world_size} processes were started but accelerate sees {state.num_processes}, so each would train "
            "alone: start them with torchrun, or with one of the commands in the README",
            local_rank == 0,
        )
    return state


def _meet(cpu: bool, world_size: int) -> None:
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
    meeting = Meeting(store, "joining", rank, world_size)
    absent = f"at {address[0]}:{address[1]}, where it has not come yet: is it started, and can it reach that address?"
    with meeting.attended(absent=absent, slow=lambda: f"to connect to each other: {_remedy(address)}"):
        if not wait_until(meeting.is_complete, STARTUP_TIMEOUT.total_seconds()):
            raise RunError(f"not all of {world_size} processes came within {STARTUP_TIMEOUT}: start all at once")
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=STARTUP_TIMEOUT)
        except RuntimeError as error:
            if "connectFullMesh" not in str(error):
                raise
            raise RunError(
                f"rank {rank} on {platform.node()} could not connect to the other processes ({first_line(error)}): "
                f"{_remedy(address)}"
            ) from error


def _open_store(rank: int, address: tuple[str, int]) -> Store:
    """The store at which the processes meet, hosted by rank 0 or its launcher."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank > 0 or hosted:
        _await_answer(rank, address)
    # Without waiting for the others: a Meeting does that, and says for whom.
    return TCPStore(
        *address,
        is_master=rank == 0 and not hosted,
        timeout=STARTUP_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _await_answer(rank: int, address: tuple[str, int]) -> None:
    """Return when a server answers at ``address``; torch's own attempts cannot be interrupted, and give no reason."""
    reason: OSError | None = None

    def awaited() -> str | None:
        if os.environ["LOCAL_RANK"] != "0":
            return None
        return f"rank 0 at {address[0]}:{address[1]}, which gives rank {rank} on {platform.node()} no answer ({reason})"

    def answers() -> bool:
        nonlocal reason
        try:
            socket.create_connection(address, timeout=10).close()
            return True
        except OSError as error:
            reason = error
            return False

    with reported(awaited):
        if not wait_until(answers, STARTUP_TIMEOUT.total_seconds()):
            raise RunError(f"no answer from rank 0 at {address[0]}:{address[1]} within {STARTUP_TIMEOUT} ({reason})")


def _remedy(address: tuple[str, int]) -> str:
    """What to do where processes cannot connect: gloo connects to the addresses that hostnames resolve to."""
    interface = f"set GLOO_SOCKET_IFNAME={_interface(address)}, the network interface between the machines, on each"
    with suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        if own.startswith(LOOPBACK):
            return (
                f"the hostname {socket.gethostname()} resolves to {own} on its own machine, and no other machine can "
                f"connect to that address; {interface}"
            )
    return (
        "they connect to random ports of the addresses that their hostnames resolve to; open all ports between the "
        f"machines, or {interface}"
    )


def _interface(address: tuple[str, int]) -> str:
    """This machine's network interface towards ``address``, or else the first one that is no loopback."""
    own = ""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    found = {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    usable = {name: each for name, each in found.items() if each and not each[0].startswith(LOOPBACK)}
    return next((name for name, addresses in usable.items() if own in addresses), next(iter(usable), "eth0"))


def _refuse(sentence: str, speaks: bool) -> NoReturn:
    """Exit. There is no process group in which to agree on who prints the error; the process with ``speaks`` does."""
    if speaks:
        raise UsageError(sentence)
    sys.exit(2)
