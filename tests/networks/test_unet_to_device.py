"""Memory formats, where they are given and where they must arrive."""

from pathlib import Path

import pytest
import torch

from rectified_flow.data.store import ImageDataset
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet, to_device
from rectified_flow.runs import checkpoint
from rectified_flow.training.state import TrainingState
from tests.training.runs import build_trainer, tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(("precision", "expected"), [("no", True), ("bf16", False)])
def test_a_cpu_has_channels_last_in_float32_only(precision: str, expected: bool) -> None:
    flow = to_device(RectifiedFlow(Unet(8, (1, 2), image_size=8)), CPU, precision)
    weight = dict(flow.named_parameters())["network.down.0.conv1.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) == expected
    assert weight.is_contiguous() != expected
    images = flow.network(torch.randn(2, 3, 8, 8), torch.rand(2))
    assert images.is_contiguous(memory_format=torch.channels_last) == expected


def test_moments_and_averages_are_laid_out_like_weights_before_and_after_a_resume(
    tmp_path: Path, flowers: ImageDataset
) -> None:
    def strides(state: TrainingState, name: str) -> set[tuple[int, ...]]:
        assert state.ema is not None
        parameter, moments = state.parameters[name], state.optimizer.optimizer.state[state.parameters[name]]
        average = dict(state.ema.ema_model.named_parameters())[name]
        return {each.stride() for each in (parameter, average, moments["exp_avg"], moments["exp_avg_sq"])}

    config = tiny_config(tmp_path, train_num_steps=2)
    trainer = build_trainer(config, flowers)
    trainer.train()
    again = build_trainer(config, flowers)
    again.state.load(checkpoint.resolve(tmp_path))
    for state in (trainer.state, again.state):
        assert strides(state, "network.down.0.conv1.weight") == {(72, 1, 24, 8)}
