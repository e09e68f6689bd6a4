"""Reflow: pairs that are what the flow makes, drawn by any number of processes, and a straighter flow of them."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState

from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.data import open_pictures
from rectified_flow.cli.distill import DistillationData, open_drawn
from rectified_flow.cli.record import resolved
from rectified_flow.cli.train import train
from rectified_flow.data.store import StoreDataset, StoreWriter
from rectified_flow.errors import UsageError
from rectified_flow.flags import command_line, parse
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from tests.ranks import run_on_ranks
from tests.training.runs import losses

COUNT, STEPS = 150, 3


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a conditional rectified flow on tiny flowers."""
    folder = tmp_path_factory.mktemp("teacher")
    small = {"dataset": "synthetic-flowers", "image_size": 8, "dim": 8, "dim_mults": (1, 2), "use_cfg": True}
    config = parsed(**small, prediction="clean", train_num_steps=5, num_samples=0, output_dir=folder)
    run_on_ranks(1, train, config)
    return folder


def parsed(**flags: Any) -> TrainConfig:
    return parse(TrainConfig, "", command_line(flags))


def reflow_config(teacher: Path, output_dir: Path, **flags: Any) -> TrainConfig:
    more = {"teacher_samples": COUNT, "teacher_steps": STEPS, "num_samples": 0, "log_every": 3} | flags
    return parsed(method="reflow", teacher=teacher, output_dir=output_dir, **more)


def draw_pairs(teacher: Path, output_dir: Path, **flags: Any) -> Path:
    config, _ = resolved(reflow_config(teacher, output_dir, **flags))
    request = DistillationData.of(config)
    assert request is not None
    return open_drawn(request, open_pictures(config.data), config)[0].path


@pytest.fixture(scope="module")
def pairs(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> StoreDataset:
    """Drawn by two processes."""
    path, other = run_on_ranks(2, draw_pairs, teacher, tmp_path_factory.mktemp("run"))
    assert path == other
    return StoreDataset(path)


def test_a_pair_is_what_the_flow_makes_of_its_noise(teacher: Path, pairs: StoreDataset) -> None:
    assert len(pairs) == COUNT
    batch = pairs.read_batch([3, 149, 70])
    assert (batch["noise"].dtype, batch["noise"].shape) == (torch.float16, (3, 3, 8, 8))
    flow = load_flow(teacher, RectifiedFlow)
    images = flow.sample(noise=batch["noise"].float(), labels=batch["labels"], steps=STEPS)
    assert (images.mul(255) - batch["images"]).abs().max() < 1, "not the flow's picture of that noise and label"
    everything = pairs.read_batch(range(COUNT))
    assert everything["noise"].float().std() == pytest.approx(1, abs=0.02)
    assert len(everything["noise"].flatten(1).unique(dim=0)) == COUNT
    assert 5 < len(everything["labels"].unique()) <= 12


def test_one_process_that_was_killed_draws_the_same(
    teacher: Path, pairs: StoreDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState()
    reached, written = StoreWriter.reached, list[int]()

    def die(writer: StoreWriter, progress: Mapping[str, Any]) -> None:
        reached(writer, progress)
        if progress.get("done"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "reached", die)
        with pytest.raises(KeyboardInterrupt):
            draw_pairs(teacher, tmp_path)
    assert not (tmp_path / "pairs").exists()
    write = StoreWriter.write

    def count(writer: StoreWriter, first: int, values: Mapping[str, torch.Tensor]) -> None:
        written.append(first)
        write(writer, first, values)

    monkeypatch.setattr(StoreWriter, "write", count)
    again = StoreDataset(draw_pairs(teacher, tmp_path))
    assert written == [64, 128], "it did not resume where it was"
    assert np.array_equal(again.entries["noise"], pairs.entries["noise"])
    assert np.abs(again.entries["images"].astype(int) - pairs.entries["images"]).max() <= 1
    assert np.array_equal(again.labels, pairs.labels)
    draw_pairs(teacher, tmp_path, mixed_precision="bf16")
    assert written == [64, 128], "they were there already"


def test_altered_pairs_are_refused(teacher: Path, tmp_path: Path) -> None:
    PartialState()
    path = draw_pairs(teacher, tmp_path)
    noise = path / "noise.float16"
    altered = bytes(100) + noise.read_bytes()[100:]
    noise.write_bytes(altered)
    os.utime(noise, (0, 0))
    with pytest.raises(UsageError, match=r"pairs is damaged \(noise.float16 was altered\): move the folder away"):
        draw_pairs(teacher, tmp_path)
    assert noise.read_bytes() == altered


def reflow(teacher: Path, output_dir: Path, teacher_dir: Path | None, steps: int) -> None:
    flags = {"teacher_dir": teacher_dir, "batch_size": 16, "learning_rate": 1e-4, "lr_warmup_steps": 0}
    train(reflow_config(teacher, output_dir, train_num_steps=steps, **flags))


def test_training_starts_from_the_teacher(teacher: Path, pairs: StoreDataset, tmp_path: Path) -> None:
    run_on_ranks(1, reflow, teacher, tmp_path / "1", pairs.path, 6)
    description = json.loads((tmp_path / "1/checkpoints/step_00000006/flow.json").read_text())
    assert (description["distance"], description["prediction"]) == ("pseudo_huber", "clean")
    assert description["time_distribution"] == {"kind": "UShaped", "steepness": 4.0}
    before, after = (load_flow(run, RectifiedFlow) for run in (teacher, tmp_path / "1"))
    for one, two in zip(before.parameters(), after.parameters(), strict=True):
        assert (one - two).abs().max() < 6.1e-4, "not the weights of the teacher, six steps later"
    assert list(losses(tmp_path / "1")) == [3, 6]


def test_a_run_resumes_when_its_teacher_is_gone(teacher: Path, tmp_path: Path) -> None:
    """The same command, though another training has gone on in the teacher's folder meanwhile, or it was removed."""
    mine = tmp_path / "teacher"
    shutil.copytree(teacher, mine)
    run_on_ranks(1, reflow, mine, tmp_path / "run", None, 3)
    shutil.copytree(mine / "checkpoints/step_00000005", mine / "checkpoints/step_00000009")
    run_on_ranks(1, reflow, mine, tmp_path / "run", None, 4)
    shutil.rmtree(mine)
    run_on_ranks(1, reflow, mine, tmp_path / "run", None, 6)
    assert list(losses(tmp_path / "run")) == [3, 4, 6]
