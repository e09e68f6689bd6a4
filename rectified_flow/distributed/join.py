"""Processes that wait for each other say for whom, while a launch starts.

Each process writes into the store of the process group when it comes to a meeting and when it is through. Where a
meeting takes long, one of those that wait reads there who is missing.
"""

import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
)

from rectified_flow.distributed.collectives import join_lists, on_main
from rectified_flow.errors import RunError, UsageError, first_line
from rectified_flow.system.files import replace_file

POLL = 0.1
"""Seconds between two looks."""
INTERVAL = 30.0
"""Seconds that a process waits before the first line, and between two lines."""
SHOWN_RANKS = 8


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition`` comes true within that time; a signal ends this wait, but none of those inside torch."""
    patience = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < patience:
        time.sleep(POLL)
    return met


@contextmanager
def reported(awaited: Callable[[], str | None]) -> Iterator[None]:
    """While the block lasts, print every :data:`INTERVAL` seconds what ``awaited`` returns: what this process awaits.

    A thread calls ``awaited``, since the block may be inside a library. Where it returns None or fails, nothing is
    printed.
    """
    done = Event()

    def report() -> None:
        while not done.wait(INTERVAL):
            with suppress(Exception):  # a store that is gone; the block will fail by itself
                text = awaited()
                if text is not None and not done.is_set():
                    print(f"waiting for {text}", file=sys.stderr, flush=True)

    Thread(target=report, name="waiting", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class Meeting:
    """A point in the program that all processes come to.

    Args:
        store: where each process writes that it has come.
        name: of the meeting; each of a program's meetings needs a name of its own.
        rank: of this process.
        world_size: how many processes are to come.
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self.store, self.rank = store, rank
        self._keys = [f"meeting/{name}/{each}" for each in range(world_size)]

    def is_complete(self) -> bool:
        """Whether all have come."""
        return self.store.check(self._keys)

    @contextmanager
    def attended(self, *, absent: str, slow: Callable[[], str]) -> Iterator[None]:
        """A block that is over when all processes are in it; while it lasts, say who is missing.

        Args:
            absent: said of ranks that have not come.
            slow: returns what is said of ranks that have come and are not through, once all have come.
        """
        mine = self._keys[self.rank]
        self.store.set(mine, platform.node())
        with reported(lambda: self._awaited(absent, slow)):
            yield
        self.store.set(f"{mine}/through", "")

    def _awaited(self, absent: str, slow: Callable[[], str]) -> str | None:
        """What to say of whom, on the lowest rank that waits; a connection of its own, as the block may hold ours."""
        store = self.store.clone()
        come = [rank for rank, key in enumerate(self._keys) if store.check([key])]
        waiting = [rank for rank in come if not store.check([f"{self._keys[rank]}/through"])]
        if self.rank != min(waiting):
            return None
        missing = [rank for rank in range(len(self._keys)) if rank not in come]
        if missing:
            return f"{in_words(missing)} (of {len(self._keys)} processes) {absent}"
        return f"{in_words(waiting)} (of {len(self._keys)} processes) {slow()}"


def in_words(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2, 3``, of many the first ones and their number."""
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS])) + f", ... ({len(ranks)} in all)" * (len(ranks) > SHOWN_RANKS)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


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


SHARED_TIMEOUT = 60.0
"""Seconds within which a file of the main process must show everywhere: an NFS client may cache a folder for as long
(acdirmax)."""
PROBE = ".shared"
SHOWN, LONGEST = 3, 60
_meetings = count()


def check_equal(state: Accelerator | PartialState, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Compare ``facts()``, and the code that runs, between the processes. Collective.

    While a process has not come here, the others print every 30 seconds that they wait for it.

    Args:
        state: of the processes.
        facts: returns values by a name that a person understands; not called where there is a single process.

    Raises:
        UsageError: on all processes, if they differ; the sentence names the first that differs from the main one, its
            host, and the differences.
    """
    if state.num_processes == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    meeting = Meeting(store, f"agreement-{next(_meetings)}", state.process_index, state.num_processes)
    with meeting.attended(
        absent="to start: reading data takes long there, or the process hangs",
        slow=lambda: "to answer: the connection between the processes is slow, or broken",
    ):
        everyone = join_lists(state, [(platform.node(), {**_versions(), **facts()})])
    (main_host, ours), *others = everyone
    for rank, (host, theirs) in enumerate(others, 1):
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing:
            shown = [f"{name} is {_short(theirs.get(name))}, not {_short(ours.get(name))}" for name in differing]
            more = f", and {len(shown) - SHOWN} more" * (len(shown) > SHOWN)
            raise UsageError(
                f"rank {rank} on {host} differs from rank 0 on {main_host}: {'; '.join(shown[:SHOWN])}{more}: start "
                "every process with the same flags, data and versions"
            )


def check_shared(state: Accelerator | PartialState, folders: Mapping[str, Path]) -> None:
    """Check that all processes see the files that the main one writes. Collective.

    Args:
        state: of the processes.
        folders: by the flag that names them; they exist on the main process.

    Raises:
        UsageError: on all processes, if one does not; the sentence names it, its host and the folder.
    """
    if state.num_processes == 1:
        return
    token = on_main(state, lambda: _write_tokens(folders))
    places = ", ".join(map(str, folders.values()))
    with reported(lambda: f"the files that rank 0 wrote into {places}, which {platform.node()} does not see"):
        wait_until(lambda: _without_token(folders, token) is None, SHARED_TIMEOUT)
    missing = _without_token(folders, token)
    mine = [] if missing is None else [(state.process_index, platform.node(), f"--{missing} {folders[missing]}")]
    blind = join_lists(state, mine)
    if state.is_main_process:
        for each in folders.values():
            (each / PROBE).unlink(missing_ok=True)
    if blind:
        _, host, folder = blind[0]
        raise UsageError(
            f"{folder} is not shared: {in_words([rank for rank, *_ in blind])} (the first on {host}) "
            "cannot read there what rank 0 wrote; choose a folder on storage that all machines share"
        )


def _write_tokens(folders: Mapping[str, Path]) -> str:
    token = uuid.uuid4().hex
    for flag, folder in folders.items():
        try:
            replace_file(folder / PROBE, token, durable=False)
        except OSError as error:
            raise UsageError(f"--{flag} {folder} cannot be written: {error.strerror}") from error
    return token


def _without_token(folders: Mapping[str, Path], token: str) -> str | None:
    """The flag of the first folder in which this process does not read ``token``."""
    for flag, folder in folders.items():
        try:
            if (folder / PROBE).read_text() != token:
                return flag
        except OSError:
            return flag
    return None


@cache
def _versions() -> dict[str, str]:
    """Of torch, and of this package by its source: machines may hold different copies of one version."""
    package = Path(__file__).resolve().parent.parent
    source = blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        source.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return {"the version of torch": torch.__version__, f"the source of {package.name}": source.hexdigest()}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
