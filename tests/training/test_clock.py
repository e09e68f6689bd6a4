"""Tests of the time that a run is given: its pace, its clock, and runs that end in time."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pytest

from rectified_flow.runs.folder import CLOCK_FILE
from rectified_flow.training import clock as clock_module
from rectified_flow.training.clock import PAUSE, Clock, Pace
from rectified_flow.training.optimizers import build_schedule
from rectified_flow.training.trainer import Trainer
from tests.training.runs import assert_same_bytes, build_trainer, metrics, tiny_config, tiny_dataset


def test_a_pace_without_changes_is_the_identity() -> None:
    pace = Pace(7)
    assert [pace.position(step) for step in range(8)] == list(range(8))
    assert pace.total == 7
    assert pace.stretch(3) == 1


def test_a_pace_is_continuous_and_ends_with_the_plan() -> None:
    """Half of the plan at step 50, three quarters at step 60, and the rest in 5 steps."""
    pace = Pace(100, ((50, 70), (60, 65)))
    assert [pace.position(step) for step in (0, 50, 60, 65)] == [0, 50, 75, 100]
    assert [pace.stretch(step) for step in (49, 50, 60)] == [1, 2.5, 5]
    assert pace.total == 65


class Machine:
    """A machine with a clock of its own, on which a step takes ``step_time`` seconds."""

    def __init__(self) -> None:
        self.now, self.processor = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.processor

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.processor += seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    with patch.object(clock_module, "time", made):
        yield made


def run(machine: Machine, clock: Clock, planned: int, step_times: list[tuple[float, float]]) -> Pace:
    """Run to the end; a step takes the time of the last entry whose share of the budget has begun."""
    pace, step = clock.pace(planned), 0
    while step < pace.total:
        step_time = [each for begin, each in step_times if clock.elapsed >= begin * clock.seconds][-1]
        machine.work(step_time)
        step += 1
        if clock.tick(step, pace.total):
            pace = clock.compare(pace)
    return pace


@pytest.mark.parametrize(
    "step_times",
    [
        *([(0, 1.0)], [(0, 1.02)], [(0, 3.0)], [(0, 0.2)], [(0, 1.0), (0.5, 4.0)], [(0, 4.0), (0.4, 0.5)]),
        [(0, 1.0), (0.3, 3.0), (0.6, 0.7)],
    ],
)
def test_a_run_ends_in_time_on_a_machine_of_changing_speed(
    machine: Machine, step_times: list[tuple[float, float]]
) -> None:
    """The plan has 1,000 steps of a second. On a machine that is as fast as planned, nothing changes."""
    clock = Clock(1000, began=100)
    pace = run(machine, clock, 1000, step_times)
    assert 930 < clock.elapsed <= 1045
    assert pace.position(pace.total) == pytest.approx(1000)
    assert (pace.changes == ()) == (step_times in ([(0, 1.0)], [(0, 1.02)]))


def test_a_run_is_not_longer_than_its_pictures_allow(machine: Machine) -> None:
    assert run(machine, Clock(1000, 1000, began=100), 1000, [(0, 0.2)]).changes == ()
    machine.now = 100
    assert run(machine, Clock(1000, 1500, began=100), 1000, [(0, 0.2)]).total == 1500


def test_a_run_that_began_late_still_trains_a_quarter_of_the_time(machine: Machine) -> None:
    clock = Clock(1000, began=100)
    machine.work(990)  # reading, or the samples of a teacher
    run(machine, clock, 1000, [(0, 1.0)])
    assert 1200 < clock.elapsed < 1260


def test_a_pause_of_the_machine_does_not_count(machine: Machine) -> None:
    """A machine that sleeps uses no processor time; a step that takes an hour does."""
    clock = Clock(1000, began=100)
    for step in range(1, 11):
        machine.work(1)
        assert not clock.tick(step, 1000)
    machine.sleep(3600)
    assert not clock.tick(11, 1000)
    assert clock.elapsed == pytest.approx(10)
    machine.work(PAUSE + 1)
    assert clock.tick(12, 1000)
    assert clock.elapsed == pytest.approx(11 + PAUSE)


def test_a_resumed_run_has_the_rest_of_its_time(tmp_path: Path, machine: Machine) -> None:
    clock = Clock(1000, 700, asked=900, began=100, changes=[(3, 9)])
    machine.work(250)
    clock.write(tmp_path, 8)
    machine.sleep(86400)
    resumed = Clock.resumed(tmp_path)
    assert resumed is not None
    assert (resumed.elapsed, resumed.seconds, resumed.most_steps) == (250, 1000, 700)
    assert resumed.pace(8) == Pace(8, ((3, 9),))
    same, other = (Clock.resumed(tmp_path, seconds=seconds) or Clock(1) for seconds in (900, 1000))
    assert (same.elapsed, same.seconds) == (250, 1000), "the same command"
    assert (other.elapsed, other.seconds, other.changes) == (0, 1000, ((3, 9),)), "another time begins anew"
    assert Clock.resumed(tmp_path / "none") is None
    assert [Clock.used_before(tmp_path, asked) for asked in (900, 1000)] == [250, 0], "killed before a checkpoint"
    assert Clock.used_before(tmp_path / "none", 900) == 0


def late_at(step: int, total: int) -> Clock:
    """A clock that changes the number of steps after one of them."""

    class Late(Clock):
        def tick(self, now: int, total: int) -> bool:
            return now == step and not self.changes and total == 24

        def compare(self, pace: Pace) -> Pace:
            self.changes = ((step, total),)
            return self.pace(pace.planned)

    return Late(1000)


def test_the_last_step_changes_nothing(machine: Machine) -> None:
    """Whether it is the last one of the plan, or a callback ended the run there."""
    assert run(machine, Clock(13, began=100), 13, [(0, 0.9)]).total == 13
    machine.now, clock = 100.0, Clock(1000, began=100)
    for step in range(1, 30):
        machine.work(1)
        clock.tick(step, 1000)
    machine.work(1)
    assert not clock.tick(30, 30)


@pytest.mark.parametrize(
    ("clock", "left"),
    [
        (lambda now: Clock(3600, 12, began=now), 100),  # limited by its pictures
        (lambda now: Clock(3600, 50, began=now - 600), 3000),
        (lambda now: Clock(1000, used=1000, changes=[(8, 12)]), 100),  # it repeats a change that the disk did not keep
        (lambda now: Clock(1000, used=1000), 100),  # it has no time left for its last steps
        (lambda now: Clock(1000, began=now - 990), 250),  # it trains for a quarter of its time, however late it begins
    ],
)
def test_the_status_says_when_the_run_ends(tmp_path: Path, clock: Callable[[float], Clock], left: float) -> None:
    trainer = build_trainer(tiny_config(tmp_path / "run", train_num_steps=12), tiny_dataset(tmp_path / "cache"))
    trainer.clock = clock(time.monotonic())
    trainer.clock.tick(2, 12)
    trainer.state.step = 2
    with patch.object(trainer.run, "write_status") as written:
        trainer._write_times(10.0)
    ends = written.call_args.kwargs["times"]["ends"]
    assert datetime.fromisoformat(ends).timestamp() - time.time() == pytest.approx(left, abs=5)


def test_a_shortened_run_ends_as_planned_and_resumes_byte_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate falls to 0 in fewer steps, intervals follow, and a killed run repeats the change."""
    data = tiny_dataset(tmp_path / "cache")
    flags = {
        "train_num_steps": 24,
        "lr_warmup_steps": 2,
        "lr_decay": "cosine",
        "log_every": 2,
        "sample_every": 12,
        "ema_decay": 0.5,
    }

    def trainer(name: str, clock: Clock | None) -> Trainer:
        return build_trainer(tiny_config(tmp_path / name, save_every=6, **flags), data, clock=clock)

    whole = trainer("whole", late_at(8, 16))
    assert whole.train()
    assert whole.state.step == 16
    assert [row["step"] for row in metrics(tmp_path / "whole")] == [2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    pictures = sorted(path.stem for path in (tmp_path / "whole/samples").glob("*.png"))
    assert pictures == ["step_00000010", "step_00000016"]
    schedule, rates = build_schedule(whole.config), [row["learning_rate"] for row in metrics(tmp_path / "whole")]
    assert rates[-1] == pytest.approx(whole.config.learning_rate * schedule(22, 24))

    clock = late_at(8, 16)
    stopped = trainer("stopped", clock)
    with patch.object(Trainer, "preview", side_effect=InterruptedError("killed")), pytest.raises(InterruptedError):
        stopped.train()  # after the change at step 8; the last checkpoint is that of step 6
    assert (tmp_path / "stopped" / CLOCK_FILE).exists()
    capsys.readouterr()
    assert trainer("stopped", Clock.resumed(tmp_path / "stopped")).train()
    assert "run         16 steps = " in capsys.readouterr().out
    assert_same_bytes(tmp_path / "whole", tmp_path / "stopped", 16)


def test_a_run_that_is_killed_before_its_first_checkpoint_repeats_its_changes(tmp_path: Path) -> None:
    data = tiny_dataset(tmp_path / "cache")
    flags = {"train_num_steps": 24, "lr_decay": "cosine", "save_every": 0, "ema_decay": 0.5, "num_samples": 0}
    assert build_trainer(tiny_config(tmp_path / "whole", **flags), data, clock=late_at(8, 16)).train()
    (tmp_path / "killed").mkdir()
    clock = late_at(8, 16)
    clock.changes = ((8, 16),)
    clock.write(tmp_path / "killed", 24)
    resumed = Clock.resumed(tmp_path / "killed")
    assert build_trainer(tiny_config(tmp_path / "again", **flags), data, clock=resumed).train()
    assert_same_bytes(tmp_path / "whole", tmp_path / "again", 16)


def test_a_full_disk_does_not_stop_a_change_of_the_pace(tmp_path: Path) -> None:
    clock = late_at(8, 16)

    def write(*_: object, **__: object) -> None:
        if clock.changes:
            raise OSError(28, "No space left on device")

    flags = {"train_num_steps": 24, "save_every": 0, "num_samples": 0}
    with patch.object(clock, "write", write):
        trainer = build_trainer(tiny_config(tmp_path / "run", **flags), tiny_dataset(tmp_path / "cache"), clock=clock)
        assert trainer.train()
    assert trainer.state.step == 16


@pytest.mark.parametrize(("step", "least"), [(1, 0.24), (50, 0.0)])
def test_a_run_that_has_not_trained_yet_has_a_quarter_of_its_time(machine: Machine, step: int, least: float) -> None:
    """Also if its time went into the samples of a teacher, before it was killed and resumed."""
    clock = Clock(1000, used=980, began=machine.now)
    machine.work(1)
    clock.tick(step, 2000)
    assert clock.left == pytest.approx(max(1000 * least, 20), abs=15)
