"""Reflow: pairs that are what the flow makes, drawn by any number of processes, and a straighter flow of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState

import train_oxford
from rectified_flow import RectifiedFlow, RectifiedFlowConfig
from rectified_flow.data.pair_store import PairDataset, PairWriter
from rectified_flow.training.parts import build_dataset
from rectified_flow.training.reflow import inherit, open_pairs
from tests.programs import assert_refused
from tests.ranks import run_on_ranks
from tests.training.runs import losses

COUNT, STEPS = 150, 3


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a conditional rectified flow on tiny flowers."""
    folder = tmp_path_factory.mktemp("teacher")
    small = {"dataset": "synthetic-flowers", "image_size": 8, "dim": 8, "dim_mults": (1, 2), "use_cfg": True}
    config = RectifiedFlowConfig(**small, train_num_steps=5, num_samples=0, output_dir=folder)  # type: ignore[arg-type]
    run_on_ranks(1, train_oxford.main, config)
    return folder


def reflow_config(teacher: Path, cache_dir: Path, **flags: Any) -> RectifiedFlowConfig:
    return inherit(
        RectifiedFlowConfig(reflow_from=teacher, reflow_pairs=COUNT, reflow_steps=STEPS, cache_dir=cache_dir, **flags)
    )


def draw_pairs(teacher: Path, cache_dir: Path) -> Path:
    config = reflow_config(teacher, cache_dir)
    return open_pairs(config, build_dataset(replace(config, cache_dir=None))).path


@pytest.fixture(scope="module")
def pairs(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> PairDataset:
    """Drawn by two processes."""
    folder = tmp_path_factory.mktemp("pairs")
    path, other = run_on_ranks(2, draw_pairs, teacher, folder)
    assert path == other
    return PairDataset(path)


def test_pictures_and_network_are_the_teachers(teacher: Path, tmp_path: Path) -> None:
    PartialState()
    config = reflow_config(teacher, tmp_path, dim=512, use_cfg=False)
    assert (config.image_size, config.dim, config.dim_mults, config.use_cfg) == (8, 8, (1, 2), True)
    assert config.dataset == "synthetic-flowers"
    assert str(config.reflow_from).endswith("checkpoints/step_00000005")


def test_a_pair_is_what_the_flow_makes_of_its_noise(teacher: Path, pairs: PairDataset) -> None:
    assert len(pairs) == COUNT
    batch = pairs.__getitems__([3, 149, 70])
    assert (batch["noise"].dtype, batch["noise"].shape) == (torch.float16, (3, 3, 8, 8))
    flow = RectifiedFlow.from_checkpoint(teacher)
    images = flow.sample(noise=batch["noise"].float(), labels=batch["labels"], steps=STEPS)
    assert (images.mul(255) - batch["images"]).abs().max() < 1, "not the flow's picture of that noise and label"
    everything = pairs.__getitems__(range(COUNT))
    assert everything["noise"].float().std() == pytest.approx(1, abs=0.02)
    assert len(everything["noise"].flatten(1).unique(dim=0)) == COUNT
    assert 5 < len(everything["labels"].unique()) <= 12


def test_one_process_that_was_killed_draws_the_same(
    teacher: Path, pairs: PairDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState()
    reached, written = PairWriter.reached, list[int]()

    def die(writer: PairWriter, done: int) -> None:
        reached(writer, done)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PairWriter, "reached", die)
        with pytest.raises(KeyboardInterrupt):
            draw_pairs(teacher, tmp_path)
    assert {path.suffix for path in tmp_path.glob("pairs-*")} == {".building", ".lock"}
    write = PairWriter.write

    def count(writer: PairWriter, first: int, *tensors: torch.Tensor) -> None:
        written.append(first)
        write(writer, first, *tensors)

    monkeypatch.setattr(PairWriter, "write", count)
    again = PairDataset(draw_pairs(teacher, tmp_path))
    assert written == [64, 128], "it did not go on where it was"
    assert np.array_equal(again.noise, pairs.noise)
    assert np.abs(again.images.astype(int) - pairs.images).max() <= 1  # rounding, in batches of another size
    assert np.array_equal(again.labels, pairs.labels)
    draw_pairs(teacher, tmp_path)
    assert written == [64, 128], "they were there already"


def reflow(teacher: Path, output_dir: Path, cache_dir: Path) -> None:
    train_oxford.main(
        RectifiedFlowConfig(
            reflow_from=teacher,
            reflow_pairs=COUNT,
            reflow_steps=STEPS,
            cache_dir=cache_dir,
            batch_size=16,
            train_num_steps=6,
            log_every=3,
            num_samples=0,
            learning_rate=1e-4,
            lr_warmup_steps=0,
            output_dir=output_dir,
        )
    )


def test_training_starts_from_the_teacher(teacher: Path, pairs: PairDataset, tmp_path: Path) -> None:
    for world_size in (1, 2):
        run_on_ranks(world_size, reflow, teacher, tmp_path / str(world_size), pairs.path.parent)
    assert [path for path in pairs.path.parent.glob("pairs-*") if path.is_dir()] == [pairs.path], "drawn again"
    description = json.loads((tmp_path / "1/checkpoints/step_00000006/flow.json").read_text())
    assert description["loss"] == "pseudo_huber"
    assert description["time_distribution"] == {"kind": "UShaped", "steepness": 4.0}
    before, after = (RectifiedFlow.from_checkpoint(run) for run in (teacher, tmp_path / "1"))
    for one, two in zip(before.parameters(), after.parameters(), strict=True):
        assert (one - two).abs().max() < 6.1e-4, "not the weights of the teacher, six steps later"
    assert list(losses(tmp_path / "1")) == [3, 6]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--reflow_from {tmp}", "there is no checkpoint at"),
        ("--reflow_from {run} --reflow_pairs 0", "--reflow_pairs is 0; it must be above 0"),
        ("--reflow_from {run} --coupling ot", "--coupling and --reflow_from exclude each other"),
        ("--reflow_from {run} --reflow_pairs 10 --reflow_steps 1", "fewer than one global batch"),
        ("--reflow_from {run} --cache_dir /proc/nothing", "--cache_dir"),
    ],
)
def test_bad_input(teacher: Path, tmp_path: Path, flags: str, sentence: str) -> None:
    assert_refused(
        "train_oxford.py", 1, flags.format(run=teacher, tmp=tmp_path / "none") + f" --output_dir {tmp_path}", sentence
    )
