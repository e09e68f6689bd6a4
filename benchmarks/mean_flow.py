"""Cost of a mean flow step, and of a step from a teacher's paths, relative to a step of rectified flow."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import Row, Turns, ratio, take_turns

from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.network import to_device
from rectified_flow.networks.unet import Unet

RECTIFIED, PATH_STEPS = "rectified flow step", 16
SCHEMES: dict[str, Callable[[Unet], Flow]] = {
    RECTIFIED: RectifiedFlow,
    "mean flow step": MeanFlow,
    "step from a teacher's paths": DistilledFlow,
}
AIMS = {"mean flow step": "<= 1.5 compiled"}


@dataclass(frozen=True)
class Flags:
    """The settings of the benchmark."""

    image_size: int = 32
    """Side of the images [px]."""
    batch_size: int = 16
    """Images per step."""
    dim: int = 56
    """Channels of the Unet."""
    rounds: int = 5
    """Number of timed rounds per scheme."""
    compile: bool = False
    """Compile the objectives."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""


def train(scheme: str, flags: Flags, turns: Turns) -> None:
    """Repeat the forward and backward pass of one scheme."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = Unet(flags.dim, (1, 2, 2, 2), image_size=flags.image_size)
    flow = to_device(SCHEMES[scheme](network), device, "no").train()
    if flags.compile:
        flow.compile()
    shape = 3, flags.image_size, flags.image_size
    batch = {"images": torch.rand(flags.batch_size, *shape, device=device) * 2 - 1}
    if isinstance(flow, DistilledFlow):
        batch["path"] = torch.rand(flags.batch_size, PATH_STEPS, *shape, dtype=torch.float16, device=device)
    while True:
        flow.zero_grad()
        loss: Tensor = flow(**batch)
        loss.backward()
        turns.done()


def measure_rows(flags: Flags) -> list[Row]:
    """Return a row for each scheme other than rectified flow."""
    contenders = {scheme: partial(train, scheme, flags) for scheme in SCHEMES}
    times = take_turns(contenders, rounds=flags.rounds, minutes=flags.minutes)
    how = "compiled" if flags.compile else "eager"
    rows = []
    for scheme in (each for each in SCHEMES if each != RECTIFIED):
        seconds = f"{times[scheme].median:.3f} s and {times[RECTIFIED].median:.3f} s per step"
        measured = str(ratio(times[scheme], times[RECTIFIED]))
        rows.append(Row(f"{scheme} ({how})", RECTIFIED, AIMS.get(scheme, ""), measured, seconds))
    return rows
