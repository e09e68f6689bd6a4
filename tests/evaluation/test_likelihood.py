"""The likelihood of pictures: exact for Gaussian data, and the same in any batch and on any number of processes."""

import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rectified_flow.cli.evaluate import evaluate
from rectified_flow.cli.flags.sampling import EvaluateConfig
from rectified_flow.cli.measures.likelihood import check_likelihood
from rectified_flow.data.open import open_dataset, picture_names
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.likelihood import Pictures, bits_per_dimension, log_density, measure, time_grid
from rectified_flow.flags import parse
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import describe_run
from rectified_flow.spaces.autoencoders import Haar
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.transforms import Asinh, Linear, Transform
from rectified_flow.system.signals import Interrupted, _requests
from tests.analytic import Gaussian, Optimal, image_gaussian
from tests.programs import assert_refused
from tests.ranks import run_on_ranks
from tests.test_load import settings, unet

COUNT, STEPS = 21, 32


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
    bits = bits_per_dimension(flow, pictures, {}, time_grid(STEPS), [0] * 200)
    expected = -probabilities(data, pictures) / (48 * np.log(2))
    clipped = 0.02 if prediction == "noise" else 0.0  # its velocity is clipped near the noise, also in sampling
    torch.testing.assert_close(bits, expected, rtol=0, atol=0.01 + clipped)
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
    bits = bits_per_dimension(flow, values, {}, time_grid(STEPS), [0] * len(values))
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
        densities = log_density(flow, x.expand(len(probes), -1, -1, -1), {}, time_grid(STEPS), probes)
        expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(x.flatten())
        assert densities.mean().item() == pytest.approx(expected.item(), abs=2e-3)
        assert densities.std() > 0.1, "a single probe is not exact"


