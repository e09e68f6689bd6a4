"""Tests of ``--evaluate_every``: results in the run's folder, and the best checkpoint."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation import evaluator
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import average_colours
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.artifact import find_damage
from rectified_flow.training.evaluations import EvaluationHook
from rectified_flow.training.trainer import Callback, Trainer
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


def test_the_best_so_far_is_told_where_another_measure_names_the_best(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=12, **FLAGS)
    [printed] = run_on_ranks(1, train_by_given_distances, config, flowers, [50.0, 40.0, 45.0, 30.0])
    said = [line for line in printed.splitlines() if line.startswith("evaluation")]
    assert ["best so far" in line for line in said] == [True, True, False, True]
    kept = checkpoint.best_of(tmp_path / "checkpoints")
    assert kept is not None
    assert checkpoint.step_of(kept) == 3


def train_by_given_distances(config: TrainingConfig, dataset: ImageDataset, distances: list[float]) -> str:
    evaluator.load_features = lambda _name, _device: average_colours()  # type: ignore[attr-defined,assignment]
    given = iter(distances)
    measures = Evaluator(dataset, "efficientnet_lite0", num_samples=4)
    measures.compute = lambda _generated: {HEADLINE: next(given)}  # type: ignore[method-assign,assignment]
    with redirect_stdout(StringIO()) as said:
        train(config, dataset, callbacks=[EvaluationHook(measures, 3, keeps_best=False), FirstIsBest()])
    return said.getvalue()


class FirstIsBest(Callback):
    """Names the checkpoint of step 3."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.state.step == 3:
            trainer.save_as_best()
