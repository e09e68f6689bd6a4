"""Tests of the record of an output folder."""

import fcntl
import json
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.system.outputs import RECORD, claim

FORK = get_context("fork")
PROCESSES, NAMES = 4, 25


def claim_some(folder: Path, number: int, barrier: Any) -> None:
    barrier.wait()
    for index in range(NAMES):
        claim(folder, [f"{number}-{index}.png"])


def test_programs_at_once_lose_no_name(tmp_path: Path) -> None:
    """Names that several programs add at the same moment are all in the record at the end."""
    barrier = FORK.Barrier(PROCESSES)
    processes = [FORK.Process(target=claim_some, args=(tmp_path, number, barrier)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    names = json.loads((tmp_path / RECORD).read_text())["files"]
    assert sorted(names) == sorted(f"{number}-{index}.png" for number in range(PROCESSES) for index in range(NAMES))
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


def test_a_file_system_that_locks_no_folders_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for name in ("a.png", "b.png"):
        claim(tmp_path, [name])
    assert json.loads((tmp_path / RECORD).read_text())["files"] == ["a.png", "b.png"]
    assert capsys.readouterr().out.count(f"warning: {tmp_path} cannot be locked (No locks available)") == 1
