"""What a run will take, counted before it starts."""

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.flows import RectifiedFlow
from rectified_flow.networks import Unet
from rectified_flow.training.costs import forward_flops, multiplication_rate, training_memory

ITEM = {"points": torch.zeros(1, 8)}


class Exponential(nn.Module):
    """Multiplies by a matrix of 8 x 100, and keeps 100 numbers of each row for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 100))
        self.fixed = nn.Parameter(torch.zeros(50), requires_grad=False)

    def forward(self, points: Tensor) -> Tensor:
        return (points @ self.weight).exp().sum()


def test_operations_and_memory_by_hand() -> None:
    flow = Exponential()
    assert forward_flops(flow, ITEM) == 2 * 8 * 100
    memory = training_memory(flow, ITEM, averages=2)
    loss = 4 // 2
    assert memory.per_image == 4 * 100 + loss
    assert memory.fixed == 4 * (850 + 3 * 800 + 2 * 850)
    assert flow.training


@pytest.mark.parametrize("name", ["bf16", "gradient_checkpointing"])
def test_what_saves_memory_is_seen_to(name: str) -> None:
    network = Unet(16, (1, 2), image_size=16)
    flow = RectifiedFlow(network)
    item = {"images": torch.zeros(1, 3, 16, 16, dtype=torch.uint8)}
    before = training_memory(flow, item, averages=0).per_image
    network.gradient_checkpointing = name == "gradient_checkpointing"
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
        after = training_memory(flow, item, averages=0).per_image
    assert 0.1 * before < after < 0.7 * before


def test_the_rate_is_one() -> None:
    assert 1e8 < multiplication_rate(torch.device("cpu"), torch.float32) < 1e15
