"""Tests of checkpoints that are written while the weights change, and of runs on a full disk."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import Tensors
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.run import BackgroundSaver
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.training.runs import metrics, tiny_config, tiny_dataset, train


def write(run: Path, step: int, may_write: threading.Event | None = None) -> Callable[[Tensors], Path]:
    """A function that writes a checkpoint of this step, when it may."""

    def save(tensors: Tensors) -> Path:
        assert may_write is None or may_write.wait(PATIENCE)
        return checkpoint.save(run / "checkpoints", step, tensors, {})

    return save


def test_a_checkpoint_holds_the_weights_of_its_step(tmp_path: Path) -> None:
    """The second save comes while the disk is busy with the first."""
    disk_is_free = threading.Event()
    saver = BackgroundSaver(TrainingConfig(output_dir=tmp_path))
    weights = {"weight": torch.zeros(3)}
    saver.save(1, {checkpoint.MODEL_FILE: weights}, write(tmp_path, 1, disk_is_free))
    weights["weight"] += 1
    threading.Timer(0.2, disk_is_free.set).start()
    saver.save(2, {checkpoint.MODEL_FILE: weights}, write(tmp_path, 2, disk_is_free))
    weights["weight"] += 1
    saver.finish()
    saved = [load_file(path / checkpoint.MODEL_FILE) for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")]
    assert sorted(float(each["weight"][0]) for each in saved) == [0, 1]


def test_a_full_disk_keeps_the_run_and_the_checkpoint_before(tmp_path: Path) -> None:
    """Make writing a checkpoint, the metrics and the samples fail for some steps, as on a full disk."""
    results = run_on_ranks(2, train_on_a_full_disk, tmp_path)
    assert results == [{"world_size": 2, "step": 8}] * 2
    kept = [path.name for path in sorted((tmp_path / "checkpoints").glob("[!.]*"))]
    assert kept == ["step_00000002", "step_00000008"]
    assert [row["step"] for row in metrics(tmp_path)] == [2, 4, 6, 8]
    assert [path.name for path in sorted((tmp_path / "samples").glob("*.png"))] == [
        "step_00000002.png",
        "step_00000008.png",
    ]


def train_on_a_full_disk(output_dir: Path) -> dict[str, int]:
    real_open = Path.open
    full = ("step_00000004", "step_00000006")

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        if any(step in str(path) for step in full):
            path.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        safetensors_save(tensors, path)

    def open_(path: Path, *args: Any, **settings: Any) -> Any:
        if path.name == "metrics.jsonl" and args == ("r+b",) and steps.pop(0) in (4, 6):
            with real_open(path, "ab") as file:
                file.write(b'{"step": 4, "los')
            raise OSError(28, "No space left on device")
        if path.suffix == ".tmp" and any(step in path.name for step in full):
            raise OSError(28, "No space left on device")
        return real_open(path, *args, **settings)

    steps = [2, 4, 4, 6, 6, 8]  # a line that failed is tried again when a checkpoint is saved
    safetensors_save = checkpoint.save_file  # type: ignore[attr-defined]
    checkpoint.save_file = save_file  # type: ignore[attr-defined,assignment]
    Path.open = open_  # type: ignore[method-assign,assignment]
    config = tiny_config(output_dir, train_num_steps=8, save_every=2, sample_every=2, log_every=2)
    return train(config, tiny_dataset(output_dir / "cache"))
