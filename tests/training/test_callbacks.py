"""Callbacks: called on every rank at every event of a run, where they may communicate."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation import evaluator
from rectified_flow.evaluation.features import average_colours
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.training.trainer import Callback, Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import Tiny, build_trainer, tiny_config

Event = tuple[str, int]


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


def train_with(config: TrainingConfig, dataset: ImageDataset, callback: Callback) -> None:
    build_trainer(config, dataset, callbacks=[callback]).train()


class FailsAt(Callback):
    def on_step(self, trainer: Trainer) -> None:
        if trainer.state.step == 2:
            raise ZeroDivisionError("a callback's own")


def fail_with(config: TrainingConfig, dataset: ImageDataset, train: Callable[..., None]) -> None:
    with pytest.raises(ZeroDivisionError, match="a callback's own"):
        train(config, dataset, FailsAt())


def test_a_callback_that_fails_ends_the_run_and_is_named(tmp_path: Path, flowers: ImageDataset) -> None:
    run_on_ranks(2, fail_with, tiny_config(tmp_path, train_num_steps=6, num_samples=0), flowers, train_with)
    status = checkpoint.load_document(tmp_path, "status.json")
    assert (status["state"], status["message"]) == ("failed", "a callback's own")
