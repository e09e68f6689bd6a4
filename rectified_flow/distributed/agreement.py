"""Processes on several machines check that they work on the same thing, before they begin."""

import platform
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState

from rectified_flow.distributed.collectives import join_lists, on_main
from rectified_flow.distributed.waiting import Meeting, in_words, reported, wait_until
from rectified_flow.errors import UsageError
from rectified_flow.files import replace_file

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
