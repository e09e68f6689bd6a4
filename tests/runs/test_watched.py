"""What watch.py reads from the folders of runs while they are written to."""

import json
import os
import re
import time
from array import array
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.runs import watched
from rectified_flow.runs.watched import MOST_CURVES, POINTS, Curves, WatchedRun, WatchedRuns, thinned
from tests.watched_runs import add, begin_run, metrics, write_status


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begin_run(tmp_path / "runs" / "cats")


def test_a_run_that_trains(run: Path) -> None:
    report = WatchedRun(run).report()
    assert (report["state"], report["step"], report["total_steps"]) == ("running", 30, 100)
    assert report["seconds_left"] == 70 * 8 / 4
    assert (report["bad_steps"], report["silent"], report["samples"]) == (2, None, ["step_00000020.png"])
    assert report["curves"]["metrics"]["loss"] == [(10, 0.1), (20, 0.05), (30, 1 / 30)]
    assert report["curves"]["heldout"] == {"heldout_loss": [(20, 0.5)], "seen_loss": [(20, 0.4)], "gap": [(20, 0.1)]}
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"pid": 2**22 + 1}, "died"),
        ({"pid": 2**22 + 1, "host": "elsewhere"}, "running"),
        ({"state": "failed", "message": "no memory"}, "failed"),
        ({"state": "finished"}, "finished"),
    ],
)
def test_the_state_of_a_run(run: Path, changes: dict[str, Any], state: str) -> None:
    write_status(run, **changes)
    report = WatchedRun(run).report()
    assert report["state"] == state
    assert report["message"] == changes.get("message", "")
    assert (report["seconds_left"] is None) == (state != "running")


def test_a_run_that_is_silent(run: Path) -> None:
    for file, ago in {"status.json": 4000, "metrics.jsonl": 3000, "heldout.jsonl": 5000}.items():
        os.utime(run / file, (time.time() - ago,) * 2)
    assert WatchedRun(run).report()["silent"] == pytest.approx(3000, abs=60)


def test_it_reads_on_where_it_was(run: Path) -> None:
    watched = WatchedRun(run)
    watched.report()
    add(run, "metrics", {"step": 40, "loss": 0.25}, {"step": 50, "loss": 0.2}, end="")
    assert watched.report()["curves"]["metrics"]["loss"][-1] == (40, 0.25), "the last line is half written"
    add(run, "metrics", end="\n")
    assert watched.report()["curves"]["metrics"]["loss"][-1] == (50, 0.2)


def test_a_file_that_is_replaced_by_a_shorter_one(run: Path) -> None:
    watched = WatchedRun(run)
    watched.report()
    (run / "new").write_text(json.dumps(metrics(10)) + "\n")
    (run / "new").replace(run / "metrics.jsonl")
    assert watched.report()["curves"]["metrics"]["loss"] == [(10, 0.1)]
    (run / "metrics.jsonl").unlink()
    assert watched.report()["curves"]["metrics"] == {}


