"""Tests of guidance: the formula, the interval, and the number of calls."""

import pytest
import torch
from torch import Tensor

from rectified_flow.condition import ConditionSpecs, Labels, Number
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance, guided, integrate
from rectified_flow.flows.times import time_grid
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels

KINDS: ConditionSpecs = {"labels": Labels(9)}
"""The label 9 stands for none."""


class Field:
    """A velocity equal to the label, whose calls are counted."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        self.calls.append(len(x))
        assert len(t) == len(x)
        assert labels is not None
        return labels.float()[:, None].expand_as(x)


@pytest.mark.parametrize(("scale", "expected"), [(0.0, 9.0), (1.0, 2.0), (3.0, -12.0)])
def test_the_velocity_goes_from_no_label_through_the_label(scale: float, expected: float) -> None:
    """9 + scale * (2 - 9)"""
    field = Field()
    velocity = guided(field, KINDS, {"labels": torch.tensor([2, 2])}, Guidance(scale))
    assert torch.equal(velocity(torch.zeros(2, 3), 0.5), torch.full((2, 3), expected))
    assert field.calls == [2 if scale == 1 else 4], "one call, of twice the rows"


@pytest.mark.parametrize(("t", "acts"), [(0.1, False), (0.2, True), (0.7, True), (0.8, False)])
def test_it_acts_inside_the_interval(t: float, acts: bool) -> None:
    field = Field()
    velocity = guided(field, KINDS, {"labels": torch.tensor([2])}, Guidance(2.0, (0.2, 0.7)))
    assert velocity(torch.zeros(1, 1), t).item() == (-5 if acts else 2)
    assert field.calls == [2 if acts else 1]


def test_autoguidance_extrapolates_from_an_earlier_velocity() -> None:
    """Earlier + 2 * (own - earlier), inside the interval only, for the conditional and the unconditional velocity."""
    own, earlier = Field(), Field()
    half = lambda x, t, labels: earlier(x, t, labels) / 2  # noqa: E731
    guidance = Guidance(3.0, (0.2, 0.7), autoguidance=2.0, earlier=half)
    velocity = guided(own, KINDS, {"labels": torch.tensor([2])}, guidance)
    conditional, unconditional = 1 + 2 * (2 - 1), 4.5 + 2 * (9 - 4.5)
    assert velocity(torch.zeros(1, 1), 0.5).item() == unconditional + 3 * (conditional - unconditional)
    assert own.calls == earlier.calls == [2]
    assert velocity(torch.zeros(1, 1), 0.1).item() == 2


def test_autoguidance_narrows_a_distribution_that_is_too_wide_in_the_earlier_version() -> None:
    """Expect samples of the deviation s^w r^(1 - w) for Gaussian velocities of the deviations s (own) and r (earlier).

    The velocity at (x, t) for data of N(0, s^2) is x times a factor, whose integral from 0 to 1 is -log(s). The
    extrapolated velocity is linear in x as well.
    """

    def velocity_of(deviation: float):  # type: ignore[no-untyped-def]
        def velocity(x: Tensor, t: Tensor) -> Tensor:
            t, variance = t[:, None], deviation**2
            return x * (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance)

        return velocity

    noise = torch.randn(64, 1, dtype=torch.float64)
    guidance = Guidance(autoguidance=2.0, earlier=velocity_of(1.5))
    field = guided(velocity_of(1.0), {}, {}, guidance)
    generated = integrate(field, noise, time_grid(400), "midpoint")
    torch.testing.assert_close(generated / noise, torch.full_like(noise, 1 / 1.5), rtol=1e-4, atol=0)


def test_all_conditions_are_none_together() -> None:
    """The unconditional rows have neither the label nor the number."""
    seen: list[tuple[Tensor, Tensor]] = []

    def field(x: Tensor, t: Tensor, labels: Tensor, place: Tensor) -> Tensor:
        seen.append((labels, place))
        return x

    conditions = {"labels": torch.tensor([2]), "place": torch.ones(1)}
    guided(field, {**KINDS, "place": Number((0, 1))}, conditions, Guidance(2.0))(torch.zeros(1, 1), 0.5)
    [(labels, place)] = seen
    assert labels.tolist() == [2, 9]
    assert torch.equal(place.isnan(), torch.tensor([False, True]))


def test_it_needs_conditions() -> None:
    flow = RectifiedFlow(Unet(8, (1,), image_size=8), space=Pixels((3, 8, 8)))
    with pytest.raises(ValueError, match="guidance needs a network that takes conditions"):
        flow.sample(1, guidance=Guidance(2))
    labelled = RectifiedFlow(Unet(8, (1,), conditions=KINDS, image_size=8), space=Pixels((3, 8, 8)))
    with pytest.raises(ValueError, match="guidance needs a network that takes conditions: pass their values"):
        guided(labelled.exact_velocity, labelled.conditions, {}, Guidance(2))


def test_each_condition_has_a_scale_of_its_own() -> None:
    """The velocity is a sum of two conditions, and each is extrapolated by its own scale: 9 + w (2 - 9), and 2 w."""
    calls = []

    def field(x: Tensor, t: Tensor, labels: Tensor, place: Tensor) -> Tensor:
        calls.append(len(x))
        return (labels + place.nan_to_num(0))[:, None]

    kinds: ConditionSpecs = {**KINDS, "place": Number((0, 1))}
    conditions = {"labels": torch.tensor([2]), "place": torch.tensor([2.0])}

    def at(guidance: Guidance) -> float:
        return guided(field, kinds, conditions, guidance)(torch.zeros(1, 1), 0.5).item()

    assert at(Guidance(scales={"labels": 3.0})) == 9 + 3 * (2 - 9) + 2
    assert at(Guidance(scales={"labels": 3.0, "place": 5.0})) == 9 + 3 * (2 - 9) + 10
    assert at(Guidance(scales={"labels": 0.0, "place": 1.0})) == 9 + 2
    assert at(Guidance(2.0, scales={"place": 5.0})) == 2 + 2 + (2 - 1) * (4 - 9) + (5 - 1) * 2
    assert calls == [2, 3, 2, 3]
    with pytest.raises(ValueError, match="needs a network that takes conditions"):
        at(Guidance(scales={"colour": 2.0}))
