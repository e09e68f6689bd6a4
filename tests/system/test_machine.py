"""Tests of the memory, processors and disk that a process may use."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from rectified_flow.cli import programs as launch
from rectified_flow.errors import UsageError
from rectified_flow.system import machine
from rectified_flow.system.machine import (
    free_memory,
    memory,
    processors,
    require_disk,
    share_processors,
)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine of 64 cores, of which 48 may be used, and 100 GB, of which 80 are free."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(48)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 128 if logical else 64)
    memory = SimpleNamespace(total=10**11, available=8 * 10**10)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("large")
def test_a_process_may_use_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (processors(), memory(), free_memory()) == (48, 10**11, 8e10)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory() == 2e10


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 48),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 48),
    ],
)
def test_the_quota_of_a_container_limits_the_processors(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert processors() == expected


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("given", "threads", "spin"),
    [
        ({}, "48", "10000"),
        ({"LOCAL_WORLD_SIZE": "8"}, "6", "10000"),
        ({"LOCAL_WORLD_SIZE": "100"}, "1", "10000"),
        (dict.fromkeys(("LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"), ""), "48", "10000"),
        ({"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "7"}, "5", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "48", None),
    ],
)
def test_processes_share_the_processors(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], threads: str, spin: str | None
) -> None:
    for name in (*machine.LAUNCH, "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    share_processors()
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("GOMP_SPINCOUNT")) == (threads, spin)
    assert "" not in (os.environ.get(name) for name in machine.LAUNCH), "Accelerate would read a number"


def test_a_full_memory_is_a_sentence() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**50)
    library = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    for error in (full.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), library):
        assert re.fullmatch(r"out of memory \(.*\): lower --batch_size, or end .*", launch._describe(error))


def test_what_the_disk_cannot_hold_is_refused(tmp_path: Path) -> None:
    require_disk(0, tmp_path, "8 rows")
    with pytest.raises(UsageError, match=rf"^8 rows would need at least .* GB of disk, and {tmp_path} has room for "):
        require_disk(10**21, tmp_path, "8 rows")
