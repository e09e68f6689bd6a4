"""Tests of loading a flow from its checkpoint."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import Labels
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow, network_of
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import LogitNormal, Uniform
from rectified_flow.load import load_flow
from rectified_flow.networks.unet import Unet
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE
from rectified_flow.spaces.pixels import Pixels

LABELS = Labels(2, ("cat", "dog"))
OLD_RUNS = Path(__file__).with_name("old_runs")


def unet() -> Unet:
    torch.manual_seed(0)
    conditions = {"labels": LABELS}
    network = Unet(
        8, (1, 2), conditions=conditions, image_size=8, attention_sides=(4,), blocks_per_level=1, dropout=0.1
    )
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network


def settings() -> dict[str, Any]:
    return {"condition_dropout": 0.2, "space": Pixels((3, 8, 8))}


FLOWS = {
    "rectified": lambda: RectifiedFlow(
        unet(), prediction="clean", time_distribution=Uniform(2.0), distance="pseudo_huber", **settings()
    ),
    "mean": lambda: MeanFlow(
        unet(), objective="mean_flow", time_distribution=LogitNormal(0.1, 0.9), guidance_scale=1.5, **settings()
    ),
}


def same(one: Flow, other: Flow) -> None:
    assert type(one) is type(other)
    assert describe(one) == describe(other)
    draws = []
    for flow in (one, other):
        torch.manual_seed(1)
        draws.append(flow.sample(3, steps=2))
    assert torch.equal(*draws)


@pytest.fixture(params=FLOWS)
def flow(request: pytest.FixtureRequest) -> Flow:
    return FLOWS[request.param]()


def write(flow: Flow, folder: Path, ema: Flow | None = None) -> Path:
    files = {checkpoint.MODEL_FILE: checkpoint.own_weights(flow.network)}
    if ema is not None:
        frozen = {name for name, parameter in ema.network.named_parameters() if not parameter.requires_grad}
        trained = {name: value for name, value in ema.network.state_dict().items() if name not in frozen}
        files[checkpoint.EMA_FILE] = trained
    return checkpoint.save(folder / "checkpoints", 1, files, {FLOW_FILE: describe(flow)})


def test_from_a_checkpoint_or_its_run(flow: Flow, tmp_path: Path) -> None:
    path = write(flow, tmp_path)
    for each in (path, tmp_path, str(tmp_path)):
        same(load_flow(each), flow)
    assert not load_flow(path).training
    same(load_flow(path, type(flow)), flow)


def test_averaged_weights_are_preferred_and_frozen_ones_come_from_the_model(tmp_path: Path) -> None:
    last, averaged = FLOWS["rectified"](), FLOWS["rectified"]()
    for parameter in averaged.network.parameters():
        if parameter.requires_grad:
            parameter.data += 1
    path = write(last, tmp_path, averaged)
    frozen = {"time_embedding.frequencies"}
    saved = (checkpoint.load_tensors(path, name) for name in (checkpoint.MODEL_FILE, checkpoint.EMA_FILE))
    model, ema = (weights.keys() for weights in saved)
    assert model - ema == frozen
    same(load_flow(path), averaged)


def test_a_checkpoint_of_another_flow_or_none_is_refused(tmp_path: Path) -> None:
    path = write(FLOWS["mean"](), tmp_path)
    with pytest.raises(UsageError, match="holds a MeanFlow, not a RectifiedFlow"):
        load_flow(path, RectifiedFlow)
    with pytest.raises(UsageError, match="no checkpoint at"):
        load_flow(tmp_path / "nowhere")
    bare = checkpoint.save(tmp_path / "bare", 1, {}, {})
    with pytest.raises(UsageError, match=r"has no flow\.json"):
        load_flow(bare)


class Own(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x


def test_a_flow_with_weights_outside_its_network_is_saved_whole() -> None:
    class Tilted(RectifiedFlow):
        def __init__(self, network: nn.Module) -> None:
            super().__init__(network)
            self.tilt = nn.Parameter(torch.zeros(()))

    plain, tilted = RectifiedFlow(Own()), Tilted(unet())
    assert network_of(plain) is plain.network
    assert network_of(tilted) is tilted


@pytest.mark.parametrize("module", ["rectified_flow", "rectified_flow.load"])
def test_a_process_that_has_imported_nothing_else_loads_a_flow(module: str) -> None:
    """The network and the flows are registered by the module that loads them."""
    code = f"from {module} import load_flow; print(type(load_flow({str(OLD_RUNS / 'rectified')!r}).network).__name__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "Unet\n"
