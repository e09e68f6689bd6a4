"""Tests of the example on point clouds: closed forms on the sphere, symmetry, and resumed runs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import train_point_clouds as example
from digits import Digits
from rectified_flow.cli.settings import parse
from rectified_flow.condition import ConditionSpecs, Labels
from rectified_flow.flows.solvers import Guidance
from rectified_flow.load import build_flow, load_flow
from rectified_flow.registry import describe
from set_transformer import SetTransformer
from sphere import Points, SphereFlow, exp, log, project, transport
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes

FLAGS = (
    "--points 12 --width 32 --layers 1 --train_num_steps 6 --save_every 3 --log_every 2 --num_samples 2"
    " --sample_every 6 --lr_warmup_steps 0 --lr_decay none --learning_rate 3e-3"
)


class FromOnePoint(nn.Module):
    """The velocity of data that are one point: away from it, at the speed of one's distance over the time."""

    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.point = point

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return -log(x, self.point.expand_as(x)) / t[:, None, None]


class Turn(nn.Module):
    """A turn about an axis, whose lines are no great circles, and whose speed depends on the time."""

    axis = torch.tensor([0.0, 0.6, 0.8])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return 2 * t[:, None, None] * torch.linalg.cross(self.axis.expand_as(x), x)


def points(*shape: int) -> Tensor:
    return project(torch.randn(*shape, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def test_exp_and_log_are_inverse_and_keep_lengths() -> None:
    x, y = points(2, 200)
    v = log(x, y)
    assert torch.allclose(exp(x, v), y)
    assert torch.allclose(v.norm(dim=-1), (x * y).sum(dim=-1).arccos())
    assert (v * x).sum(dim=-1).abs().max() < 1e-12, "tangent"
    assert torch.allclose(transport(x, y, v), -log(y, x)), "the velocity of a great circle stays its velocity"


def test_data_that_are_one_point() -> None:
    """The exact velocity has no loss, and leads every point there."""
    point = project(torch.tensor([0.3, -0.8, 0.5]))
    flow = SphereFlow(FromOnePoint(point), space=Points((5, 3)))
    torch.manual_seed(0)
    assert flow(clouds=point.expand(64, 5, -1)).item() < 1e-6
    assert (flow.sample(64, steps=4) - point).norm(dim=-1).max() < 1e-5


def test_midpoint_steps_have_the_order_2() -> None:
    flow, noise, axis = SphereFlow(Turn(), space=Points((50, 3))), points(1, 50).float(), Turn.axis
    angle = torch.tensor(-1.0)  # from time 1 to 0
    along = (noise @ axis)[..., None] * axis
    exact = along + angle.cos() * (noise - along) + angle.sin() * torch.linalg.cross(axis.expand_as(noise), noise)
    errors = [(flow.sample(noise=noise, steps=steps) - exact).norm(dim=-1).max().item() for steps in (8, 16)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.15)


def test_another_order_of_the_points_is_that_order_of_the_output() -> None:
    conditions: ConditionSpecs = {"labels": Labels(10)}
    network, x, order = SetTransformer(conditions, 32, 2), points(3, 5).float(), torch.randperm(5)
    nn.init.normal_(network.out.weight)
    t, labels = torch.rand(3), torch.tensor([1, 2, 3])
    assert torch.allclose(network(x[:, order], t, labels=labels), network(x, t, labels=labels)[:, order], atol=1e-5)
    assert not torch.allclose(network(x, t, labels=labels), network(x, t), atol=1e-5)


def test_digits_lie_around_the_pole() -> None:
    clouds = Digits(12).entries["clouds"]
    assert clouds.shape == (1797, 12, 3)
    assert torch.allclose(clouds.norm(dim=-1), torch.ones(1797, 12))
    assert clouds[..., 2].min() > torch.tensor(1.2 * 2**0.5).cos() - 1e-5


def train(words: str) -> None:
    example.train(parse(example.CloudFlags, "", words.split()))


def run(output_dir: Path, flags: str = "", world_size: int = 1) -> Path:
    run_on_ranks(world_size, train, f"--output_dir {output_dir} --batch_size {16 // world_size} {FLAGS} {flags}")
    return output_dir


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps without a break, in one process."""
    return run(tmp_path_factory.mktemp("whole"))


def test_a_resumed_run_is_the_same_to_the_byte(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--train_num_steps 3")
    run(tmp_path)
    assert_same_bytes(whole, tmp_path, 6)


def test_samples_of_a_saved_flow_are_on_the_sphere(whole: Path) -> None:
    assert (whole / "samples/step_00000006.png").exists()
    flow = load_flow(whole)
    assert describe(build_flow(describe(flow), "a test")) == describe(flow)
    samples = flow.sample(4, steps=2, guidance=Guidance(2.0), labels=torch.tensor([0, 1, 2, 3]))
    assert samples.shape == (4, 12, 3)
    assert torch.allclose(samples.norm(dim=-1), torch.ones(4, 12))
