"""status.json is read back only to know the run's name, and what is damaged in it is written anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.runs.folder import write_failure, write_status


def test_a_run_keeps_its_name(tmp_path: Path) -> None:
    name = write_status(tmp_path, "running", 1, 10)
    assert (
        write_status(tmp_path, "finished", 10, 10) == name == json.loads((tmp_path / "status.json").read_text())["id"]
    )


@pytest.mark.parametrize(
    "change",
    [None, [], {"id": "../../x"}, {"id": 7}, {"pid": None}, {"state": "asleep"}, {"step": "6"}, b"\xff", b"{"],
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
