"""Tests of runs that start from the weights of another run."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from rectified_flow.cli.planning.plan import STARTER_DIMS
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.train import start_from
from rectified_flow.cli.training_flags import STARTERS, TrainConfig
from rectified_flow.condition import AugmentationLabels, ConditionSpecs, Labels
from rectified_flow.errors import UsageError
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig


def unet(dim: int = 8, side: int = 8, **conditions: Labels | AugmentationLabels) -> Unet:
    network = Unet(dim, (1, 2), conditions=conditions, image_size=side, attention_sides=())
    torch.manual_seed(1)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    return network


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run with averaged weights, on 5 classes, without augmentation."""
    network = unet(labels=Labels(5))
    torch.manual_seed(2)
    averaged = {name: torch.randn_like(value) for name, value in network.state_dict().items()}
    files = {checkpoint.MODEL_FILE: network.state_dict(), checkpoint.EMA_FILE: averaged}
    checkpoint.save(tmp_path / "checkpoints", 1, files, {})
    return tmp_path


def started(flow: RectifiedFlow | MeanFlow, source: Path) -> str:
    with redirect_stdout(StringIO()) as printed:
        start_from(source, TrainingConfig(output_dir=source / "new"), flow)
    return printed.getvalue()


def test_other_labels_another_size_and_augmentation(source: Path) -> None:
    network = unet(side=16, labels=Labels(7), augmentation=AugmentationLabels(14))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    printed = started(RectifiedFlow(network), source)
    averaged = checkpoint.load_tensors(checkpoint.resolve(source), checkpoint.EMA_FILE)
    new = {"label_embedding.weight", "augmentation_embedding.weight"}
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name] if name in new else averaged[name]), name
    total = sum(value.numel() for value in before.values())
    fits = total - sum(before[name].numel() for name in new)
    assert f"{fits:,} of {total:,} weights" in printed


def test_a_mean_flow_starts_from_a_rectified_flow(source: Path) -> None:
    flow = MeanFlow(unet(labels=Labels(5)))
    total = sum(value.numel() for value in flow.network.state_dict().values())
    assert f"{total:,} of {total:,} weights" in started(flow, source)


class Scaled(RectifiedFlow):
    """A flow with a weight of its own, outside of its network."""

    def __init__(self, network: Unet) -> None:
        super().__init__(network)
        self.scale = torch.nn.Parameter(torch.ones(()))


def test_a_flow_starts_from_the_network_of_a_flow_with_further_weights(tmp_path: Path) -> None:
    flow, saved = Scaled(unet()), Scaled(unet()).state_dict()
    saved = {name: torch.randn_like(value) for name, value in saved.items()}
    checkpoint.save(tmp_path / "checkpoints", 1, {checkpoint.MODEL_FILE: saved}, {})
    total = sum(value.numel() for value in flow.network.state_dict().values())
    assert f"{total:,} of {total:,} weights" in started(flow, tmp_path)
    assert all(torch.equal(value, saved[f"network.{name}"]) for name, value in flow.network.state_dict().items())


@pytest.mark.parametrize("conditions", [{}, {"labels": Labels(5)}])
def test_where_nothing_fits(source: Path, conditions: ConditionSpecs) -> None:
    flow = RectifiedFlow(Unet(16, (1, 2), conditions=conditions, image_size=8, attention_sides=()))
    with pytest.raises(UsageError, match=r"of another architecture \(\d% of this network's weights would fit\): pass"):
        started(flow, source)


@pytest.mark.parametrize("name", ["pixels", "small"])
def test_the_starters_are_undamaged_checkpoints(name: str) -> None:
    words = "--init_from starter" + f" --autoencoder {name}" * (name != "pixels")
    values = read_settings(TrainConfig, "Train.", words.split()).values
    origin = values.init.origin(values.data.starter)
    assert origin == STARTERS / name
    weights = checkpoint.load_tensors(checkpoint.resolve(origin), checkpoint.MODEL_FILE)
    assert sum(weight.nbytes for weight in weights.values()) < 5e6
    assert all(weight.isfinite().all() for weight in weights.values())


def test_no_starter_is_read_from_the_folder_of_an_autoencoder(tmp_path: Path) -> None:
    values = read_settings(TrainConfig, "", ["--init_from", "starter", "--autoencoder", str(tmp_path)]).values
    with pytest.raises(UsageError, match=f"starter has no weights for --autoencoder {tmp_path}: pass --autoencoder"):
        values.init.origin(values.data.starter)


def test_the_starter_in_a_network_of_more_levels(tmp_path: Path) -> None:
    network = Unet(STARTER_DIMS[False], (1, 1, 2, 3), image_size=64, attention_sides=(8,), blocks_per_level=1)
    start_from(STARTERS / "pixels", TrainingConfig(output_dir=tmp_path / "new"), RectifiedFlow(network))
    saved = checkpoint.load_tensors(checkpoint.resolve(STARTERS / "pixels"), checkpoint.MODEL_FILE)
    assert torch.equal(network.state_dict()["down.6.conv1.weight"], saved["down.4.conv1.weight"].float())


def test_a_resumed_run_does_not_need_the_run_that_it_started_from(tmp_path: Path) -> None:
    flow, config = RectifiedFlow(unet()), TrainingConfig(output_dir=tmp_path / "new")
    checkpoint.save(config.checkpoints, 1, {}, {})
    before = {name: value.clone() for name, value in flow.network.state_dict().items()}
    start_from(tmp_path / "removed", config, flow)
    assert all(torch.equal(value, before[name]) for name, value in flow.network.state_dict().items())
