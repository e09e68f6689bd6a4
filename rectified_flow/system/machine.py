"""Processors, memory and disk that this process may use."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from rectified_flow.errors import UsageError

SPIN_COUNT = "10000"  # spins of GNU OpenMP's waiting threads; measured in docs/measurements/speed.md, "Busy machines"
CGROUP = Path("/sys/fs/cgroup")
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Files with the quota of processor time in a period and the period [us], of cgroups of version 2 and 1."""
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables by which a launcher numbers its processes."""


def processors() -> int:
    """Return the number of cores that this process may use: the machine's, or fewer by affinity mask or quota.

    The quota is that of the outermost cgroup that this process sees, which in a container is the container's.
    """
    cores = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        cores.append(len(os.sched_getaffinity(0)))
    for names in QUOTAS:
        with suppress(OSError, ValueError):  # without a quota, there is no file, or the word max
            quota, period = map(int, " ".join((CGROUP / name).read_text() for name in names).split())
            cores += [max(1, quota // period)] if quota > 0 else []
    return min(cores)


def share_processors() -> None:
    """Set the number of OpenMP's threads, and how they wait, unless the environment says so. Call before torch loads.

    The processes of a launch on this machine share its cores, unless their launcher has set the number: torchrun and
    accelerate launch set it to 1 for several processes. A thread that waits for others spins for some
    microseconds and then sleeps. On a busy machine, a spinning thread would occupy the core that the awaited thread
    needs. Empty variables of a launcher are removed.
    """
    for name in LAUNCH:
        if os.environ.get(name) == "":  # Accelerate cannot parse an empty value
            del os.environ[name]
    share = processors() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def memory() -> int:
    """Return the bytes of memory of this machine."""
    return int(psutil.virtual_memory().total)


def free_memory() -> float:
    """Return the bytes of memory that are free for each process of a launch on this machine."""
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def require_disk(needed: float, folder: Path, what: str) -> None:
    """Raise a UsageError if ``what`` needs more bytes than are free in ``folder``, which exists."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        least, room = (f"{size / 1e9:,.1f} GB" for size in (needed, free))
        raise UsageError(f"{what} would need at least {least} of disk, and {folder} has room for {room}: make room")
