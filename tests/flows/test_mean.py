"""Tests of mean flow against closed forms, for every objective, and of distillation from points of a path."""

from collections import Counter
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.condition import Labels
from rectified_flow.errors import UsageError
from rectified_flow.flows import ObjectiveName, TimeGrid
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import time_grid
from rectified_flow.networks import forward_mode as tangents
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.pixels import Pixels
from tests.analytic import Gaussian, image_gaussian
from tests.networks.tiny_unets import small

COUNT = 60_000
LABELS = {"labels": Labels(3)}


class Optimal(nn.Module):
    """The exact average velocity, plus parameters that are zero there: an offset, a gain and a slope in time."""

    def __init__(self, data: Gaussian) -> None:
        super().__init__()
        self.data = data
        self.errors = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
        offset, gain, slope = self.errors
        times = (each.reshape(-1, 1, 1, 1) for each in (t, r))
        t_, r_ = times
        return self.data.average_velocity(x, t_, r_) + offset + gain * x + slope * (t_ - r_)


def draws(data: Gaussian) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x_0 = data.sample(COUNT).float()
    t = 0.2 + 0.7 * torch.rand(COUNT)
    return x_0, torch.randn(COUNT, 3, 4, 4), t, t * torch.rand(COUNT)


def evaluate(objective: ObjectiveName) -> tuple[float, float]:
    """Mean squared error at the optimum, and the norm of its gradient there."""
    data = image_gaussian().float()
    flow = MeanFlow(Optimal(data), objective=objective, weight_power=0)
    x_0, noise, t, r = draws(data)
    loss, mean_square = flow.loss(x_0, noise, t, r, {})
    (loss / x_0[0].numel()).backward()
    gradient = flow.network.errors.grad
    assert isinstance(gradient, Tensor)
    return mean_square.item(), gradient.norm().item()


def floor(blend: float) -> float:
    """Sum of lam / V(t) * (blend + (1 - blend) * sqrt(V(r) / V(t)))^2, averaged over elements and draws."""
    data = image_gaussian().float()
    _, _, t, r = draws(data)
    at_t, at_r = (data.marginal(each.reshape(-1, 1, 1, 1)) for each in (t, r))
    factor = blend + (1 - blend) * (at_r / at_t).sqrt()
    return (data.variance / at_t * factor**2).mean().item()


@pytest.mark.parametrize(("objective", "blend"), [("mean_flow", 0.0), ("improved_mean_flow", 1.0)])
def test_the_loss_at_the_optimum_is_the_floor_and_its_gradient_zero(objective: ObjectiveName, blend: float) -> None:
    mean_square, gradient = evaluate(objective)
    assert mean_square == pytest.approx(floor(blend), rel=5e-3)
    assert gradient < 0.02


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_sampling_with_the_exact_average_lands_on_the_flow_map(steps: int) -> None:
    data = image_gaussian().float()
    torch.manual_seed(0)
    noise = torch.randn(8, 3, 4, 4)
    images = MeanFlow(Optimal(data)).sample(noise=noise, steps=steps)
    exact = Pixels().decode(data.flow_map(noise, 1.0, 0.0))
    torch.testing.assert_close(images, exact, atol=1e-5, rtol=0)
    assert ((exact > 0) & (exact < 1)).float().mean() > 0.5, "clipping hides what is compared"


def test_one_step_is_one_network_call() -> None:
    network = Unet(8, (1, 2), image_size=8)
    calls: list[float] = []
    network.register_forward_hook(lambda _module, args, _out: calls.append(args[1][0].item()))
    flow = MeanFlow(network, space=Pixels((3, 8, 8)))
    flow.sample(3)
    assert calls == [1.0]
    flow.sample(3, steps=2)
    assert calls == [1.0, 1.0, 0.5]


def unet(**settings: Any) -> Unet:
    return small(dim=8, **settings)


def test_without_mean_rows_it_is_rectified_flow() -> None:
    network = unet()
    images = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8)
    mean = MeanFlow(network, mean_fraction=0, weight_power=0)
    rectified = RectifiedFlow(network, time_distribution=mean.time_distribution)
    losses = []
    for flow in (mean, rectified):
        with deterministic(BatchRows(0, 0, 8, slice(None))):
            losses.append(flow(images=images).item())
    assert losses[0] / (3 * 8 * 8) == pytest.approx(losses[1], rel=1e-6)
    assert mean.logged["unweighted_loss"].item() == pytest.approx(losses[1], rel=1e-6)


