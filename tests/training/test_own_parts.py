"""Tests of custom flows and networks: plain random draws, frozen parameters, and weights in half precision."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from rectified_flow.registry import register
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses, tiny_config

STEPS = 8


class Normed(nn.Module):
    """A flow with running means, which every forward pass in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.layer(self.norm(images.float() / 255)).square().mean()


def train_normed(config: TrainingConfig, dataset: ImageDataset) -> int:
    """How many batches the running means have seen."""
    torch.manual_seed(0)
    flow = Normed()
    Trainer(flow, dataset, config).train()
    return int(flow.norm.num_batches_tracked or 0)


def test_running_means_are_not_moved_by_the_warm_up(tmp_path: Path, flowers: ImageDataset) -> None:
    flags: dict[str, Any] = {"num_samples": 0, "save_every": 4, "log_every": 1}
    straight = tiny_config(tmp_path / "straight", train_num_steps=STEPS, **flags)
    assert run_on_ranks(2, train_normed, straight, flowers) == [STEPS] * 2
    assert_resumes_alike(2, tmp_path, train_normed, straight, flowers)


def assert_resumes_alike(world_size: int, folder: Path, train: Any, straight: TrainingConfig, *more: Any) -> None:
    """Training again from step 4 of a finished run, which has its last step taken away, ends with the same bytes."""
    half = folder / "half"
    shutil.copytree(straight.output_dir, half)
    shutil.rmtree(half / "checkpoints" / checkpoint.step_name(STEPS))
    run_on_ranks(world_size, train, replace(straight, output_dir=half), *more)
    assert_same_bytes(straight.output_dir, half, STEPS)
    assert losses(half) == losses(straight.output_dir)


@register
class WithFrozenHead(nn.Module):
    """A trained layer before a frozen one, which an own checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Conv2d(3, 3, 1)
        self.frozen = nn.Conv2d(3, 3, 1)
        nn.init.constant_(self.frozen.weight, 0.25)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.frozen(self.trained(x) * t.view(-1, 1, 1, 1))


@register
class FromElsewhere(WithFrozenHead):
    """A network whose constructor loads the frozen layer from elsewhere."""

    def __init__(self, frozen_source: str) -> None:
        super().__init__()
        self.frozen_source = frozen_source


NETWORKS: dict[str, nn.Module] = {"kept": WithFrozenHead(), "elsewhere": FromElsewhere("some hub")}
FROZEN = {"frozen.weight", "frozen.bias"}
TRAINED = {"trained.weight", "trained.bias"}


def train_partly_frozen(config: TrainingConfig, dataset: ImageDataset, kind: str) -> bool:
    """Whether the average shares what is frozen, and nothing else, with the network in training."""
    trainer = Trainer(RectifiedFlow(NETWORKS[kind]), dataset, config)
    trainer.train()
    assert trainer.state.ema is not None
    flow: Any = trainer.flow
    average: Any = trainer.state.ema.ema_model.network
    shares_frozen = average.frozen.weight.data_ptr() == flow.network.frozen.weight.data_ptr()
    return bool(shares_frozen and average.trained.weight.data_ptr() != flow.network.trained.weight.data_ptr())


@pytest.mark.parametrize(("kind", "in_model"), [("kept", FROZEN), ("elsewhere", set[str]())])
def test_what_is_frozen_is_shared_and_saved_once(
    tmp_path: Path, flowers: ImageDataset, kind: str, in_model: set[str]
) -> None:
    config = tiny_config(tmp_path / "straight", train_num_steps=STEPS, num_samples=0, save_every=4, log_every=1)
    assert run_on_ranks(1, train_partly_frozen, config, flowers, kind) == [True]
    saved = config.checkpoints / checkpoint.step_name(STEPS)
    assert set(load_file(saved / "model.safetensors")) == TRAINED | in_model
    assert set(load_file(saved / "ema.safetensors")) == TRAINED
    moments = load_file(saved / "optimizer.safetensors")
    assert {name.split(".")[-3] for name in moments} == {"trained"}
    assert_resumes_alike(1, tmp_path, train_partly_frozen, config, flowers, kind)
    if kind == "kept":
        weight: Any = load_flow(saved, RectifiedFlow).network.frozen
        assert (weight.weight == 0.25).all()


class Half(nn.Module):
    """A network in bfloat16, of which ``trained`` says whether it is to be trained."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.heavy = nn.Conv2d(3, 3, 1).bfloat16().requires_grad_(trained)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.heavy(self.first(x).bfloat16()).float()


def train_in_half(config: TrainingConfig, dataset: ImageDataset, trained: bool) -> str | int:
    """The refusal, or else the last step."""
    try:
        trainer = Trainer(RectifiedFlow(Half(trained)), dataset, config)
    except UsageError as refusal:
        return str(refusal)
    trainer.train()
    return trainer.state.step


def test_weights_in_bf16_may_be_frozen_but_not_trained(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=2, num_samples=0)
    for sentence in run_on_ranks(2, train_in_half, config, flowers, True):
        assert sentence.startswith("network.heavy.weight would be trained in bfloat16")
        assert "convert trained parameters with .float()" in sentence
        assert "\n" not in sentence
    assert not (tmp_path / "checkpoints").exists()
    assert run_on_ranks(2, train_in_half, config, flowers, False) == [2, 2]
