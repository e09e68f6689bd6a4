"""Tests of the likelihood of pictures, which is exact for Gaussian data."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Comparison, Evaluator
from rectified_flow.evaluation.scores import bits_per_dimension, cubic_times, estimates, log_density
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.latents.space import Latents
from rectified_flow.load import load_flow
from rectified_flow.measurements.space import Asinh, Fields, Linear, Transform
from rectified_flow.spaces.pixels import Pixels
from tests.analytic import Gaussian, Optimal, image_gaussian
from tests.evaluation.runs import COUNT, pictures_of, save_run
from tests.extension.own_autoencoder import Haar
from tests.programs import call
from tests.ranks import run_on_ranks
from tests.tiny_flows import settings, unet

STEPS = 32


class Correlated(nn.Module):
    """The velocity for data N(mean, covariance): linear in ``x``, with a matrix that is not diagonal."""

    def __init__(self, mean: Tensor, covariance: Tensor) -> None:
        super().__init__()
        self.mean, self.covariance = mean, covariance

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time, one = t[0], torch.eye(len(self.mean))
        marginal = (1 - time) ** 2 * self.covariance + time**2 * one
        gain = torch.linalg.solve(marginal, time * one - (1 - time) * self.covariance)
        return ((x.flatten(1) - (1 - time) * self.mean) @ gain - self.mean).view_as(x)


def gaussian() -> Gaussian:
    """Data that lie well within the 256 levels, and are many levels wide."""
    data = image_gaussian()
    return Gaussian(data.mean * 0.2, 0.005 + data.variance * 0.1)


def probabilities(data: Gaussian, pictures: Tensor) -> Tensor:
    """The logarithm of the probability of each 8-bit picture: of the intervals between the levels, [0, 255]."""
    normal = torch.distributions.Normal(127.5 * (1 + data.mean), 127.5 * data.variance.sqrt())
    levels = pictures.double()
    return (normal.cdf(levels + 0.5) - normal.cdf(levels - 0.5)).log().flatten(1).sum(dim=1)


@pytest.mark.parametrize("prediction", ["velocity", "noise"])
def test_it_is_the_probability_of_an_8_bit_picture(prediction: Any) -> None:
    """Compare with a diagonal Gaussian, whose trace a single probe gives exactly: only the levels are drawn."""
    torch.manual_seed(0)
    data = gaussian()
    flow = RectifiedFlow(Optimal(data, prediction).float(), prediction=prediction, space=Pixels((3, 4, 4)))
    pictures = flow.space.to_stored(data.sample(200).float())
    assert 0 < pictures.min() < pictures.max() < 255, "none was clipped"
    bits = bits_per_dimension(flow, pictures, {}, cubic_times(STEPS))
    expected = -probabilities(data, pictures) / (48 * np.log(2))
    torch.testing.assert_close(bits, expected, rtol=0, atol=0.015)
    entropy = (0.5 * (2 * np.pi * np.e * data.variance).log2() + np.log2(127.5)).mean()
    assert bits.mean().item() == pytest.approx(entropy.item(), rel=0.01)


@pytest.mark.parametrize(
    ("transform", "dtype"), [(Linear(), "uint16"), (Linear(), "float32"), (Asinh(500.0), "float32")]
)
def test_it_is_in_the_units_of_measurements(transform: Transform, dtype: str) -> None:
    """Compare integers with the probability of their levels, and floating-point values with their density."""
    torch.manual_seed(0)
    data = gaussian()
    space = Fields((3, 4, 4), (1000.0, 0.0, 5.0), (9000.0, 4000.0, 600.0), transform=transform, dtype=dtype)
    flow = RectifiedFlow(Optimal(data, "velocity").float(), space=space)
    x = data.sample(100).float()
    values = space.to_stored(x)
    bits = bits_per_dimension(flow, values, {}, cubic_times(STEPS))
    normal = torch.distributions.Normal(data.mean, data.variance.sqrt())
    if dtype == "uint16":
        exact = space.encode(values).double()
        half = (space.encode(values.float() + 0.5).double() - exact).abs()
        expected = (normal.cdf(exact + half) - normal.cdf(exact - half)).log()
    else:
        physical = values.double().requires_grad_()
        low, high = (torch.tensor(each).double()[:, None, None] for each in (space.low, space.high))
        ends = transform(low), transform(high)
        encoded = (2 * transform(physical) - ends[0] - ends[1]) / (ends[1] - ends[0])
        [slope] = torch.autograd.grad(encoded.sum(), physical)
        expected = normal.log_prob(encoded.detach()) + slope.log()
    torch.testing.assert_close(bits, -expected.flatten(1).mean(dim=1) / np.log(2), rtol=0, atol=0.01)


def test_the_mean_over_all_probes_is_exact() -> None:
    """A linear velocity: the paths do not depend on the probe, and the mean over all sign vectors is the trace."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator) / 3
    mean, covariance = torch.randn(6, generator=generator), root @ root.T + 0.1 * torch.eye(6)
    flow = RectifiedFlow(Correlated(mean, covariance), space=Pixels((6, 1, 1)))
    probes = torch.tensor([*product((-1.0, 1.0), repeat=6)]).reshape(-1, 6, 1, 1)
    for x in torch.randn(3, 6, 1, 1, generator=generator):
        densities = log_density(flow, x.expand(len(probes), -1, -1, -1), {}, cubic_times(STEPS), probes)
        expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(x.flatten())
        assert densities.mean().item() == pytest.approx(expected.item(), abs=2e-3)
        assert densities.std() > 0.1, "a single probe is not exact"


