"""A clean prediction near the data, where its velocity divides by the time."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.flows import Solver
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.pixels import Pixels

STEPS = (1, 2, 4, 16, 128)
WAYS = [(solver, steps) for solver in get_args(Solver) for steps in STEPS]


class OnePicture(nn.Module):
    """The ideal denoiser of data that are a single picture."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Parameter(torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.picture.expand_as(x)


def error(solver: Solver, steps: int) -> float:
    """Root of the mean squared error of generated pictures, in steps of uint8."""
    network = OnePicture()
    flow = RectifiedFlow(network, prediction="clean", space=Pixels((3, 8, 8)))
    torch.manual_seed(1)
    pictures = flow.sample(4, steps=steps, solver=solver)
    return 255 * (pictures - flow.space.decode(network.picture.detach())).square().mean().sqrt().item()


@pytest.mark.parametrize(("solver", "steps"), WAYS)
def test_every_solver_comes_to_the_picture(solver: Solver, steps: int) -> None:
    assert error(solver, steps) < 0.5


def test_a_divisor_that_is_clipped_in_sampling_leaves_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler without the exact divisor fails the test above."""
    monkeypatch.setattr(RectifiedFlow, "exact_velocity", RectifiedFlow.velocity)
    assert error("euler", 128) > 0.5
    assert error("midpoint", 16) > 0.5
