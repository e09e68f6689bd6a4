"""Measurements: every rank has a share, a stop or a full disk does no harm, and what was missed is made up for."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rectified_flow import Measurement
from rectified_flow.system.signals import Interrupted
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import RECTIFIED, tiny_config, tiny_dataset


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


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path) -> None:
    run_on_ranks(1, run, str(tmp_path / "run"), str(tmp_path / "cache"), 10, None, 4)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 8, 10]
