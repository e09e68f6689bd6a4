"""Tests of the harness of studies: rows, resumed rows, failures and tables."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from studies.harness import append_row, read_rows, run
from tests.patience import wait_for

TOY = "tests.studies.toy"


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., int]:
    """Run the toy study in a folder of its own."""

    def start(*arguments: str) -> int:
        return run(TOY, [*arguments, *places(tmp_path)])

    return start


def places(folder: Path) -> list[str]:
    return ["--output_dir", str(folder), "--results", str(folder / "results.jsonl")]


def cells(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]


def test_rows_are_computed_once_and_tabulated(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--only", "plain", "after", "--budget", "4", "--seeds", "0", "1", "--workers", "2")
    assert toy(*arguments) == 0
    rows = read_rows(tmp_path / "results.jsonl")
    assert sorted((row["case"], row["seed"]) for row in rows) == [
        ("after", 0),
        ("after", 1),
        ("plain", 0),
        ("plain", 1),
    ], "the trainings that rows start from have no rows"
    assert rows[0]["figures"]["2 calls"] == {"frechet": 12.5}
    head, _, *lines = cells(capsys.readouterr().out)
    assert head[-3:] == ["minutes", "frechet, 1 call", "frechet, 2 calls"]
    assert [line[3] for line in lines] == ["plain", "after"] or [line[3] for line in lines] == ["after", "plain"]
    assert all(line[5:] == ["2", "32", "4.0", "25.5", "12.5"] for line in lines), "means of two seeds"
    assert toy(*arguments) == 0
    assert len(read_rows(tmp_path / "results.jsonl")) == 4


def test_a_row_that_fails_leaves_the_others(
    toy: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy("--only", "fails", "dies", "after fails", "plain", "--budget", "2") == 1
    assert [row["case"] for row in read_rows(tmp_path / "results.jsonl")] == ["plain"]
    failures = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed")]
    assert len(failures) == 3, "the training before, that case, and the one that was killed"
    log = next(part for part in failures[0].split() if "log.txt" in part).rstrip(":")
    assert "no luck" in Path(log).read_text()


def test_a_killed_study_ends_its_workers_and_resumes_inside_the_row(tmp_path: Path) -> None:
    arguments = ["--only", "waits", "--budget", "4", *places(tmp_path)]
    command = [sys.executable, "-c", f"import sys; from studies.harness import run; sys.exit(run({TOY!r}))", *arguments]
    study = subprocess.Popen(command)

    def find_waiting() -> list[Path]:
        return [each for each in tmp_path.glob("toy/*/pid") if each.read_text()]

    [found] = wait_for("a row that waits", find_waiting)
    worker = int(found.read_text())
    study.send_signal(signal.SIGKILL)
    study.wait()

    def has_ended() -> bool:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z"

    wait_for("the end of the worker", has_ended)
    assert read_rows(tmp_path / "results.jsonl") == []
    (tmp_path / "toy" / "go").touch()
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert (found.parent / "steps").read_text().split() == ["1", "2", "3", "4"], "no step is taken again"
    assert [row["case"] for row in read_rows(tmp_path / "results.jsonl")] == ["waits"]


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    append_row(results, {"case": "one"})
    with results.open("a") as file:
        file.write('{"case": "tw')
    append_row(results, {"case": "three"})
    assert [row["case"] for row in read_rows(results)] == ["one", "three"]


def test_unknown_cases_are_named(toy: Callable[..., int]) -> None:
    with pytest.raises(SystemExit, match="matches no case; there are plain, after"):
        toy("--only", "other")
