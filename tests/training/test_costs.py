"""What a run will take, counted before it starts."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.training import costs
from rectified_flow.training.costs import (
    activation_memory,
    forward_flops,
    gradient_time,
    multiplication_rate,
    state_memory,
)


class Exponential(nn.Module):
    """A hundred numbers of each row, and again a hundred; the backward pass needs two of these at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 100, bias=False)
        self.fixed = nn.Parameter(torch.zeros(50), requires_grad=False)

    def forward(self, points: Tensor) -> Tensor:
        return self.layer(points).exp().sum()


def test_operations_and_memory_by_hand() -> None:
    flow, item = Exponential(), {"points": torch.zeros(1, 1)}
    assert forward_flops(flow, item) == 2 * 100
    assert activation_memory(flow, item) == 2 * 400 + 4, "and half of the loss and of its gradient"
    assert state_memory(flow, averages=2) == 4 * (150 + 3 * 100 + 2 * 100), "averages share what is frozen"
    assert flow.training


@pytest.mark.parametrize("flow_class", [RectifiedFlow, MeanFlow])
def test_memory_is_in_proportion_to_pixels_and_less_by_what_saves_it(flow_class: type[RectifiedFlow]) -> None:
    network = Unet(16, (1, 2), image_size=16, attention_sides=(), dropout=0.1)
    flow = flow_class(network)

    def per_image(side: int = 16) -> int:
        return activation_memory(flow, {"images": torch.zeros(1, 3, side, side, dtype=torch.uint8)})

    plain = per_image()
    assert 3.5 * plain < per_image(32) < 4.5 * plain
    with torch.autocast("cpu", torch.bfloat16):
        assert 0.3 * plain < per_image() < 0.8 * plain
    network.gradient_checkpointing = True
    assert 0.1 * plain < per_image() < 0.6 * plain


def test_the_rate_is_that_of_the_fastest_multiplication(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 3.0, 3.0, 5.0, 6.0, 10.0, 11.0, 14.0, 15.0, 18.0])
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert multiplication_rate(torch.device("cpu"), torch.float32) == 2 * 1024**3 / 2.0


def test_the_time_is_that_of_the_fastest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter([0.0, 3.0, 3.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    flow = Exponential()
    seen: list[int] = []
    flow.register_forward_pre_hook(lambda _, args, kwargs: seen.append(len(kwargs["points"])), with_kwargs=True)
    assert gradient_time(flow, {"points": torch.zeros(1, 1)}, 6) == 2.0
    assert seen == [6, 6, 6]
