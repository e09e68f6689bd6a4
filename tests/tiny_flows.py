"""Tiny flows with weights that are not zero, checkpoints of them, and the comparison of two flows."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rectified_flow import register
from rectified_flow.cli.data import choose_degradation
from rectified_flow.condition import Condition, ConditionSpecs, Labels, Number
from rectified_flow.data.description import PictureData
from rectified_flow.data.open import Pictures
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import LogitNormal, Uniform
from rectified_flow.networks.unet import Unet
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords

LABELS = Labels(2, ("cat", "dog"))


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


def write(flow: Flow, folder: Path, ema: Flow | None = None, degrade: str | None = None) -> Path:
    """Write a checkpoint of a flow, whose run made its sources by ``--degrade``, if that is given."""
    files = {checkpoint.MODEL_FILE: checkpoint.own_weights(flow.network)}
    if ema is not None:
        frozen = {name for name, parameter in ema.network.named_parameters() if not parameter.requires_grad}
        trained = {name: value for name, value in ema.network.state_dict().items() if name not in frozen}
        files[checkpoint.EMA_FILE] = trained
    documents = {FLOW_FILE: describe(flow)}
    if degrade is not None:
        data = PictureData(Pictures("synthetic-flowers"), degradation=choose_degradation(degrade))
        documents[CONFIG_FILE] = {"data": describe(data), "training": {"degrade": degrade}}
    return checkpoint.save(folder / "checkpoints", 1, files, documents)


def unet_with(attention_sides: tuple[int, ...] | None = None, **conditions: Condition) -> Unet:
    """Return a Unet of one level with conditions, and with attention at 8 px if a caption has tokens."""
    torch.manual_seed(0)
    if attention_sides is None:
        attention_sides = (8,) if any(getattr(kind, "tokens", 0) for kind in conditions.values()) else ()
    network = Unet(8, (1,), conditions=conditions, image_size=8, attention_sides=attention_sides, blocks_per_level=1)
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return network


def flow_with_conditions() -> Flow:
    caption = Caption(BagOfWords(("red", "flower", "two")), 3, 0, ("a red flower", "two"))
    network = unet_with(text=caption, size=Number((0.0, 1.5, 8.0)), species=Labels(2, ("cat", "dog")))
    return RectifiedFlow(network, space=Pixels((3, 8, 8)))


@register
class Additive(nn.Module):
    """Two convolutions that take any conditions, and that ONNX converts in a fifth of the time of a Unet."""

    def __init__(self, conditions: ConditionSpecs, width: int = 8, channels: int = 3) -> None:
        super().__init__()
        self.conditions, self.width, self.channels = dict(conditions), width, channels
        self.embeddings = nn.ModuleDict({f"of_{name}": kind.embedding(width) for name, kind in conditions.items()})
        self.times = nn.Linear(2, width)
        self.into = nn.Conv2d(channels, width, 3, padding=1)
        self.out = nn.Conv2d(width, channels, 3, padding=1)
        for parameter in self.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Return the velocity, of the shape of ``x``."""
        hidden = self.into(x) + self.times(torch.stack((t, t if r is None else r), dim=1))[:, :, None, None]
        for name, kind in self.conditions.items():
            values = conditions[name] if name in conditions else kind.none(x.shape[0], x.device)
            embedded = self.embeddings[f"of_{name}"](values)
            hidden = hidden + (embedded if embedded.ndim == 4 else embedded[:, :, None, None])
        return self.out(hidden.relu())
