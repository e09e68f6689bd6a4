"""Processors, memory, disk and open files that this process may use, by the limits of the system and of cgroups."""

import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from rectified_flow.errors import require

CGROUPS = Path("/sys/fs/cgroup")
SPIN_COUNT = "10000"
"""Spins of GNU OpenMP's waiting threads; measured in docs/measurements/speed.md, "Busy machines"."""

ENOUGH_OPEN_FILES, FEWEST_OPEN_FILES = 4096, 64


def processors() -> int:
    """Return the number of cores that this process may use: the machine's, or fewer by affinity mask or cgroup quota.

    (``loky.cpu_count`` reads the outermost cgroup only, starts a program, and takes 0.3 s at each ``--help``.)
    """
    limits = [psutil.cpu_count(logical=False) or os.cpu_count() or 1, *map(int, _quotas())]
    if hasattr(os, "sched_getaffinity"):  # macOS and Windows have none
        limits.append(len(os.sched_getaffinity(0)))
    return max(1, min(limits))


def share_processors() -> None:
    """Set the number of OpenMP's threads, and how they wait, unless the environment says so. Call before torch loads.

    The processes of a launch on this machine share its cores. A thread that waits for others spins for some
    microseconds and then sleeps. On a busy machine, a spinning thread would occupy the core that the awaited thread
    needs.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = processors() // max(1, int(ranks)) if ranks.isdecimal() else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or fewer by the limit of a cgroup."""
    limits = [*_numbers("memory.max"), *_numbers("memory/memory.limit_in_bytes")]
    return int(min([psutil.virtual_memory().total, *(limit for limit, *_ in limits)]))


def free_disk(folder: Path) -> int:
    """Return the bytes that can still be written below ``folder``, which need not exist yet.

    Raises:
        OSError: if the file system does not answer.
    """
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Raise a UsageError if ``what`` needs more than the machine's memory.

    Args:
        needed: the least memory [bytes].
        what: the subject of the message.
        remedy: what to do instead.
    """
    there = memory()
    room = f"this machine has {_size(there)}"
    require(needed <= there, f"{what} would need at least {_size(needed)} of memory, and {room}: {remedy}")


def require_disk(needed: float, folder: Path, what: str, remedy: str) -> None:
    """Raise a UsageError if ``what`` needs more than the free space of ``folder``; arguments as above."""
    with suppress(OSError):  # writing will show it
        free = free_disk(folder)
        room = f"{folder} has {_size(free)} left"
        require(needed <= free, f"{what} would need at least {_size(needed)} of disk, and {room}: {remedy}")


def allow_open_files() -> None:
    """Raise this process's limit of open files; loader processes, connections and libraries need many.

    Raises:
        UsageError: if the limit cannot be raised to :data:`FEWEST_OPEN_FILES`.
    """
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited or soft >= ENOUGH_OPEN_FILES:
        return
    with suppress(OSError, ValueError):  # a system may have a limit of its own
        raised = ENOUGH_OPEN_FILES if hard == unlimited else min(ENOUGH_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    require(
        soft >= FEWEST_OPEN_FILES,
        f"this process may have {soft} files open, and needs {FEWEST_OPEN_FILES} or more: raise the limit (ulimit -n)",
    )


def _quotas() -> list[float]:
    """Return the processors that each quota allows this process."""
    quotas = [quota / period for quota, period in _numbers("cpu.max")]
    both = zip(_numbers("cpu/cpu.cfs_quota_us"), _numbers("cpu/cpu.cfs_period_us"), strict=False)
    return quotas + [quota / period for (quota,), (period,) in both if quota > 0]


def _numbers(name: str) -> list[list[float]]:
    """Return the numbers in a control file of this process's cgroup and of its parents, of those that set a limit.

    cgroup v1 had a folder for each controller, which a container sees as its own.
    """
    below = ""
    with suppress(OSError, ValueError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        below = next((line.removeprefix("0::/") for line in groups if line.startswith("0::")), "")
    folder, found = CGROUPS / below, []
    for each in [folder, *folder.parents]:
        if each.is_relative_to(CGROUPS):
            with suppress(OSError, ValueError):  # "max" is no limit
                found.append([float(word) for word in (each / name).read_text().split()])
    return found


def _size(number: float) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    units = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
    number, power = min(number, 10**24), 0  # Python's integers may be too large for a float
    while number >= 1000 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {units[power]}"