def test_a_micro_batch_without_mean_rows_is_refused() -> None:
    images = torch.randint(256, (1, 3, 8, 8), dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"0\.5 of a micro-batch of 1 is less than one row"):
        MeanFlow(unet())(images=images)
    MeanFlow(unet(), mean_fraction=0)(images=images)
    assert [MeanFlow(unet()).rows_of(0.25, count) for count in (2, 4, 8)] == [1, 1, 2]


def test_a_weight_of_power_one_is_blind_and_the_unweighted_loss_is_not() -> None:
    network = unet()
    flow = MeanFlow(network, weight_power=1)
    images = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8)
    assert flow(images=images).item() == pytest.approx(1, abs=0.01)
    assert flow.logged["unweighted_loss"].item() > 0.1


@pytest.mark.parametrize("objective", get_args(ObjectiveName))
def test_parts_of_a_batch_have_the_gradient_of_the_whole(objective: ObjectiveName) -> None:
    """The same rows get r < t however the batch is cut, and dropout agrees in every pass."""
    flow = MeanFlow(unet(conditions=LABELS, dropout=0.2), objective=objective, condition_dropout=0.3)
    images, labels = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 3

    def gradient(*parts: slice) -> Tensor:
        flow.zero_grad()
        for part in parts:
            with deterministic(BatchRows(0, 4, 8, part)):
                (flow(images=images[part], labels=labels[part]) / len(parts)).backward()
        return torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None])

    whole = gradient(slice(None))
    torch.testing.assert_close(
        gradient(slice(0, None, 2), slice(1, None, 2)), whole, rtol=1e-4, atol=1e-5 * whole.norm().item()
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["activations kept", "activations computed again"])
def test_the_derivative_reuses_the_values_of_the_pass_before(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reusing the values changes the number of convolutions alone: half of the rows need only those of the tangents."""
    network = unet(dropout=0.2)
    network.gradient_checkpointing = checkpointing
    flow = MeanFlow(network, objective="mean_flow")
    images = torch.randint(256, (8, 3, 8, 8), dtype=torch.uint8)

    def gradient() -> tuple[Tensor, int]:
        flow.zero_grad()
        with deterministic(BatchRows(0, 4, 8, slice(None))):
            with FlopCounterMode(display=False) as counter:
                loss = flow(images=images)
            loss.backward()
        flops = counter.get_flop_counts()["Global"][torch.ops.aten.convolution]
        return torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None]), flops

    reused, fewer = gradient()
    monkeypatch.setattr(tangents, "reusing_values", lambda _kept, _count: nullcontext())
    computed, flops = gradient()
    torch.testing.assert_close(reused, computed, rtol=1e-4, atol=1e-6 * computed.norm().item())
    if checkpointing:
        assert 0.95 * flops < fewer < flops, "only what comes before the first block is kept"
    else:
        assert fewer == pytest.approx(1.5 / 2 * flops, rel=1e-3)


def test_guidance_moves_the_target_of_labelled_rows_only() -> None:
    """With scale w and mixing k the target is w v + k u(c) + (1 - w - k) u(none)."""
    network = unet(conditions=LABELS)
    flow = MeanFlow(network, guidance_scale=2.0, guidance_mixing=0.5)
    torch.manual_seed(0)
    x, v, t = torch.randn(3, 3, 8, 8), torch.randn(3, 3, 8, 8), torch.rand(3)
    labels = torch.tensor([0, 3, 2])
    with torch.no_grad():
        guided = flow._guide(v, x, t, {"labels": labels})
        own, nobody = network(x, t, labels=labels), network(x, t)
    expected = 2.0 * v + 0.5 * own - 1.5 * nobody
    torch.testing.assert_close(guided[[0, 2]], expected[[0, 2]])
    assert torch.equal(guided[1], v[1])
    with pytest.raises(ValueError, match="guidance needs a network that takes conditions"):
        MeanFlow(unet(), guidance_scale=2.0)


POINTS = 8


def path_of(data: Gaussian, noise: Tensor, times: Tensor) -> Tensor:
    """The exact path from noise to data: the points at some times."""
    times, one = times.reshape(-1, 1, 1, 1, 1), torch.ones(())
    return (noise - (one - times) * data.average_velocity(noise[None], one, times)).transpose(0, 1)


def distilled_error(grid: TimeGrid, of_paths: TimeGrid) -> tuple[float, float]:
    """The mean squared error of the exact average velocity on exact paths, and the norm of its gradient."""
    data, times = image_gaussian().float(), torch.tensor(time_grid(POINTS, of_paths))
    torch.manual_seed(0)
    points = path_of(data, torch.randn(2000, 3, 4, 4), times)
    flow = DistilledFlow(Optimal(data), weight_power=0, grid=grid)
    loss = forward(flow, points)
    loss.backward()
    gradient = flow.network.errors.grad
    assert isinstance(gradient, Tensor)
    return flow.logged["unweighted_loss"].item(), gradient.norm().item()


def forward(flow: DistilledFlow, points: Tensor) -> Tensor:
    """The loss on paths that are not rounded to pixels."""
    flow.space.encode = lambda data: data  # type: ignore[method-assign]
    return flow(images=points[:, -1], path=points[:, :-1])


def test_the_exact_average_velocity_has_no_error_and_no_gradient() -> None:
    """The times of the points are those of the flow's grid."""
    for mean_square, gradient in (distilled_error("uniform", "uniform"), distilled_error("edm", "edm")):
        assert mean_square < 1e-9
        assert gradient < 0.02
    assert distilled_error("uniform", "edm")[0] > 1e-3


class Recorder(nn.Module):
    """Keeps the times and conditions that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
        self.seen.append((t, r))
        return x * self.weight


@pytest.mark.parametrize("halves", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("fraction", "whole"), [(0.5, 2000), (0.0, 0), (1.0, 4000)])
def test_the_first_rows_learn_whole_paths_and_the_others_halves_and_all_parts(
    fraction: float, whole: int, halves: float
) -> None:
    flow = DistilledFlow(Recorder(), whole_fraction=fraction, halves_fraction=halves)
    torch.manual_seed(0)
    forward(flow, torch.randn(4000, POINTS + 1, 1, 1, 1))
    assert isinstance(flow.network, Recorder)
    [(t, r)] = flow.network.seen
    assert (t[:whole] == 1).all()
    assert (r[:whole] == 0).all()
    parts = Counter((a.item(), b.item()) for a, b in zip(t[whole:], r[whole:], strict=True))
    every = {(later / POINTS, earlier / POINTS) for later in range(1, POINTS + 1) for earlier in range(later)}
    two = {(1.0, 0.5), (0.5, 0.0)}
    assert parts.keys() == ((two if halves == 1 else every) if whole < 4000 else set())
    for later, earlier in two if parts else ():
        by_chance = (1 - halves) / POINTS / (POINTS * later)
        assert parts[later, earlier] / (4000 - whole) == pytest.approx(halves / 2 + by_chance, abs=0.03)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_halves_of_paths_with_few_points_begin_and_end_in_points(steps: int) -> None:
    flow = DistilledFlow(Recorder(), whole_fraction=0, halves_fraction=1)
    torch.manual_seed(0)
    forward(flow, torch.randn(200, steps + 1, 1, 1, 1))
    assert isinstance(flow.network, Recorder)
    [(t, r)] = flow.network.seen
    parts = {(round(steps * a.item()), round(steps * b.item())) for a, b in zip(t, r, strict=True)}
    assert parts == {1: {(1, 0)}, 2: {(2, 1), (1, 0)}, 3: {(3, 1), (1, 0)}}[steps]


def test_a_share_of_less_than_a_row_is_refused() -> None:
    one = {"images": torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "path": torch.zeros(1, 3, 3, 8, 8)}
    with pytest.raises(UsageError, match=r"0.5 of a micro-batch of 1 is less than one row: raise `batch_size`"):
        DistilledFlow(Recorder())(**one)
    DistilledFlow(Recorder()).eval()(**one)
