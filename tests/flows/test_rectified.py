"""Tests of rectified flow against closed forms, also for a clean prediction near the data."""

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import ConditionSpecs, Labels
from rectified_flow.flows import Prediction, Solver
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import Uniform
from rectified_flow.spaces.pixels import Pixels
from tests.analytic import Optimal, image_gaussian

COUNT = 60_000


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("prediction", get_args(Prediction))
def test_the_loss_at_the_optimum_is_the_floor_and_its_gradient_zero(prediction: Prediction) -> None:
    data = image_gaussian()
    network = Optimal(data, prediction)
    flow = RectifiedFlow(network, prediction=prediction)
    # Away from the ends, where clean and noise predictions are divided by a clipped number.
    t = (0.1 + 0.8 * torch.rand(COUNT)).double()
    loss = flow.loss(data.sample(COUNT), torch.randn(COUNT, 3, 4, 4, dtype=torch.float64), t, {})
    assert loss.item() == pytest.approx(data.floor(t).mean().item(), rel=5e-3)
    loss.backward()
    for parameter in flow.parameters():
        assert parameter.grad is not None
        assert abs(parameter.grad.item()) < 0.03

    with torch.no_grad():
        network.offset.add_(0.1)
    loss = flow.loss(data.sample(COUNT), torch.randn(COUNT, 3, 4, 4, dtype=torch.float64), t, {})
    loss.backward()
    assert network.offset.grad is not None
    assert abs(network.offset.grad.item()) > 0.1, "a test of zero gradients that cannot fail"


@pytest.mark.parametrize("prediction", get_args(Prediction))
def test_more_steps_lead_to_the_flow_map(prediction: Prediction) -> None:
    data = image_gaussian()
    flow = RectifiedFlow(Optimal(data, prediction), prediction=prediction, space=Pixels((3, 4, 4)))
    noise = torch.randn(32, 3, 4, 4)
    sampled = flow.sample(noise=noise, steps=200, solver="midpoint", decode=False)
    assert sampled.dtype == torch.float32
    exact = data.flow_map(noise.double(), 1.0, 0.0)
    assert (sampled - exact).square().mean().sqrt() < (2e-4 if prediction == "noise" else 3e-6)


def test_uniform_times_have_the_pi_over_two_floor() -> None:
    """The floor averaged over uniform times is pi/2 times the mean standard deviation."""
    data = image_gaussian()
    flow = RectifiedFlow(Optimal(data, "velocity"), time_distribution=Uniform())
    loss = flow(images=data.sample(COUNT)).item()
    assert loss == pytest.approx(torch.pi / 2 * data.variance.sqrt().mean().item(), rel=0.01)


def test_pseudo_huber() -> None:
    """Far from zero it is the root of the mean square, near zero half the square over c."""
    flow = RectifiedFlow(Constant(0.0), distance="pseudo_huber")
    t = torch.full((2,), 0.5)
    x_0 = torch.zeros(2, 3, 4, 4)
    far, near = torch.full_like(x_0, 2.0), torch.full_like(x_0, 1e-3)
    c = 0.00054 * 48**0.5
    assert flow.loss(x_0, far, t, {}).item() == pytest.approx(2 - c, rel=1e-4)
    assert flow.loss(x_0, near, t, {}).item() == pytest.approx(1e-6 / (2 * c), rel=0.02)


def test_the_shape_is_remembered_or_asked_for() -> None:
    flow = RectifiedFlow(Constant(0.0))
    with pytest.raises(ValueError, match="does not know the shape"):
        flow.sample(2)
    flow(images=torch.zeros(1, 3, 4, 6, dtype=torch.uint8))
    assert flow.space.shape == (3, 4, 6)
    assert flow.sample(2, steps=1).shape == (2, 3, 4, 6)


def test_sampling_leaves_the_mode_as_it_was() -> None:
    network = Constant(0.0)
    flow = RectifiedFlow(network, space=Pixels((3, 4, 4)))
    flow.sample(1, steps=2)
    assert network.modes == [False, False]
    assert flow.training


def test_labels_are_ignored_where_nothing_takes_them_and_drawn_where_they_are_missing() -> None:
    network = Constant(0.0)
    RectifiedFlow(network)(images=torch.zeros(2, 1, 1, 1), labels=torch.tensor([0, 1]), captions=["a", "b"])
    assert network.labels == [None]
    network = Constant(0.0, conditions={"labels": Labels(3)})
    RectifiedFlow(network, space=Pixels((1, 1, 1))).sample(300, steps=1)
    assert network.labels[0] is not None
    assert set(network.labels[0].tolist()) == {0, 1, 2}


class Constant(nn.Module):
    """Predicts one number everywhere and remembers how it was called."""

    def __init__(self, value: float, conditions: ConditionSpecs | None = None) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))
        self.conditions = conditions or {}
        self.times: list[float] = []
        self.modes: list[bool] = []
        self.labels: list[Tensor | None] = []

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        self.times.append(t[0].item())
        self.modes.append(self.training)
        self.labels.append(labels)
        return torch.zeros_like(x) + self.value


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
