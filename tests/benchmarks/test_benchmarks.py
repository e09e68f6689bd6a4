"""Tests of the benchmarks: time limits, and the checks of a first run on a GPU."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from turns import Turns, take_turns

from tests.patience import PATIENCE, wait_for


def leave(turns: Turns) -> None:
    turns.done()


def test_who_leaves_early_is_named() -> None:
    with pytest.raises(RuntimeError, match="deserter ended too early"):
        take_turns({"deserter": leave}, rounds=2)


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    import bench

    [row] = bench.measure_part("data", 0)
    assert (row.measured, row.remark) == ("not measured", "not within 0 minutes on this machine")
    sleeps = f"import time; time.sleep({PATIENCE})"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeps!r}])"
    process = subprocess.Popen([sys.executable, "-c", starts])
    children = wait_for("a process started by another", psutil.Process(process.pid).children)
    bench._end(process.pid)
    process.wait()
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def verdicts(output: str) -> dict[str, str]:
    """The verdict of each check in what first_gpu.py printed, between its first and its last line."""
    return {name: verdict for verdict, name, *_ in map(str.split, output.splitlines()[1:-1])}


@pytest.mark.slow
def test_the_first_run_on_a_gpu_passes_on_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    import first_gpu

    assert first_gpu.main(first_gpu.Flags(tiny=True)) == 0
    found = verdicts(capfd.readouterr().out)
    assert list(found) == list(first_gpu.CHECKS)
    for name, check in first_gpu.CHECKS.items():
        assert found[name] in (("skip",) if check.needs_gpu else ("pass", "figure")), name
    assert {"rectified-float32", "mean-bf16", "resume", "compiled-mean"} <= {
        name for name, verdict in found.items() if verdict == "pass"
    }


def test_a_wrong_number_fails_on_a_first_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import first_gpu

    def to_another_device(module: nn.Module, *_: object) -> nn.Module:
        with torch.no_grad():
            next(module.parameters()).mul_(1.1)
        return module

    monkeypatch.setattr(first_gpu, "to_device", to_another_device)
    assert first_gpu.main(first_gpu.Flags(tiny=True, only=("mean-float32",))) == 1
    output = capfd.readouterr().out
    assert verdicts(output) == {"mean-float32": "FAIL"}
    assert output.endswith("1 failed: mean-float32\n")


def test_a_run_is_timed_while_it_is_killed_and_beside_other_programs(tmp_path: Path) -> None:
    """A command that is killed twice starts three times; the busy programs end with it."""
    import budget

    log, before = tmp_path / "log.txt", len(psutil.Process().children())
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1.2)"]
    killed = budget.Situation("", kills=(0.3, 0.6), busy_from=0.3)
    seconds, code = budget.run_in(killed, command, 3.0, log)
    assert (code, 3 <= seconds < PATIENCE) == (0, True)
    assert log.read_text() == "begun\n" * 3
    assert len(psutil.Process().children()) == before
    seconds, code = budget.run_in(budget.Situation(""), command, 0.1, log)
    assert (code, seconds < 1.2) == (-9, True), "a run that takes several times its budget is ended"


def test_the_rows_of_a_table_have_the_plan(tmp_path: Path) -> None:
    import budget

    output = "time        2.0 s to start and read, 50 s to train\r 5%|\rlength      7 steps of 8\nother       1\n"
    plan = budget.plan_of(output.replace("s to train", "s to train\n"))
    assert plan == {"time": ["2.0 s to start and read, 50 s to train"], "length": ["7 steps of 8"]}
    row = budget.Result("1m", "c", 9, 66.0, 60.0, 0.5, [5, 6], [1, 0], plan)
    (tmp_path / "rows.jsonl").write_text(json.dumps(asdict(row)) + '\n{"budget": ')
    assert budget.read_rows(tmp_path / "rows.jsonl") == [row]
    assert "| 1m | c: busy from the middle | 9 | 66 | **1.10** | 0.5 | 5 + 6 | 1 + 0 | 2.0 s to" in budget.table([row])
