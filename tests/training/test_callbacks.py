"""Tests of callbacks: every rank calls them at every event, and shares the items of a measurement."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from errno import ESTALE
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor

from rectified_flow import Measurement
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import evaluator
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import average_colours
from rectified_flow.runs import checkpoint
from rectified_flow.runs import folder as run_folder
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.artifact import OUTPUTS_MANIFEST, claimed_names
from rectified_flow.system.signals import Interrupted
from rectified_flow.training.evaluations import Callback, EvaluationHook
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import RECTIFIED, Tiny, build_trainer, tiny_config, tiny_dataset, train

Event = tuple[str, int]


class Remover(Callback):
    """Removes the manifest of the run's folder after the first step."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.state.step == 1:
            (trainer.config.output_dir / OUTPUTS_MANIFEST).unlink()


class Mover(Callback):
    """Moves the run's folder away after the first step."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.state.step == 1:
            folder = trainer.config.output_dir
            folder.rename(folder.with_name("moved"))


class Recorder(Callback):
    """Writes down each event with its step, and asks all ranks for theirs."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, name: str, trainer: Trainer) -> None:
        step = trainer.state.step
        self.events.append((name, step))
        rank = trainer.accelerator.process_index
        gathered = trainer.accelerator.gather(torch.tensor([[rank, step, len(self.events)]]))
        assert gathered.tolist() == [[each, step, len(self.events)] for each in range(dist.get_world_size())]

    def on_setup(self, trainer: Trainer) -> None:
        self.record("setup", trainer)

    def on_start(self, trainer: Trainer) -> None:
        self.record("start", trainer)

    def on_step(self, trainer: Trainer) -> None:
        self.record("step", trainer)

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        assert metrics["images_seen"] == 16 * trainer.state.step
        assert metrics["loss"] > 0
        self.record("log", trainer)

    def on_evaluation(self, trainer: Trainer, distances: Mapping[str, float]) -> None:
        assert all(value >= 0 for value in distances.values())
        self.record("evaluation", trainer)

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        assert path == trainer.config.checkpoints / checkpoint.step_name(trainer.state.step)
        self.record("checkpoint", trainer)

    def on_end(self, trainer: Trainer) -> None:
        newest = checkpoint.newest_checkpoint(trainer.config.checkpoints)
        assert newest is not None
        assert checkpoint.step_of(newest) == trainer.state.step, "not everything is on the disk"
        self.record("end", trainer)


def record_events(config: TrainingConfig, dataset: ImageDataset) -> list[Event]:
    evaluator.load_features = lambda _name, _device: average_colours()  # type: ignore[attr-defined,assignment]
    recorder = Recorder()
    build_trainer(config, dataset, Tiny(evaluate_every=6), callbacks=[recorder]).train()
    return recorder.events


def test_every_event_reaches_every_rank(tmp_path: Path, flowers: ImageDataset) -> None:
    flags: dict[str, Any] = {"log_every": 2, "save_every": 3, "num_samples": 0}
    one, other = run_on_ranks(2, record_events, tiny_config(tmp_path, train_num_steps=6, **flags), flowers)
    assert one == other
    assert Counter(name for name, _ in one) == {
        "setup": 1, "start": 1, "step": 6, "log": 3, "evaluation": 1, "checkpoint": 2, "end": 1,
    }  # fmt: skip
    assert one[:3] == [("setup", 0), ("start", 0), ("step", 1)]
    assert one[-5:] == [("evaluation", 6), ("step", 6), ("log", 6), ("checkpoint", 6), ("end", 6)]
    assert [step for name, step in one if name == "step"] == [1, 2, 3, 4, 5, 6]
    assert [step for name, step in one if name == "checkpoint"] == [3, 6]
    resumed, other = run_on_ranks(2, record_events, tiny_config(tmp_path, train_num_steps=8, **flags), flowers)
    assert resumed == other
    assert resumed[:3] == [("setup", 0), ("start", 6), ("step", 7)]