def test_the_error_falls_with_the_fourth_power_of_the_number_of_steps() -> None:
    data = gaussian()
    flow = RectifiedFlow(Optimal(data, "velocity").float(), space=Pixels((3, 4, 4)))
    x, probe = data.mean.float()[None] + 0.1, torch.ones(1, 3, 4, 4)
    exact = torch.distributions.Normal(data.mean, data.variance.sqrt()).log_prob(x.double()).sum()
    errors = [(log_density(flow, x, {}, cubic_times(steps), probe) - exact).abs().item() for steps in (6, 12)]
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("likely"), RectifiedFlow(unet(), **settings()), holdout=0.5, seed=3)


def test_an_estimate_is_a_function_of_its_picture_its_condition_and_the_seed(run: Path) -> None:
    flow, data = load_flow(run, RectifiedFlow), pictures_of(run)

    def estimated(rows: Sequence[int], batch_size: int, seed: int = 0) -> Tensor:
        how: dict[str, Any] = {"num_samples": 1, "batch_size": batch_size, "seed": seed, "metrics": ()}
        comparison = Comparison(Evaluator(data, "efficientnet_lite0", **how), flow, {"steps": 2})
        return estimates(comparison, data, rows, range(len(rows)))

    whole = estimated(range(COUNT), 5)
    torch.manual_seed(1)
    part = estimated([9, 3], 64)
    torch.testing.assert_close(part, whole[[9, 3]], rtol=1e-5, atol=1e-5)
    images, none = data.read_entries([9, 3])["images"], torch.full((2,), 2)
    given = bits_per_dimension(flow, images, {"labels": torch.tensor(data.labels[[9, 3]])}, cubic_times(2))
    torch.testing.assert_close(part, given, rtol=1e-5, atol=1e-5)
    for others in (bits_per_dimension(flow, images, {"labels": none}, cubic_times(2)), estimated([9, 3], 64, seed=1)):
        assert not torch.allclose(others, part, atol=1e-3)


def evaluated(*flags: object) -> None:
    call("evaluate.py", *flags, "--metric", "likelihood", "--steps", 2)


def test_the_same_figures_on_two_processes(run: Path, tmp_path: Path) -> None:
    """The likelihood generates no samples and needs no feature network."""
    results = []
    for world_size in (2, 1):
        folder = tmp_path / str(world_size)
        run_on_ranks(world_size, evaluated, "--checkpoint", run, "--batch_size", 3, "--output_dir", folder)
        results += json.loads((folder / "evaluation.json").read_text())
        assert [*folder.glob("*.png")] == []
    shared, alone = (each.pop("distances") for each in results)
    assert results[0] == results[1]
    assert "feature_network" not in results[0]
    assert shared == pytest.approx(alone, abs=1e-4)
    bits = {f"{side}bits_per_dimension{error}" for side in ("", "heldout_") for error in ("", "_error")}
    assert alone.keys() == {*bits, "heldout_loss", "seen_loss", "gap"}
    assert all(alone[name] > 0 for name in bits)


IMPOSSIBLE: dict[str, Any] = {
    "needs a rectified flow from noise": lambda: MeanFlow(unet(), **settings()),
    "from noise to data": lambda: RectifiedFlow(unet(), from_source=True, **settings()),
    "a prediction of the velocity": lambda: RectifiedFlow(unet(), prediction="clean", **settings()),
    "on pixels or measurements, not Latents": lambda: RectifiedFlow(nn.Identity(), space=Latents(Haar(), 8)),
}


@pytest.mark.parametrize("sentence", IMPOSSIBLE)
def test_flows_without_a_likelihood(run: Path, sentence: str) -> None:
    how: dict[str, Any] = {"num_samples": 2, "metrics": ("likelihood",)}
    evaluator = Evaluator(pictures_of(run), "inception", **how)
    with pytest.raises(UsageError, match=f"`metric` likelihood .*{sentence}"):
        evaluator.measure(Comparison(evaluator, IMPOSSIBLE[sentence](), {"steps": 1}))
