"""Tests of ``--evaluate_every``: results in the run's folder, and the best checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation import evaluator
from rectified_flow.evaluation.features import average_colours
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.artifact import find_damage
from tests.ranks import run_on_ranks
from tests.training.runs import Tiny, tiny_config, train

EVALUATED = Tiny(evaluate_every=3)
FLAGS: dict[str, Any] = {"num_samples": 0, "save_every": 0, "keep_checkpoints": 1, "log_every": 3}
HEADLINE = "colours_8x8_frechet_distance"


def train_and_evaluate(config: TrainingConfig, dataset: ImageDataset) -> None:
    """Evaluate by colours alone, which is quick."""
    evaluator.load_features = lambda _name, _device: average_colours()  # type: ignore[attr-defined,assignment]
    train(config, dataset, EVALUATED)


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, flowers: ImageDataset) -> Path:
    """A run of 12 steps on two processes."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_on_ranks(2, train_and_evaluate, tiny_config(folder, train_num_steps=12, **FLAGS), flowers)
    return folder


def test_every_evaluation_is_written_down(run: Path) -> None:
    rows = evaluations(run)
    assert [row["step"] for row in rows] == [3, 6, 9, 12]
    for row in rows:
        assert row[HEADLINE] > 0
        assert (row["num_samples"], row["num_real"], row["split"], row["seed"]) == (20, 46, "train", 0)
    assert len({row[HEADLINE] for row in rows}) == 4
    assert (run / "evaluations.png").exists()


def test_the_best_checkpoint_is_kept(run: Path) -> None:
    rows = evaluations(run)
    best = min(rows, key=lambda row: row[HEADLINE])["step"]
    kept = checkpoint.best_of(run / "checkpoints")
    assert kept is not None
    assert checkpoint.step_of(kept) == best
    early = 3
    assert {checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run / "checkpoints")} == {early, best, 12}
    assert find_damage(kept) is None
