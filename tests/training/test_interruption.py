"""Tests of a signal on any rank, of checkpoints written while the weights change, and of a full disk."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import network_of
from rectified_flow.runs import checkpoint, folder
from rectified_flow.runs.checkpoint import Tensors
from rectified_flow.runs.run import BackgroundSaver
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.signals import Interrupted, stop_on_signals
from rectified_flow.system.terminal import prepare_streams
from rectified_flow.training.evaluations import Callback
from rectified_flow.training.trainer import Trainer
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.training.runs import (
    Tiny,
    assert_same_bytes,
    build_trainer,
    losses,
    metrics,
    tiny_config,
    tiny_dataset,
    train,
)

STEPS = 16


class Signalling(ImageDataset):
    """Sends a signal to its process when one rank reads the batch of a step."""

    rank, step, batches = 0, 0, 0

    def read_batch(self, indices: Any) -> dict[str, Tensor]:
        self.batches += len(indices) > 1
        if self.batches == self.step and int(os.environ.get("RANK", "0")) == self.rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().read_batch(indices)


def train_with_signal(output_dir: Path, path: Path, rank: int, step: int) -> tuple[bool, int]:
    dataset = Signalling(path)
    dataset.rank, dataset.step = rank, step
    trainer = build_trainer(tiny_config(output_dir, train_num_steps=STEPS, num_samples=0), dataset)
    with stop_on_signals():
        return trainer.train(), trainer.state.step


def train_with_signal_in_preview(output_dir: Path, dataset: ImageDataset) -> tuple[bool, int]:
    trainer = build_trainer(tiny_config(output_dir, train_num_steps=STEPS, sample_every=4, sample_steps=8), dataset)
    network, calls = network_of(trainer.averaged_flow), []

    def stop_in_the_second_preview(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 12 and os.environ["RANK"] == "1":  # ab2: 8 calls a preview
            os.kill(os.getpid(), signal.SIGTERM)

    network.register_forward_pre_hook(stop_in_the_second_preview)
    with stop_on_signals():
        return trainer.train(), trainer.state.step


def status(output_dir: Path) -> dict[str, Any]:
    return dict(json.loads((output_dir / "status.json").read_text()))


def test_a_signal_on_any_rank_ends_all_at_the_same_step(tmp_path: Path, flowers: ImageDataset) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_on_ranks(2, train, tiny_config(straight, train_num_steps=STEPS, num_samples=0), flowers)
    assert run_on_ranks(2, train_with_signal, stopped, flowers.path, 1, 7) == [(False, 7)] * 2
    assert [path.name for path in (stopped / "checkpoints").glob("step_*")] == ["step_00000007"]
    assert status(stopped)["state"] == "interrupted"
    run_on_ranks(2, train, tiny_config(stopped, train_num_steps=STEPS, num_samples=0), flowers)
    assert_same_bytes(straight, stopped, STEPS)
    assert losses(straight) == losses(stopped)
    assert status(stopped)["state"] == "finished"
    assert status(stopped)["step"] == STEPS


def test_a_preview_is_given_up_on_all_ranks(tmp_path: Path, flowers: ImageDataset) -> None:
    assert run_on_ranks(2, train_with_signal_in_preview, tmp_path, flowers) == [(False, 8)] * 2
    assert [path.name for path in (tmp_path / "samples").glob("*.png")] == ["step_00000004.png"]
    assert (tmp_path / "checkpoints/step_00000008/manifest.json").exists()


def test_building_a_store_is_given_up(tmp_path: Path, flowers: ImageDataset) -> None:
    class SignallingFlowers(SyntheticFlowers):
        def load(self, index: int) -> Any:
            if index == 50:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().load(index)

    with stop_on_signals(), pytest.raises(Interrupted):
        open_store(SignallingFlowers(8, count=100), 4, cache_dir=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def hold_folder(output_dir: Path, dataset: ImageDataset) -> str:
    """Train while a second run tries the same folder."""
    folder.LOCK_TIMEOUT = 0.2  # type: ignore[attr-defined]
    first: Trainer = build_trainer(tiny_config(output_dir, train_num_steps=2), dataset)
    second: Trainer = build_trainer(tiny_config(output_dir, train_num_steps=2), dataset)
    with first.run.locked():
        first.run.write_status(running=True)
        with pytest.raises(UsageError) as problem:
            second.train()
        assert not (output_dir / "metrics.jsonl").exists()
    assert second.train()
    return str(problem.value)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, flowers: ImageDataset) -> None:
    [sentence] = run_on_ranks(1, hold_folder, tmp_path / "a", flowers)
    assert "is training in `output_dir`" in sentence
    assert "choose another folder" in sentence


def test_a_refused_start_leaves_the_status_of_the_run(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=2)
    run_on_ranks(1, train, config, flowers)
    before = (tmp_path / "status.json").read_text()
    [sentence] = run_on_ranks(1, train_another_flow, config, flowers)
    assert sentence.startswith("cannot resume from")
    assert (tmp_path / "status.json").read_text() == before


def train_another_flow(config: TrainingConfig, dataset: ImageDataset) -> str:
    with pytest.raises(UsageError) as problem:
        train(config, dataset, Tiny("mean"))
    return str(problem.value)


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


def test_a_slow_disk_does_not_lose_the_last_step(tmp_path: Path) -> None:
    """Step 3 is being written when step 4, the last and the best one, is to be saved, and the other rank waits."""
    results = run_on_ranks(2, train_on_a_slow_disk, tmp_path)
    assert results == [{"world_size": 2, "step": 4}] * 2
    checkpoints = tmp_path / "checkpoints"
    assert checkpoint.newest_checkpoint(checkpoints) == checkpoint.best_of(checkpoints) == checkpoints / "step_00000004"
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"


def train_on_a_slow_disk(output_dir: Path) -> dict[str, int]:
    save = checkpoint.save

    def save_slowly(folder: Path, step: int, *args: Any, **settings: Any) -> Path:
        time.sleep(3 if step == 3 else 0)
        return save(folder, step, *args, **settings)

    checkpoint.save = save_slowly
    config = tiny_config(output_dir, train_num_steps=4, save_every=3, rank_timeout=2.0)
    return train(config, tiny_dataset(output_dir / "cache"), callbacks=[Best()])


class Best(Callback):
    """Calls the last step the best one."""

    def on_step(self, trainer: Trainer) -> None:
        if trainer.is_due(0):
            trainer.save_as_best()


def train_into_a_closed_pipe(output_dir: Path, path: Path) -> bool:
    """Train while nobody reads stdout and stderr any more, as after ``| head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    before = os.dup(1), os.dup(2), sys.stdout, sys.stderr
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    try:
        prepare_streams()
        done, _ = train_with_signal(output_dir, path, 0, 7)
        print("unread", flush=True)
        return done
    finally:
        os.dup2(before[0], 1)
        os.dup2(before[1], 2)
        sys.stdout, sys.stderr = before[2:]


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, flowers: ImageDataset) -> None:
    assert run_on_ranks(1, train_into_a_closed_pipe, tmp_path, flowers.path) == [False]
    assert (tmp_path / "checkpoints/step_00000007/manifest.json").exists()