class Sum(Measurement):
    """The sum of the squares of the first seven numbers, and of a weight of the network."""

    stopped_at: int | None = None
    full_at: int | None = None

    def __init__(self) -> None:
        super().__init__("sum", 7, every=4)
        self.calls = 0

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        if trainer.state.step == self.stopped_at and trainer.accelerator.is_main_process:
            raise Interrupted("SIGTERM")
        self.calls += len(numbers)
        weight = next(p for p in trainer.averaged_flow.parameters() if p.ndim == 1)[0]
        return torch.tensor([[number**2, float(weight)] for number in numbers])

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, float]:
        if trainer.state.step == self.full_at:
            raise OSError("no space left on device")
        assert rows.shape == (7, 2)
        return {"squares": float(rows[:, 0].sum()), "weight": float(rows[0, 1])}


def run(folder: str, cache: str, steps: int = 10, stopped_at: int | None = None, full_at: int | None = None) -> int:
    """Train ten steps; returns how many items this rank measured."""
    dataset = tiny_dataset(Path(cache))
    config = replace(tiny_config(Path(folder)), train_num_steps=steps, save_every=4, num_samples=0)
    measurement = Sum()
    measurement.stopped_at, measurement.full_at = stopped_at, full_at
    Trainer(RECTIFIED.build(dataset), dataset, config, callbacks=[measurement]).train()
    return measurement.calls


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "sum.jsonl").read_text().splitlines()]


def test_ranks_share_the_items_and_the_numbers_are_those_of_one(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    [alone] = run_on_ranks(1, run, str(tmp_path / "one"), cache)
    two = run_on_ranks(2, run, str(tmp_path / "two"), cache)
    assert alone == 4 * 7
    assert two == [4 * 4, 4 * 4], "seven items, and one twice"
    one, other = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["step"] for row in one] == [0, 4, 8, 10], "before training, every four steps, and the last"
    assert [row["squares"] for row in one] == [91] * 4
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_stop_on_one_rank_leaves_no_other_waiting(tmp_path: Path) -> None:
    cache, folder = str(tmp_path / "cache"), tmp_path / "run"
    run_on_ranks(2, run, str(folder), cache, 8, 8)
    assert [row["step"] for row in rows(folder)] == [0, 4]
    run_on_ranks(2, run, str(folder), cache)
    assert [row["step"] for row in rows(folder)] == [0, 4, 8, 10], "made up for on resuming"


def train_in_a_moved_folder(config: TrainingConfig, dataset: ImageDataset) -> tuple[int, bool]:
    """Train, and return the last step, and whether another run could lock the folder during the last step."""

    class Prober(Callback):
        is_free = True

        def on_step(self, trainer: Trainer) -> None:
            if trainer.state.step == config.train_num_steps:
                with suppress(Timeout), FileLock(config.output_dir / ".run.lock", timeout=0):
                    return
                self.is_free = False

    prober = Prober()
    ended = train(config, dataset, callbacks=[Mover(), prober])
    return ended["step"], prober.is_free