def test_the_error_falls_with_the_fourth_power_of_the_number_of_steps() -> None:
    data = gaussian()
    flow = RectifiedFlow(Optimal(data, "velocity").float(), space=Pixels((3, 4, 4)))
    x, probe = data.mean.float()[None] + 0.1, torch.ones(1, 3, 4, 4)
    exact = torch.distributions.Normal(data.mean, data.variance.sqrt()).log_prob(x.double()).sum()
    errors = [(log_density(flow, x, {}, time_grid(steps), probe) - exact).abs().item() for steps in (6, 12)]
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a rectified flow on random pictures of cats and dogs, some of them held out; and a folder of others."""
    folder = tmp_path_factory.mktemp("likely")
    random = np.random.default_rng(0)
    for i in range(COUNT):
        picture = folder / "pictures" / ("cat" if i < 7 else "dog") / f"{i}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(picture)
    (folder / "others/deep").mkdir(parents=True)
    Image.open(folder / "pictures/cat/0.png").save(folder / "others/deep/copy.png")
    Image.new("RGB", (16, 16), (200, 0, 0)).save(folder / "others/red.png")
    flow = RectifiedFlow(unet(), **settings())
    dataset = open_dataset("unused", folder / "pictures", image_size=8, cache_dir=folder / "cache")
    config = describe_run(TrainingConfig(seed=3), describe(flow), dataset, flags={"holdout": 0.5})
    files = {checkpoint.MODEL_FILE: flow.network.state_dict()}
    checkpoint.save(folder / "checkpoints", 1, files, {FLOW_FILE: describe(flow), checkpoint.CONFIG_FILE: config})
    return folder


def pictures_of(run: Path) -> Pictures:
    data = open_dataset("unused", run / "pictures", image_size=8, cache_dir=run / "cache")
    return Pictures(data, picture_names(data))


def evaluated(*flags: object) -> None:
    sys.argv = ["evaluate.py", *map(str, flags), "--likelihood_steps", "2"]
    evaluate(parse(EvaluateConfig, "Measure."))


def test_an_estimate_depends_on_its_picture_alone(run: Path) -> None:
    flow, pictures = load_flow(run, RectifiedFlow), pictures_of(run)
    [one] = measure(flow, [pictures], steps=2, probes=2, batch_size=5)
    assert one.shape == (COUNT, 2)
    assert not torch.allclose(one[:, 0], one[:, 1], atol=1e-3)
    torch.manual_seed(1)
    part = Pictures(pictures.data.subset([9, 3]), ["a", "b"])
    parts = measure(flow, [part, pictures], steps=2, probes=3, batch_size=64)
    torch.testing.assert_close(parts[0][:, :2], one[[9, 3]], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts[1][:, :2], one, rtol=1e-5, atol=1e-5)
    [other] = measure(flow, [pictures], steps=2, probes=2, batch_size=5, seed=1)
    assert not torch.allclose(other, one, atol=1e-3)


def test_the_same_figures_on_two_processes(run: Path, tmp_path: Path) -> None:
    results = []
    for world_size in (2, 1):
        folder = tmp_path / str(world_size)
        flags = ["--checkpoint", run, "--likelihood", run / "others", "--likelihood_probes", 2]
        run_on_ranks(world_size, evaluated, *flags, "--batch_size", 3 + world_size, "--output_dir", folder)
        results.append(json.loads((folder / "likelihood.json").read_text()))
        assert Image.open(folder / "likelihood.png").size[0] > 500
        assert Image.open(folder / "strangest.png").size[0] > 200
    shared, alone = (each.pop("pictures") for each in results)
    assert results[0] == results[1]
    assert (results[0]["steps"], results[0]["probes"], results[0]["seed"]) == (2, 2, 0)
    assert [*alone] == ["training", "held out", "given"]
    for name, one in alone.items():
        two = shared[name]
        assert [each["name"] for each in one["each"]] == [each["name"] for each in two["each"]]
        for key in ("bits_per_dimension", "standard_error"):
            figures = [[each[key] for each in side["each"]] for side in (one, two)]
            assert figures[0] == pytest.approx(figures[1], abs=1e-4)
            assert one[key] == pytest.approx(two[key], abs=1e-4)
        assert one["bits_per_dimension"] == pytest.approx(np.mean([each["bits_per_dimension"] for each in one["each"]]))
    names = {each["name"] for name in ("training", "held out") for each in alone[name]["each"]}
    assert names == {f"{'cat' if i < 7 else 'dog'}/{i}.png" for i in range(COUNT)}
    assert [each["name"] for each in alone["given"]["each"]] == ["deep/copy.png", "red.png"]


def test_training_pictures_have_their_conditions_and_given_ones_have_none(run: Path) -> None:
    flow, pictures = load_flow(run, RectifiedFlow), pictures_of(run)
    known, free = measure(
        flow, [pictures, Pictures(pictures.data, pictures.names, conditional=False)], steps=2, probes=1, batch_size=64
    )
    images = pictures.data.read_entries(range(COUNT))["images"]
    for estimates, labels in ((known, torch.tensor(pictures.data.labels)), (free, torch.full((COUNT,), 2))):
        expected = bits_per_dimension(flow, images, {"labels": labels}, time_grid(2), [0] * COUNT)
        torch.testing.assert_close(estimates[:, 0], expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(known, free, atol=1e-3)


def test_a_run_alone_with_one_probe(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    evaluated("--checkpoint", run, "--likelihood", "--output_dir", tmp_path)
    groups = json.loads((tmp_path / "likelihood.json").read_text())["pictures"]
    assert [*groups] == ["training", "held out"]
    assert all(each["standard_error"] is None for each in groups["training"]["each"])
    assert groups["training"]["standard_error"] > 0
    told = capfd.readouterr().out
    assert "mean standard error" not in told
    assert "Runge-Kutta steps, 1 probe for each picture, seed 0" in told
    assert "strangest.png: held out pictures, the least likely first" in told
    assert not (tmp_path / "evaluation.json").exists()


def test_names_of_pictures(run: Path, tmp_path: Path) -> None:
    pictures = open_dataset("", run / "others", image_size=8, cache_dir=tmp_path)
    assert picture_names(pictures) == ["deep/copy.png", "red.png"]
    assert picture_names(pictures.subset([1])) == ["red.png"]
    assert picture_names(ImageDataset(pictures.path).subset([1])) == ["1"], "the source is not known"
    (tmp_path / "some").mkdir()
    (tmp_path / "some/broken.png").write_text("no picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "some/intact.png")
    known = open_dataset("", tmp_path / "some", image_size=8, cache_dir=tmp_path, skip_broken_images=True)
    assert picture_names(known) == ["intact.png"]


def test_a_stop_request_ends_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, calls = load_flow(run, RectifiedFlow), []

    def request_stop(*arguments: Any) -> None:
        calls.append(arguments)
        monkeypatch.setattr(_requests, "request", "SIGINT")

    flow.network.register_forward_pre_hook(request_stop)
    with pytest.raises(Interrupted, match="SIGINT"):
        measure(flow, [pictures_of(run)], steps=2, probes=1, batch_size=4)
    assert len(calls) == 1


IMPOSSIBLE: dict[str, Any] = {
    "a MeanFlow has no ODE; pass a run of train_oxford.py": lambda: MeanFlow(unet(), **settings()),
    "translates pictures; pass a run without --source_path": lambda: RectifiedFlow(
        unet(), from_source=True, **settings()
    ),
    "its space is Latents, not Pixels; pass a run without --autoencoder": lambda: RectifiedFlow(
        nn.Identity(), space=Latents(Haar(), 8)
    ),
    "does not exist at time 0; pass a run with --prediction velocity": lambda: RectifiedFlow(
        unet(), prediction="clean", **settings()
    ),
}


@pytest.mark.parametrize("sentence", IMPOSSIBLE)
def test_flows_without_a_likelihood(sentence: str) -> None:
    trained: Any = SimpleNamespace(flow=IMPOSSIBLE[sentence](), source="the run")
    with pytest.raises(UsageError, match=f"--likelihood is impossible with the run: .*{sentence}"):
        check_likelihood(EvaluateConfig(), trained)


def test_flags_without_effect(run: Path) -> None:
    for flags, sentence in {
        "--likelihood --steps 4": "--steps has no effect with --likelihood: leave it out",
        "--likelihood --solver euler": "--solver has no effect with --likelihood: leave it out",
        "--likelihood --mixed_precision bf16": "--mixed_precision is too inexact for --likelihood",
        "--likelihood_steps 4": "--likelihood_steps has no effect without --likelihood: pass both",
        "--likelihood --likelihood_probes 0": "--likelihood_probes is 0; it must be above 0",
        f"--likelihood {run}/nowhere": f"--likelihood {run}/nowhere is not a folder",
    }.items():
        sys.argv = ["evaluate.py", "--checkpoint", str(run), *flags.split()]
        with pytest.raises(UsageError, match=sentence):
            evaluate(parse(EvaluateConfig, "Measure."))


def test_pictures_with_transparency(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.new("RGBA", (8, 8), (i, 0, 0, 100)).save(tmp_path / f"pictures/{i}.png")
    dataset = open_dataset("", tmp_path / "pictures", image_size=8, cache_dir=tmp_path / "cache", alpha=True)
    network = type(unet())(8, (1,), channels=4, image_size=8)
    flow = RectifiedFlow(network, space=Pixels((4, 8, 8)))
    documents = {
        FLOW_FILE: describe(flow),
        checkpoint.CONFIG_FILE: describe_run(TrainingConfig(), describe(flow), dataset),
    }
    checkpoint.save(tmp_path / "checkpoints", 1, {checkpoint.MODEL_FILE: network.state_dict()}, documents)
    flags = f"--checkpoint {tmp_path} --likelihood"
    assert_refused("evaluate.py", 2, flags, "impossible for pictures with transparency: pass a run without --alpha")
