"""The benchmarks: whose turn it is, where the table goes, and that each one still runs."""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from turns import PEER, Times, Turns, ratio, take_turns

from rectified_flow.training.state import TrainingState
from tests.patience import PATIENCE, wait_for

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def work(seconds: float, log: Path, turns: Turns) -> None:
    """Keep the processor busy, and write down whose turn it was."""
    turns.facts["name"] = f"{seconds:g}"
    while True:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
        with log.open("a") as file:
            file.write(f"{seconds:g} ")
        turns.done(work=10)


def leave(turns: Turns) -> None:
    turns.done()


@pytest.mark.slow
def test_turns_alternate_and_are_timed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    times = take_turns({"short": partial(work, 0.02, log), "long": partial(work, 0.06, log)}, rounds=2, pieces=2)
    assert log.read_text().split() == ["0.02", "0.06", *["0.02"] * 2, *["0.06"] * 4, *["0.02"] * 2]
    assert [len(each.seconds) for each in times.values()] == [2, 2]
    assert times["long"].facts == {"name": "0.06"}
    assert 0.006 <= times["long"].median < 0.02, "a unit of ten"
    assert 2 < ratio(times["long"], times["short"]).median < 4


def test_who_leaves_early_is_named() -> None:
    with pytest.raises(RuntimeError, match="deserter ended too early"):
        take_turns({"deserter": leave}, rounds=2)


def test_ratios_are_of_rounds() -> None:
    """A slow moment of the machine, in which both took ten times as long, is not seen."""
    assert str(ratio(Times([2, 20, 3], {}), Times([1, 10, 1], {}))) == "2.00 [2.00, 3.00]"


def test_a_machines_table_takes_the_place_of_its_last(tmp_path: Path) -> None:
    from bench import write_table

    page = tmp_path / "README.md"
    page.write_text("# Benchmarks\n\nText.\n")
    write_table("card (8 GB)", "| old |", page)
    write_table("processor", "| other |", page)
    write_table("card (8 GB)", "| new |", page)
    assert page.read_text() == "# Benchmarks\n\nText.\n\n## card (8 GB)\n\n| new |\n\n## processor\n\n| other |\n"


@pytest.mark.slow
def test_rounds_end_when_their_time_is_over(tmp_path: Path) -> None:
    """A round of all contenders is completed, so that ratios have as many of each."""
    times = take_turns({name: partial(work, 0.01, tmp_path / "log") for name in "ab"}, rounds=1000, minutes=0)
    assert [len(each.seconds) for each in times.values()] == [1, 1]


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


def test_a_part_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench

    monkeypatch.setattr(bench, "_measure", fail)
    [row] = bench.measure_part("data", PATIENCE / 60)
    assert row.remark == "failed, see the error above"


def fail(*_: object) -> None:
    raise ValueError("no luck")


def test_slow_bf16_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import training_speed

    flags = training_speed.Flags()
    for slowness, names in ((1.0, [PEER, "float32", "bf16"]), (40.0, [PEER, "float32"])):
        monkeypatch.setattr(training_speed, "compare_bf16", lambda slowness=slowness: slowness)
        assert list(training_speed.build_contenders(flags, 8, tmp_path)) == names
    [row] = training_speed.measure_rows(training_speed.Flags(image_sizes=(), pictures=1))
    assert row.remark == "left out: bf16 takes 40.0 times as long as float32 on this processor"


@pytest.mark.parametrize("name", sorted(file.stem for file in BENCHMARKS.glob("*.py")))
def test_every_benchmark_imports(name: str) -> None:
    """Without the peer, which only ``pip install -e .[benchmark]`` brings."""
    importlib.import_module(name)


@pytest.mark.slow
def test_a_tiny_comparison_of_mean_flow_steps() -> None:
    import mean_flow

    rows = mean_flow.measure_rows(mean_flow.Flags(image_size=8, batch_size=2, dim=8, rounds=1))
    assert [row.against for row in rows] == ["rectified flow step"] * 2


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


def spoil_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import first_gpu

    def to_another_device(module: nn.Module, *_: object) -> nn.Module:
        with torch.no_grad():
            next(module.parameters()).mul_(1.1)
        return module

    monkeypatch.setattr(first_gpu, "to_device", to_another_device)


def forget_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingState, "_load_moments", lambda *_: None)


def end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TrainingState, "update_averages")


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        pytest.param("mean-float32", spoil_weights, id="wrong number"),
        pytest.param("resume", forget_moments, id="lost state", marks=pytest.mark.slow),
        pytest.param("repeat", end_training, id="error", marks=pytest.mark.slow),
    ],
)
def test_a_fault_fails_on_a_first_run(
    check: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import first_gpu

    fault(monkeypatch)
    assert first_gpu.main(first_gpu.Flags(tiny=True, only=(check,))) == 1
    output = capfd.readouterr().out
    assert verdicts(output) == {check: "FAIL"}
    assert output.endswith(f"1 failed: {check}\n")


def test_a_first_run_names_what_its_time_was_too_short_for(capfd: pytest.CaptureFixture[str]) -> None:
    import first_gpu

    assert first_gpu.main(first_gpu.Flags(minutes=0.1, only=("pictures", "compiled-mean"))) == 0
    output = capfd.readouterr().out
    assert verdicts(output) == {"pictures": "skip", "compiled-mean": "skip"}
    assert "--only compiled-mean" in output