def test_a_run_whose_folder_is_moved_while_it_trains_keeps_others_out(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", train_num_steps=4, save_every=2, sample_every=2, num_samples=1)
    assert run_on_ranks(1, train_in_a_moved_folder, config, tiny_dataset(tmp_path)) == [(4, False)]
    assert (tmp_path / "run/config.json").exists()


def train_beside_a_slow_disk(config: TrainingConfig, dataset: ImageDataset) -> int:
    """Train while the file of the lock cannot be examined."""

    class Disk(Callback):
        def on_step(self, trainer: Trainer) -> None:
            patch.object(run_folder, "lock_of", side_effect=OSError(ESTALE, "stale file handle")).start()

    return int(train(config, dataset, callbacks=[Disk()])["step"])


def test_a_disk_that_does_not_answer_ends_no_run(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", train_num_steps=4, save_every=2, sample_every=2, num_samples=1)
    assert run_on_ranks(1, train_beside_a_slow_disk, config, tiny_dataset(tmp_path)) == [4]


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path) -> None:
    run_on_ranks(1, run, str(tmp_path / "run"), str(tmp_path / "cache"), 10, None, 4)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 8, 10]


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_whose_manifest_is_removed_while_it_trains_goes_on(tmp_path: Path, killed: bool) -> None:
    """The next checkpoint writes the manifest again; a run that was killed before is proven by its checkpoint."""
    config = tiny_config(tmp_path / "run", train_num_steps=4, save_every=2, sample_every=2, num_samples=1)
    dataset = tiny_dataset(tmp_path)
    run_on_ranks(1, partial(train, callbacks=[Remover()]), config, dataset)
    before = claimed_names(config.output_dir)
    assert {"config.json", "status.json", "metrics.jsonl", "bad_steps.jsonl", "loss.png", "samples"} <= before
    if killed:
        (config.output_dir / OUTPUTS_MANIFEST).unlink()
    [ended] = run_on_ranks(1, train, replace(config, train_num_steps=6), dataset)
    assert ended["step"] == 6
    assert claimed_names(config.output_dir) >= before


class BestPreview(Callback):
    """Lets the preview of step 2 be the best one."""

    def on_preview(self, trainer: Trainer, samples: Tensor) -> None:
        if trainer.state.step == 2:
            trainer.save_as_best()


def test_a_preview_may_be_the_best(tmp_path: Path) -> None:
    """No checkpoint is due at that step."""
    config = tiny_config(tmp_path / "run", train_num_steps=4, save_every=0, sample_every=2)
    assert build_trainer(config, tiny_dataset(tmp_path / "cache"), callbacks=[BestPreview()]).train()
    best = checkpoint.best_of(tmp_path / "run/checkpoints")
    assert best is not None
    assert checkpoint.step_of(best) == 2


class BestCheckpoint(Callback):
    """Calls each of the checkpoints of the first steps the best one, while it is being written."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        if trainer.state.step <= 4:
            trainer.save_as_best()


def test_a_checkpoint_that_could_not_be_written_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the name would lead nowhere, and the former best one would be removed."""
    save = checkpoint.save

    def save_to_a_full_disk(folder: Path, step: int, *args: Any, **options: Any) -> Path:
        if step == 4:
            raise OSError("no space is left")
        return save(folder, step, *args, **options)

    monkeypatch.setattr(checkpoint, "save", save_to_a_full_disk)
    config = tiny_config(tmp_path / "run", train_num_steps=8, save_every=2, keep_checkpoints=1)
    assert build_trainer(config, tiny_dataset(tmp_path / "cache"), callbacks=[BestCheckpoint()]).train()
    assert checkpoint.best_of(tmp_path / "run/checkpoints") == tmp_path / "run/checkpoints/step_00000002"


class BestStart(Callback):
    """Calls the state that the run starts from the best one."""

    def on_start(self, trainer: Trainer) -> None:
        trainer.save_as_best()


def test_the_checkpoint_that_a_run_resumes_from_may_be_the_best(tmp_path: Path) -> None:
    """A run that was stopped in an evaluation makes up for it at the start, and then keeps this checkpoint."""
    config = tiny_config(tmp_path / "run", train_num_steps=2, save_every=2, keep_checkpoints=1, num_samples=0)
    pictures = tiny_dataset(tmp_path / "cache")
    assert build_trainer(config, pictures).train()
    assert build_trainer(replace(config, train_num_steps=6), pictures, callbacks=[BestStart()]).train()
    assert checkpoint.best_of(tmp_path / "run/checkpoints") == tmp_path / "run/checkpoints/step_00000002"


def test_checkpoints_are_ranked_by_the_frechet_distance_alone(tmp_path: Path) -> None:
    pictures = tiny_dataset(tmp_path / "cache")
    with pytest.raises(UsageError, match="`metrics` of an EvaluationHook need frechet"):
        EvaluationHook(Evaluator(pictures, "efficientnet_lite0", num_samples=4, metrics=["copies"]), 2)
