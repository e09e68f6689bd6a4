"""Tests that a run is the same for any number of processes, and after an interruption."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rectified_flow.data.store import ImageDataset
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.artifact import OUTPUTS_MANIFEST
from tests.ranks import run_on_ranks
from tests.training.runs import (
    RECTIFIED,
    Kind,
    Tiny,
    assert_same_bytes,
    build_trainer,
    losses,
    metrics,
    tiny_config,
    train,
)

STEPS = 20
FLAGS: dict[str, Any] = {"train_num_steps": STEPS, "save_every": 10, "sample_every": 10, "log_every": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, flowers: ImageDataset) -> "Runs":
    return Runs(tmp_path_factory.mktemp("runs"), flowers)


class Runs:
    """Runs by name, each made once."""

    def __init__(self, folder: Path, dataset: ImageDataset) -> None:
        self.folder, self.dataset = folder, dataset

    def get(self, name: str, world_size: int, tiny: Tiny = RECTIFIED, **flags: Any) -> Path:
        """The folder of a run."""
        output_dir = self.folder / name
        if not output_dir.exists():
            self.go(output_dir, world_size, tiny, **flags)
        return output_dir

    def go(self, output_dir: Path, world_size: int, tiny: Tiny = RECTIFIED, **flags: Any) -> None:
        config = tiny_config(output_dir, **(FLAGS | flags))
        results = run_on_ranks(world_size, train, config, self.dataset, tiny)
        assert results == [{"world_size": world_size, "step": config.train_num_steps}] * world_size

    def straight(self, world_size: int) -> Path:
        return self.get(f"straight-{world_size}", world_size)

    def stopped(self, world_size: int, name: str) -> Path:
        """A copy of a straight run that lacks its last checkpoint."""
        copy = shutil.copytree(self.straight(world_size), self.folder / name)
        shutil.rmtree(copy / f"checkpoints/step_{STEPS:08d}")
        return copy


def assert_close(one: Path, other: Path) -> None:
    expected, got = losses(one), losses(other)
    assert list(expected) == list(got) == list(range(2, STEPS + 1, 2))
    for step, loss in expected.items():
        assert got[step] == pytest.approx(loss, rel=1e-4), f"step {step}"
    for name in ("model.safetensors", "ema.safetensors"):
        a = load_file(one / f"checkpoints/step_{STEPS:08d}" / name)
        b = load_file(other / f"checkpoints/step_{STEPS:08d}" / name)
        for key, value in a.items():
            assert torch.linalg.vector_norm(value - b[key]) <= 1e-3 * torch.linalg.vector_norm(value), key


def test_two_processes_with_accumulation_train_alike(runs: Runs) -> None:
    assert_close(runs.straight(1), runs.get("2x2", 2, batch_size=4))


def test_another_seed_trains_differently(runs: Runs) -> None:
    """The comparisons of this file can fail."""
    other = losses(runs.get("seed-1", 1, seed=1, train_num_steps=4))
    assert other[4] != pytest.approx(losses(runs.straight(1))[4], rel=1e-3)


@pytest.mark.slow
def test_resuming_on_four_processes_is_byte_equal(runs: Runs) -> None:
    """From three ranks on, DistributedDataParallel sums in another order after its first backward pass."""
    straight, resumed = runs.straight(4), runs.stopped(4, "resumed")
    runs.go(resumed, 4)
    assert_same_bytes(resumed, straight, STEPS)
    assert losses(resumed) == losses(straight)


def test_a_checkpoint_of_two_processes_resumes_on_one(runs: Runs) -> None:
    moved = runs.stopped(2, "moved")
    runs.go(moved, 1)
    assert_close(runs.straight(2), moved)


def test_a_checkpoint_between_log_lines_loses_no_loss(runs: Runs) -> None:
    flags: dict[str, Any] = {"train_num_steps": 16, "save_every": 6, "log_every": 16}
    interrupted = runs.get("between", 2, **flags)
    again = shutil.copytree(interrupted, runs.folder / "between-again")
    shutil.rmtree(again / "checkpoints/step_00000016")
    runs.go(again, 2, **flags)
    assert losses(again) == losses(interrupted)


def test_metrics_hold_what_they_promise(runs: Runs) -> None:
    for row in metrics(runs.get("start-mean", 1, Tiny("mean"), train_num_steps=8, num_samples=0)):
        assert 0.5 < row["unweighted_loss"] < 2
    for row in metrics(runs.straight(2)):
        keys = ["step", "images_seen", "loss", "grad_norm", "learning_rate", "images_per_second", "bad_steps"]
        assert list(row) == keys
        assert row["images_seen"] == 16 * row["step"]
        assert row["images_per_second"] > 0
        assert row["grad_norm"] > 0
        assert row["learning_rate"] == pytest.approx(1e-3 * min(1, row["step"] / 5))


def test_a_run_leaves_its_files(runs: Runs) -> None:
    output_dir = runs.straight(2)
    left = {str(path.relative_to(output_dir)) for path in output_dir.rglob("*") if path.is_file()}
    tensors = ["model.safetensors", "ema.safetensors", "optimizer.safetensors"]
    expected = {"config.json", "metrics.jsonl", "loss.png", "status.json", ".run.lock"}
    hidden = (OUTPUTS_MANIFEST, ".manifest.lock")
    expected |= {f"{place}{name}" for place in ("", "checkpoints/", "samples/") for name in hidden}
    for step in ("step_00000010", "step_00000020"):
        expected |= {f"samples/{step}.png"}
        expected |= {f"checkpoints/{step}/{name}" for name in tensors}
        expected |= {f"checkpoints/{step}/{name}.json" for name in ("config", "flow", "trainer", "outputs", "manifest")}
    assert left == expected


def gradient(config: TrainingConfig, dataset: ImageDataset, tiny: Tiny, start: Path) -> torch.Tensor:
    """Return the gradients of the first step on this rank, as the optimizer gets them."""
    trainer = build_trainer(config, dataset, tiny)
    trainer.state.load(checkpoint.resolve(start))
    batches = trainer._batches()
    for micro_batch in range(trainer.batch.accumulation):
        trainer.stepper.forward_backward(next(batches), micro_batch)
    return torch.cat([p.grad.flatten() for p in trainer.state.parameters.values() if p.grad is not None])


@pytest.mark.parametrize(
    ("kind", "precision", "tolerance"), [("rectified", "no", 1e-5), ("mean", "no", 1e-5), ("mean", "bf16", 3e-2)]
)
def test_gradients_are_those_of_the_joined_batch(
    runs: Runs, tmp_path: Path, flowers: ImageDataset, kind: Kind, precision: str, tolerance: float
) -> None:
    """Compare gradients at trained weights, as most gradients of initial weights are zero."""
    start = runs.get(f"start-{kind}", 1, Tiny(kind), train_num_steps=8, num_samples=0)
    settings = {"mixed_precision": precision}
    [expected] = run_on_ranks(1, gradient, tiny_config(tmp_path / "a", **settings), flowers, Tiny(kind), start)
    assert expected.norm() > 0.1
    parts = tiny_config(tmp_path / "b", batch_size=4, **settings)
    for got in run_on_ranks(2, gradient, parts, flowers, Tiny(kind), start):
        assert (got - expected).norm() < tolerance * expected.norm()
