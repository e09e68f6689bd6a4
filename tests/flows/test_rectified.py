"""Tests of rectified flow, its couplings and its times against closed forms."""

from itertools import permutations
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import ConditionSpecs, Labels
from rectified_flow.data import GlobalBatch
from rectified_flow.flows import Coupling, Prediction, Solver
from rectified_flow.flows.couplings import nearest_candidate, optimal_pairs, squared_distances
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import LogitNormal, Uniform, UShaped
from rectified_flow.randomness import BatchRows, deterministic
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


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 1, 2, 2, generator=generator), torch.randn(count, 1, 2, 2, generator=generator)


def cost(x_0: Tensor, noise: Tensor) -> float:
    return (x_0 - noise).square().sum().item()


def test_transport_has_the_least_cost_of_all_permutations() -> None:
    x_0, noise = batch(6)
    least = min(cost(x_0, noise[list(order)]) for order in permutations(range(6)))
    assert cost(x_0, noise[optimal_pairs(squared_distances(x_0, noise))]) == pytest.approx(least)


def test_transport_within_classes() -> None:
    x_0, noise = batch(60)
    labels = torch.arange(60) % 3
    order = optimal_pairs(squared_distances(x_0, noise), labels)
    assert sorted(order.tolist()) == list(range(60))
    assert torch.equal(labels[order], labels)
    assert cost(x_0, noise[order]) < 0.9 * cost(x_0, noise)
    assert cost(x_0, noise[order]) > cost(x_0, noise[optimal_pairs(squared_distances(x_0, noise))])


def test_the_nearest_candidate() -> None:
    x_0 = torch.zeros(2, 3)
    candidates = [torch.tensor([[float(a)] * 3, [float(b)] * 3]) for a, b in ((3, 5), (-1, 4), (2, 6))]
    assert nearest_candidate(x_0, candidates).tolist() == [[-1.0] * 3, [4.0] * 3]


class Silent(nn.Module):
    conditions: ConditionSpecs = {"labels": Labels(2)}  # noqa: RUF012

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x)


def straightness(coupling: Coupling) -> float:
    """The loss of a network that says nothing: the mean squared length of the paths."""
    torch.manual_seed(0)
    flow = RectifiedFlow(Silent(), coupling=coupling)
    return flow(images=torch.randn(128, 1, 2, 2) * 0.5, labels=torch.arange(128) % 2).item()


def test_paths_are_shorter() -> None:
    independent = straightness("independent")
    assert straightness("ot") < 0.7 * independent
    assert straightness("immiscible") < 0.8 * independent


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_parts_of_a_global_batch_get_the_noise_of_the_whole(world_size: int, accumulation: int) -> None:
    """However it is cut, the mean loss is that of the joined batch."""
    images, labels = torch.randn(16, 1, 2, 2) * 0.5, torch.arange(16) % 2
    flow = RectifiedFlow(Silent(), space=Pixels(horizontal_flip=True), coupling="ot")
    with deterministic(BatchRows(0, 3, 16, slice(None))):
        chosen = flow.pair(images=images, labels=labels)
        joined = flow(images=images, labels=labels, noise_rows=chosen)
        assert flow(images=images, labels=labels) == joined, "pairs what is there if nobody did before"
    cut = GlobalBatch(16 // (world_size * accumulation), world_size, accumulation)
    parts = []
    for rank in range(world_size):
        for micro_batch in range(accumulation):
            rows = cut.rows(rank, micro_batch)
            with deterministic(BatchRows(0, 3, 16, rows)):
                parts.append(flow(images=images[rows], labels=labels[rows], noise_rows=chosen[rows]))
    assert torch.stack(parts).mean() == pytest.approx(joined.item())


CPU = torch.device("cpu")
QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_quantiles_of_shifted_times(shift: float) -> None:
    normal = torch.sigmoid(-0.5 + 1.2 * torch.special.ndtri(QUANTILES))
    for times, unshifted in ((LogitNormal(-0.5, 1.2, shift), normal), (Uniform(shift), QUANTILES)):
        expected = shift * unshifted / (1 + (shift - 1) * unshifted)
        torch.testing.assert_close(times.draw(200_000, CPU).quantile(QUANTILES), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("steepness", [1.0, 4.0])
def test_u_shaped_quantiles(steepness: float) -> None:
    """The share of times up to t is the integral of cosh(a (t - 1/2)), divided by that over all of [0, 1]."""
    times = UShaped(steepness).draw(200_000, CPU)
    fine = torch.linspace(0, 1, 10_001)
    density = torch.cosh(steepness * (fine - 0.5))
    share = torch.cumulative_trapezoid(density, fine) / torch.trapezoid(density, fine)
    expected = fine[1:][torch.searchsorted(share, QUANTILES)]
    torch.testing.assert_close(times.quantile(QUANTILES), expected, atol=5e-3, rtol=0)
    assert 0 <= times.min() < 1e-3
    assert 1 >= times.max() > 1 - 1e-3


def test_stratified_times_do_not_need_the_kernel_that_mps_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = LogitNormal(stratified=True).draw
    with deterministic(BatchRows(0, 0, 999, slice(None))):
        expected = draw(999, torch.device("cpu"))

    def lacking(_: Tensor) -> Tensor:
        raise NotImplementedError("The operator 'aten::special_ndtri' is not currently implemented for the MPS device")

    monkeypatch.setattr(torch.special, "ndtri", lacking)
    with deterministic(BatchRows(0, 0, 999, slice(None))):
        torch.testing.assert_close(draw(999, torch.device("cpu")), expected, rtol=1e-4, atol=0)


def test_stratified_times_are_one_in_each_range_on_any_number_of_ranks() -> None:
    """Each range between the quantiles i / b and (i + 1) / b has the time of one row of the global batch."""
    distribution, plain = LogitNormal(-0.5, 1.2, stratified=True), LogitNormal(-0.5, 1.2)
    with deterministic(BatchRows(0, 7, 8, slice(None))):
        whole = distribution.draw(8, CPU)
    shares = torch.special.ndtr((torch.logit(whole) + 0.5) / 1.2)
    assert sorted((shares * 8).int().tolist()) == list(range(8))
    for rank in range(2):
        with deterministic(BatchRows(0, 7, 8, slice(rank, None, 2))):
            torch.testing.assert_close(distribution.draw(4, CPU), whole[rank::2], rtol=0, atol=0)
    many = distribution.draw(200_000, CPU).quantile(QUANTILES)
    torch.testing.assert_close(many, plain.draw(200_000, CPU).quantile(QUANTILES), atol=5e-3, rtol=0)
