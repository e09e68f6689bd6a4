"""Tests of runs on a full disk, and of runs that resume with other flags."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rectified_flow.data.store import ImageDataset
from rectified_flow.runs import checkpoint
from rectified_flow.runs.resume import choose_checkpoint, identify_run
from tests.ranks import run_on_ranks
from tests.training.runs import metrics, tiny_config, tiny_dataset, train


def test_another_seed_batch_or_precision_is_reported(
    tmp_path: Path, flowers: ImageDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    def resume(batch: int, precision: str, **flags: Any) -> list[str]:
        config = tiny_config(tmp_path, **flags)
        run = identify_run(config, flowers.fingerprint, batch, precision)
        choose_checkpoint(config, run, None)
        return capsys.readouterr().out.splitlines()

    run_on_ranks(1, train, tiny_config(tmp_path, train_num_steps=1), flowers)
    assert resume(16, "float32") == []
    assert resume(8, "bf16", seed=3) == [
        "warning: the seed was 0 and is now 3: the run changes",
        "warning: the global batch was 16 and is now 8: the run changes",
        "warning: the precision was float32 and is now bf16: the run changes",
    ]


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
