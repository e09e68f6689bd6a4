"""Tests of the logs and the status of a run: damaged lines and documents do not stop a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.errors import UsageError
from rectified_flow.runs.folder import times_of, write_failure, write_status
from rectified_flow.runs.log import LineFile, RunLog
from tests.system.refusing import refusing

GOOD = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": "0.1"}]


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_lines_of_later_steps_and_the_half_of_a_killed_run_go(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", *(json.dumps(row).encode() for row in GOOD))
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo')
    log = LineFile(path, 2)
    assert [row["step"] for row in log.rows()] == [1, 2]
    log.add({"step": 3, "loss": 0.3})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        *(b"null", b"[1]", b'{"loss": 1}', b'{"step": "2"}', b'{"step": 2.5}', b'{"step": 2, "lo', b"\xff\xfe"),
        *(b'{"step": 2, "name": "\xff"}', 100_000 * b"[", b'{"step": ' + 5000 * b"9"),
    ],
    ids=lambda damage: repr(damage[:20]),
)
def test_a_damaged_line_is_dropped(tmp_path: Path, damage: bytes) -> None:
    good = json.dumps(GOOD[0]).encode()
    path = write(tmp_path / "metrics.jsonl", damage, good, damage)
    assert LineFile(path, 5).rows() == [GOOD[0]]
    assert path.read_bytes() == good + b"\n"


def test_two_measurements_of_one_name_are_refused(tmp_path: Path) -> None:
    log = RunLog(None, tmp_path, 0)
    log.open("sharpness")
    for name in ("sharpness", "metrics"):
        with pytest.raises(UsageError, match=rf"two measurements would write {name}\.jsonl"):
            log.open(name)


def test_numbers_by_step(tmp_path: Path) -> None:
    log = LineFile(tmp_path / "evaluations.jsonl", 0)
    for row in ({"step": 1, "d": 2.0, "of": [1]}, {"step": 2, "d": "3", "of": [1]}, {"step": 3, "d": 4, "of": [2]}):
        log.add(row)
    assert log.numbers("d") == {1: 2.0, 3: 4}
    assert log.numbers("d", of=[1]) == {1: 2.0}
    assert log.numbers("e") == {}


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "metrics.jsonl", b'{"step": 1}')
    with (
        refusing(monkeypatch, path.name),
        pytest.raises(UsageError, match=r"metrics\.jsonl cannot be read .Permission denied.: change its permissions"),
    ):
        LineFile(path, 5)
    os.mkfifo(tmp_path / "bad_steps.jsonl")
    with pytest.raises(UsageError, match=r"bad_steps\.jsonl is not a regular file"):
        LineFile(tmp_path / "bad_steps.jsonl", 5)


def test_a_run_keeps_its_name(tmp_path: Path) -> None:
    name = write_status(tmp_path, "running", 1, 10)
    assert (
        write_status(tmp_path, "finished", 10, 10) == name == json.loads((tmp_path / "status.json").read_text())["id"]
    )


def test_a_checkpoint_leaves_the_expected_end_in_the_status(tmp_path: Path) -> None:
    write_status(tmp_path, "running", 4, 10, times=times_of(0.5, 60.0))
    before = json.loads((tmp_path / "status.json").read_text())
    write_status(tmp_path, "running", 5, 10)
    now = json.loads((tmp_path / "status.json").read_text())
    assert (now["step"], now["ends"], now["step_time"]) == (5, before["ends"], 0.5)
    (tmp_path / "status.json").write_text(json.dumps(now | {"pid": 1}))
    write_status(tmp_path, "running", 5, 10)
    assert "ends" not in json.loads((tmp_path / "status.json").read_text()), "the end of a killed run"
    write_status(tmp_path, "finished", 10, 10)
    assert "ends" not in json.loads((tmp_path / "status.json").read_text())


@pytest.mark.parametrize(
    "change",
    [None, [], {"id": None}, {"state": "asleep"}, b"\xff", b"{"],
    ids=str,
)
def test_a_damaged_status_is_written_anew(tmp_path: Path, change: Any) -> None:
    write_status(tmp_path, "running", 1, 10)
    path = tmp_path / "status.json"
    changed = json.loads(path.read_text()) | change if isinstance(change, dict) else change
    path.write_bytes(change if isinstance(change, bytes) else json.dumps(changed).encode())
    write_failure(tmp_path, RuntimeError("why"), 2, 10)
    status = json.loads(path.read_text())
    assert (status["state"], status["step"], status["message"]) == ("failed", 2, "why")
    assert len(status["id"]) == 12