DAMAGED = {
    **{"empty": "", "null": "null", "list": "[1]", "half": '{"step": ', "no step": '{"loss": 1}'},
    **{"text": '{"step": "1", "loss": 1}', "bytes": "\udcff", "yes": '{"step": 5, "loss": true}'},
    **{"deep": "[" * 100_000, "huge": f'{{"step": {10**30}, "loss": 1}}'},
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_lines_are_left_out(run: Path, line: str) -> None:
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(line.encode(errors="surrogateescape") + b"\n" + content)
    report = WatchedRun(run).report()
    assert [step for step, _ in report["curves"]["metrics"]["loss"]] == [10, 20, 30]
    assert report["seconds_left"] == 70 * 8 / 4


@pytest.mark.parametrize("loss", [nan, inf, 10**400])
def test_numbers_that_are_none_are_left_out(run: Path, loss: float) -> None:
    add(run, "metrics", metrics(40, loss=loss))
    assert WatchedRun(run).report()["curves"]["metrics"]["loss"][-1][0] == 30


def test_nothing_of_a_run_need_be_there(tmp_path: Path) -> None:
    report = WatchedRun(tmp_path / "nowhere").report()
    assert (report["state"], report["step"], report["total_steps"]) == ("waiting", 0, None)
    write_status(tmp_path / "half")
    (tmp_path / "half" / "status.json").write_text('{"state": "runn')
    [report] = json.loads(WatchedRuns((tmp_path / "half",)).report())
    assert (report["state"], "status.json cannot be read" in report["message"]) == ("waiting", True)


def test_long_curves_are_thinned_to_means() -> None:
    curve = array("d", [number for step in range(10 * POINTS) for number in (step, step % 2)])
    assert thinned(curve[: 2 * POINTS]) == [(step, step % 2) for step in range(POINTS)]
    assert thinned(curve) == [(step, 0.5) for step in range(9, 10 * POINTS, 10)]
    assert thinned(curve[:14], 3) == [(1, 0.5), (3, 0.5), (6, pytest.approx(1 / 3))]


def test_only_new_lines_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = Curves(run / "metrics.jsonl")
    taken: list[bytes] = []
    monkeypatch.setattr(curves, "_add", taken.append)
    for _ in range(3):
        curves.read_on()
    assert len(taken) == 3


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = (begin_run(tmp_path / "a" / "cats"), begin_run(tmp_path / "b" / "cats"))
    assert [each["name"] for each in json.loads(WatchedRuns(folders).report())] == ["a/cats", "b/cats"]


def test_a_run_is_shown_once_and_by_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    (run.parent / "best").symlink_to(run)
    runs = WatchedRuns((Path(), run, run.parent, Path("../cats")))
    assert [each["name"] for each in json.loads(runs.report())] == ["cats", "best"]


def test_a_run_that_may_not_be_read_hides_no_other(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = begin_run(run.parent / "ants")
    stat = os.stat

    def refuse(path: Any, *arguments: Any, **more: Any) -> os.stat_result:
        if Path(path).parent == secret:
            raise PermissionError
        return stat(path, *arguments, **more)

    monkeypatch.setattr(os, "stat", refuse)
    assert [each["name"] for each in json.loads(WatchedRuns((run.parent,)).report())] == ["cats"]


def fifo(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")


def zeros(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/dev/zero")


def zeros_as_status(folder: Path) -> None:
    os.truncate(folder / "status.json", 2**40)


def link_to_itself(folder: Path) -> None:
    for name in ("metrics.jsonl", "samples/step_00000020.png"):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / name)
    assert WatchedRun(folder).sample("step_00000020.png") is None


def many_keys(folder: Path) -> None:
    add(folder, "metrics", {"step": 40} | dict.fromkeys(map(str, range(10**5)), 0))
    assert len(WatchedRun(folder).report()["curves"]["metrics"]) == MOST_CURVES


def status_text(folder: Path, name: str, value: str) -> None:
    text = (folder / "status.json").read_text()
    (folder / "status.json").write_text(re.sub(rf'"{name}": [^,]*', f'"{name}": {value}', text))


SICK: dict[str, tuple[Callable[[Path], object], str]] = {
    "a FIFO": (fifo, "metrics.jsonl is not a regular file"),
    "a link to /dev/zero": (zeros, "metrics.jsonl is not a regular file"),
    "links to themselves": (link_to_itself, "metrics.jsonl"),
    "a line of many keys": (many_keys, ""),
    "infinitely many steps": (lambda folder: status_text(folder, "total_steps", "1e400"), "status.json"),
    "steps beyond a float": (lambda folder: status_text(folder, "total_steps", "9" * 400), ""),
    "steps beyond an integer": (lambda folder: status_text(folder, "total_steps", "9" * 5000), ""),
    "a rate near 0": (lambda folder: add(folder, "metrics", metrics(40, images_per_second=1e-320)), ""),
    "a status without an end": (zeros_as_status, ""),
}


@pytest.mark.parametrize("sickness", SICK)
def test_a_sick_run_is_a_sentence_and_others_live(run: Path, sickness: str) -> None:
    begin_run(run.parent / "sick")
    make, sentence = SICK[sickness]
    make(run.parent / "sick")
    runs = WatchedRuns((run.parent,))
    for _ in range(2):
        healthy, sick = json.loads(runs.report(), parse_constant=pytest.fail)
        assert (healthy["state"], healthy["message"]) == ("running", "")
        assert len(healthy["curves"]["metrics"]["loss"]) == 3
        assert (sick["name"], set(sick)) == ("sick", set(healthy))
        assert sentence in sick["message"]


def test_a_long_file_is_read_in_chunks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "CHUNK", 150)
    curves = Curves(run / "metrics.jsonl")
    lengths = []
    for _ in range(5):
        curves.read_on()
        lengths.append(len(thinned(curves.curves["loss"])))
    assert lengths[0] == 1
    assert lengths[-1] == 3
    add(run, "metrics", {"step": 35, "text": 1000 * "x"}, metrics(40))
    for _ in range(12):
        curves.read_on()
    assert [step for step, _ in thinned(curves.curves["loss"])] == [10, 20, 30, 40]
