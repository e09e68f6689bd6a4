"""--evaluate_every: measured on all ranks alike, written down, and the best checkpoint kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from rectified_flow import checkpoint
from rectified_flow.data.image_store import ImageDataset
from tests.ranks import run_on_ranks
from tests.training.runs import tiny_config, train

FLAGS: dict[str, Any] = {"evaluate_every": 3, "num_samples": 0, "save_every": 0, "keep_checkpoints": 1, "log_every": 3}
HEADLINE = "efficientnet_lite0_frechet_distance"


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, flowers: ImageDataset) -> Path:
    """A run of 12 steps on two processes."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_on_ranks(2, train, tiny_config(folder, train_num_steps=12, **FLAGS), flowers)
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
    assert {checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run / "checkpoints")} == {best, 12}
    assert checkpoint.find_damage(kept) is None


def test_one_process_stopped_between_finds_the_same(run: Path, tmp_path: Path, flowers: ImageDataset) -> None:
    for steps in (7, 12):
        run_on_ranks(1, train, tiny_config(tmp_path, train_num_steps=steps, **FLAGS), flowers)
    before, after = evaluations(run), [row for row in evaluations(tmp_path) if row["step"] % 3 == 0]
    assert [row["step"] for row in after] == [row["step"] for row in before]
    for one, two in zip(before, after, strict=True):
        assert two[HEADLINE] == pytest.approx(one[HEADLINE], rel=1e-2)
    assert checkpoint.best_of(tmp_path / "checkpoints") is not None
