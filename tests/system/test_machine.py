"""What a process may use of its machine."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from rectified_flow.cli import programs as launch
from rectified_flow.errors import UsageError
from rectified_flow.system import machine
from rectified_flow.system.machine import (
    allow_open_files,
    memory,
    processors,
    require_disk,
    require_memory,
    share_processors,
)

HOUSE = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """A machine of 64 cores and 100 GB, and a cgroup with these control files."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(machine, "CGROUPS", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(48)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 128 if logical else 64)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": 10**11}))


def test_the_affinity_mask_limits_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(tmp_path, monkeypatch)
    assert processors() == 48
    assert memory() == 10**11


@pytest.mark.parametrize(("quota", "expected"), [("350000 100000", 3), ("50000 100000", 1), ("max 100000", 48)])
def test_a_quota_limits_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    cgroup(tmp_path, monkeypatch, cpu_max=quota)
    assert processors() == expected


def test_a_limit_of_a_cgroup_above_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(tmp_path, monkeypatch, memory_max="5000", slurm__job__memory_max="max", slurm__memory_max="3000")
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: "1:cpu:/x\n0::/slurm/job\n" if path.name == "cgroup" else read(path)
    )
    assert memory() == 3000


@pytest.mark.parametrize(
    ("given", "threads", "spin"),
    [
        ({}, "48", "10000"),
        ({"LOCAL_WORLD_SIZE": "8"}, "6", "10000"),
        ({"LOCAL_WORLD_SIZE": "100"}, "1", "10000"),
        ({"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "7"}, "5", "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "48", None),
    ],
)
def test_processes_share_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], threads: str, spin: str | None
) -> None:
    cgroup(tmp_path, monkeypatch)
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    share_processors()
    assert (os.environ["OMP_NUM_THREADS"], os.environ.get("GOMP_SPINCOUNT")) == (threads, spin)


def test_torch_takes_the_number_of_threads() -> None:
    code = (
        "import os; from rectified_flow.system.machine import processors, share_processors; share_processors();"
        "import torch; assert torch.get_num_threads() == processors(), torch.get_num_threads()"
    )
    environment = {name: value for name, value in HOUSE.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_what_cannot_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(tmp_path, monkeypatch)
    require_memory(10**11, "--flag 1", "lower it")
    with pytest.raises(UsageError, match="would need at least") as refused:
        require_memory(2 * 10**12, "--flag 1", "lower it")
    sentence = "--flag 1 would need at least 2.00TB of memory, and this machine has 100GB: lower it"
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("rectified_flow.cli.flags.training:TrainRectifiedFlow", "lower --batch_size, --image_size or --dim"),
        ("train_masked_text:TextFlags", "lower --batch_size, --width or --length"),
        ("train_point_clouds:CloudFlags", "lower --batch_size, --points or --width"),
        ("wan_flags:WanFlags", "lower --batch_size, --frames, --height or --width"),
        ("rectified_flow.cli.flags.sampling:SampleConfig", "lower --batch_size"),
        ("rectified_flow.cli.flags.sampling:ExportConfig", "end other programs that use it"),
    ],
)
def test_a_full_memory_is_a_sentence_with_flags_of_the_program(flags: str, remedy: str) -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**50)
    for error in (full.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        assert re.fullmatch(rf"out of memory \(.*\): {remedy}", launch._describe(error, flags))


def test_what_the_disk_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    require_disk(0, folder, "--flag 1", "lower it")
    with pytest.raises(UsageError, match=rf"^--flag 1 would need at least .* of disk, and {folder} has room for "):
        require_disk(10**21, folder, "--flag 1", "lower it")


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [(256, 1 << 20, 4096), (256, resource.RLIM_INFINITY, 4096), (64, 1024, 1024), (8192, 8192, 8192), (64, 64, 64)],
)
def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, then: int) -> None:
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, new: limits.__setitem__(slice(None), new))
    allow_open_files()
    assert limits == [then, hard]


@pytest.mark.parametrize("hard", [16, 1024])
def test_too_few_open_files_are_refused(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    def fail(*_arguments: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (16, hard))
    monkeypatch.setattr(resource, "setrlimit", fail)
    with pytest.raises(UsageError, match=r"can open 16 files, but needs 64: raise the limit \(ulimit -n\)"):
        allow_open_files()
