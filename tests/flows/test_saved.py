"""A flow comes back from what was saved of it, without being told anything."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rectified_flow import Flow, MeanFlow, RectifiedFlow, Unet, UsageError
from rectified_flow.flows.mean import Objective
from rectified_flow.flows.saved import FLOW_FILE
from rectified_flow.flows.timesteps import LogitNormal, Uniform
from rectified_flow.runs import checkpoint


def unet() -> Unet:
    torch.manual_seed(0)
    network = Unet(8, (1, 2), num_classes=2, image_size=8, attention_sides=(4,), blocks_per_level=1, dropout=0.1)
    for parameter in network.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network


SETTINGS: dict[str, Any] = {"label_dropout": 0.2, "image_shape": (3, 8, 8), "class_names": ["cat", "dog"]}
FLOWS = {
    "rectified": lambda: RectifiedFlow(
        unet(), prediction="clean", time_distribution=Uniform(2.0), loss="pseudo_huber", **SETTINGS
    ),
    "mean": lambda: MeanFlow(
        unet(), objective="mean_flow", time_distribution=LogitNormal(0.1, 0.9), guidance_scale=1.5, **SETTINGS
    ),
}


def same(one: Flow, other: Flow) -> None:
    assert type(one) is type(other)
    assert one.describe() == other.describe()
    draws = (flow.sample(3, steps=2, generator=torch.Generator().manual_seed(1)) for flow in (one, other))
    assert torch.equal(*draws)


@pytest.fixture(params=FLOWS)
def flow(request: pytest.FixtureRequest) -> Flow:
    return FLOWS[request.param]()


def write(flow: Flow, folder: Path, ema: Flow | None = None) -> Path:
    files = {checkpoint.MODEL_FILE: flow.network.state_dict()}
    if ema is not None:
        files[checkpoint.EMA_FILE] = ema.network.state_dict()
    return checkpoint.save(folder / "checkpoints", 1, files, {FLOW_FILE: flow.describe()})


def test_a_description_holds_all_settings(flow: Flow) -> None:
    description = json.loads(json.dumps(flow.describe()))
    built = Flow.from_description(description)
    for name in (*type(flow).settings, "num_classes"):
        assert getattr(built, name) == getattr(flow, name), name
    assert cast_unet(built).config == cast_unet(flow).config


def cast_unet(flow: Flow) -> Unet:
    assert isinstance(flow.network, Unet)
    return flow.network


def test_from_a_checkpoint_or_its_run(flow: Flow, tmp_path: Path) -> None:
    path = write(flow, tmp_path)
    for each in (path, tmp_path, str(tmp_path)):
        same(Flow.from_checkpoint(each), flow)
    assert not Flow.from_checkpoint(path).training
    same(type(flow).from_checkpoint(path), flow)


def test_averaged_weights_are_preferred(tmp_path: Path) -> None:
    last, averaged = FLOWS["rectified"](), FLOWS["rectified"]()
    next(averaged.network.parameters()).data += 1
    same(Flow.from_checkpoint(write(last, tmp_path, averaged)), averaged)


def test_a_checkpoint_of_another_flow_or_none_is_refused(tmp_path: Path) -> None:
    path = write(FLOWS["mean"](), tmp_path)
    with pytest.raises(UsageError, match="is a MeanFlow, not a RectifiedFlow"):
        RectifiedFlow.from_checkpoint(path)
    with pytest.raises(UsageError, match="no checkpoint at"):
        Flow.from_checkpoint(tmp_path / "nowhere")
    bare = checkpoint.save(tmp_path / "bare", 1, {}, {})
    with pytest.raises(UsageError, match=r"has no flow\.json"):
        Flow.from_checkpoint(bare)


def test_as_the_hub_has_it(flow: Flow, tmp_path: Path) -> None:
    flow.save_pretrained(tmp_path, model_card_kwargs={"grid": "grid.png", "repo_id": "me/flowers"})
    same(type(flow).from_pretrained(tmp_path), flow)
    same(Flow.from_pretrained(str(tmp_path)), flow)
    card = (tmp_path / "README.md").read_text()
    assert "![samples](grid.png)" in card
    assert f'{type(flow).__name__}.from_pretrained("me/flowers")' in card
    assert "in 2 classes" in card
    assert json.dumps(flow.describe(), indent=1) in card


class Own(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x


def test_parts_of_your_own_are_not_described(tmp_path: Path) -> None:
    assert RectifiedFlow(Own()).describe() is None
    assert MeanFlow(unet(), objective=Objective(blend=0.5)).describe() is None
    with pytest.raises(UsageError, match="Own cannot be described"):
        RectifiedFlow(Own()).save_pretrained(tmp_path)
