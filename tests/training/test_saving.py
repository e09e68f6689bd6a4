"""Checkpoints are written while the weights go on changing."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rectified_flow import checkpoint
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.saving import Saver


def test_a_checkpoint_holds_the_weights_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save comes while the disk is busy with the first, and uses the same memory for its copy."""
    disk_is_free, save = threading.Event(), checkpoint.save

    def save_late(*arguments: Any, **settings: Any) -> Path:
        assert disk_is_free.wait(10)
        return save(*arguments, **settings)

    monkeypatch.setattr(checkpoint, "save", save_late)
    saver = Saver(TrainingConfig(output_dir=tmp_path), draw=lambda: None, warn=pytest.fail)
    weights = {"weight": torch.zeros(3)}
    saver.save(1, {checkpoint.MODEL_FILE: weights}, {})
    weights["weight"] += 1
    threading.Timer(0.2, disk_is_free.set).start()
    saver.save(2, {checkpoint.MODEL_FILE: weights}, {})
    weights["weight"] += 1
    saver.finish()
    saved = [load_file(path / checkpoint.MODEL_FILE) for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")]
    assert sorted(float(each["weight"][0]) for each in saved) == [0, 1]
