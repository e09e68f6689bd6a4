"""Processors, memory, disk and open files that this process may use, by the limits of the system and of cgroups."""

import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from rectified_flow.errors import UsageError

CGROUPS = Path("/sys/fs/cgroup")
SPIN_COUNT = "10000"
"""Spins of GNU OpenMP's waiting threads; measured in docs/measurements/speed.md, "Busy machines"."""

ENOUGH_OPEN_FILES, FEWEST_OPEN_FILES = 4096, 64


def processors() -> int:
    """Return the number of cores that this process may use: the machine's, or fewer by affinity mask or cgroup quota.

    (``loky.cpu_count`` reads the outermost cgroup only, starts a program, and takes 0.3 s at each ``--help``.)
    """
    quotas = [int(quota / period) for quota, period in _limits("cpu.max")]
    limits = [psutil.cpu_count(logical=False) or os.cpu_count() or 1, *quotas]
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        limits.append(len(os.sched_getaffinity(0)))
    return max(1, min(limits))


def share_processors() -> None:
    """Set the number of OpenMP's threads, and how they wait, unless the environment says so. Call before torch loads.

    The processes of a launch on this machine share its cores. A thread that waits for others spins for some
    microseconds and then sleeps. On a busy machine, a spinning thread would occupy the core that the awaited thread
    needs.
    """
    share = processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or fewer by the limit of a cgroup."""
    return min([psutil.virtual_memory().total, *(limit for [limit] in _limits("memory.max"))])


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Raise a UsageError if ``what`` needs more than the machine's memory.

    Args:
        needed: the least memory [bytes].
        what: the subject of the message.
        remedy: what to do instead.
    """
    _require_room(needed, memory(), "memory, and this machine has", what, remedy)


def require_disk(needed: float, folder: Path, what: str, remedy: str) -> None:
    """Raise a UsageError if ``what`` needs more than the free space of ``folder``, which need not exist yet.

    Arguments as in :func:`require_memory`.
    """
    with suppress(OSError):  # writing will show it
        room = shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if each.exists())).free
        _require_room(needed, room, f"disk, and {folder} has room for", what, remedy)


def _require_room(needed: float, room: int, place: str, what: str, remedy: str) -> None:
    from tqdm import tqdm  # the command line imports this module

    least, there = (tqdm.format_sizeof(size, "B") for size in (needed, room))
    if needed > room:
        raise UsageError(f"{what} would need at least {least} of {place} {there}: {remedy}")


def allow_open_files() -> None:
    """Raise this process's limit of open files; loader processes, connections and libraries need many.

    Raises:
        UsageError: if the limit cannot be raised to :data:`FEWEST_OPEN_FILES`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft not in range(ENOUGH_OPEN_FILES):  # unlimited is negative
        return
    with suppress(OSError, ValueError):  # a system may have a limit of its own
        raised = ENOUGH_OPEN_FILES if hard == resource.RLIM_INFINITY else min(ENOUGH_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    too_few = f"this process can open {soft} files, but needs {FEWEST_OPEN_FILES}"
    if soft < FEWEST_OPEN_FILES:
        raise UsageError(f"{too_few}: raise the limit (ulimit -n)")


def _limits(name: str) -> list[list[int]]:
    """Return the numbers in a control file of this process's cgroup (version 2) and of its parents that set a limit."""
    with suppress(OSError):  # Linux alone has cgroups
        group = CGROUPS / Path("/proc/self/cgroup").read_text().strip().rpartition("0::/")[2]
        files = [folder / name for folder in (group, *group.parents) if (folder / name).is_file()]
        words = [file.read_text().split() for file in files]
        return [[int(word) for word in each] for each in words if "max" not in each]
    return []
