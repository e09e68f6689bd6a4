"""Tests of a signal on any rank: all ranks save the same step, and the run resumes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rectified_flow.data.build import open_store
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import network_of
from rectified_flow.runs import folder
from rectified_flow.system.signals import Interrupted, stop_on_signals
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, build_trainer, losses, tiny_config, train

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
    assert "is training in --output_dir" in sentence
    assert "choose another folder" in sentence
