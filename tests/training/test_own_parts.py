"""Tests of custom flows, networks, optimizers and schedules, frozen parameters, and weights in half precision."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from rectified_flow.registry import register
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.training.optimizers import (
    BuildOptimizer,
    Muon,
    NamedParameters,
    build_schedule,
    find_optimizer,
    muon,
    orthogonalize,
)
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses, metrics, tiny_config, train

STEPS = 8


class Normed(nn.Module):
    """A flow with running means, which every forward pass in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.layer(self.norm(images.float() / 255)).square().mean()


def train_normed(config: TrainingConfig, dataset: ImageDataset) -> int:
    """How many batches the running means have seen."""
    torch.manual_seed(0)
    flow = Normed()
    Trainer(flow, dataset, config).train()
    return int(flow.norm.num_batches_tracked or 0)


def test_running_means_are_not_moved_by_the_warm_up(tmp_path: Path, flowers: ImageDataset) -> None:
    flags: dict[str, Any] = {"num_samples": 0, "save_every": 4, "log_every": 1}
    straight = tiny_config(tmp_path / "straight", train_num_steps=STEPS, **flags)
    assert run_on_ranks(2, train_normed, straight, flowers) == [STEPS] * 2
    assert_resumes_alike(2, tmp_path, train_normed, straight, flowers)


def assert_resumes_alike(world_size: int, folder: Path, train: Any, straight: TrainingConfig, *more: Any) -> None:
    """Training again from step 4 of a finished run, which has its last step taken away, ends with the same bytes."""
    half = folder / "half"
    shutil.copytree(straight.output_dir, half)
    shutil.rmtree(half / "checkpoints" / checkpoint.step_name(STEPS))
    run_on_ranks(world_size, train, replace(straight, output_dir=half), *more)
    assert_same_bytes(straight.output_dir, half, STEPS)
    assert losses(half) == losses(straight.output_dir)


@register
class WithFrozenHead(nn.Module):
    """A trained layer before a frozen one, which an own checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Conv2d(3, 3, 1)
        self.frozen = nn.Conv2d(3, 3, 1)
        nn.init.constant_(self.frozen.weight, 0.25)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.frozen(self.trained(x) * t.view(-1, 1, 1, 1))


@register
class FromElsewhere(WithFrozenHead):
    """A network whose constructor loads the frozen layer from elsewhere."""

    def __init__(self, frozen_source: str) -> None:
        super().__init__()
        self.frozen_source = frozen_source


NETWORKS: dict[str, nn.Module] = {"kept": WithFrozenHead(), "elsewhere": FromElsewhere("some hub")}
FROZEN = {"frozen.weight", "frozen.bias"}
TRAINED = {"trained.weight", "trained.bias"}


def train_partly_frozen(config: TrainingConfig, dataset: ImageDataset, kind: str) -> bool:
    """Whether the average shares what is frozen, and nothing else, with the network in training."""
    trainer = Trainer(RectifiedFlow(NETWORKS[kind]), dataset, config)
    trainer.train()
    assert trainer.state.ema is not None
    flow: Any = trainer.flow
    average: Any = trainer.state.ema.ema_model.network
    shares_frozen = average.frozen.weight.data_ptr() == flow.network.frozen.weight.data_ptr()
    return bool(shares_frozen and average.trained.weight.data_ptr() != flow.network.trained.weight.data_ptr())


@pytest.mark.parametrize(("kind", "in_model"), [("kept", FROZEN), ("elsewhere", set[str]())])
def test_what_is_frozen_is_shared_and_saved_once(
    tmp_path: Path, flowers: ImageDataset, kind: str, in_model: set[str]
) -> None:
    config = tiny_config(tmp_path / "straight", train_num_steps=STEPS, num_samples=0, save_every=4, log_every=1)
    assert run_on_ranks(1, train_partly_frozen, config, flowers, kind) == [True]
    saved = config.checkpoints / checkpoint.step_name(STEPS)
    assert set(load_file(saved / "model.safetensors")) == TRAINED | in_model
    assert set(load_file(saved / "ema.safetensors")) == TRAINED
    moments = load_file(saved / "optimizer.safetensors")
    assert {name.split(".")[-3] for name in moments} == {"trained"}
    assert_resumes_alike(1, tmp_path, train_partly_frozen, config, flowers, kind)
    if kind == "kept":
        weight: Any = load_flow(saved, RectifiedFlow).network.frozen
        assert (weight.weight == 0.25).all()


class Half(nn.Module):
    """A network in bfloat16, of which ``trained`` says whether it is to be trained."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.heavy = nn.Conv2d(3, 3, 1).bfloat16().requires_grad_(trained)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.heavy(self.first(x).bfloat16()).float()


def train_in_half(config: TrainingConfig, dataset: ImageDataset, trained: bool) -> str | int:
    """The refusal, or else the last step."""
    try:
        trainer = Trainer(RectifiedFlow(Half(trained)), dataset, config)
    except UsageError as refusal:
        return str(refusal)
    trainer.train()
    return trainer.state.step


def test_weights_in_bf16_may_be_frozen_but_not_trained(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path, train_num_steps=2, num_samples=0)
    for sentence in run_on_ranks(2, train_in_half, config, flowers, True):
        assert sentence.startswith("network.heavy.weight would be trained in bfloat16")
        assert "convert trained parameters with .float()" in sentence
        assert "\n" not in sentence
    assert not (tmp_path / "checkpoints").exists()
    assert run_on_ranks(2, train_in_half, config, flowers, False) == [2, 2]


FLAGS = dict[str, Any](train_num_steps=STEPS, num_samples=0, save_every=4, log_every=1)
SGD: BuildOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train_with(config: TrainingConfig, dataset: ImageDataset, parts: dict[str, Any]) -> None:
    train(config, dataset, **parts)


def rates(output_dir: Path) -> list[float]:
    return [row["learning_rate"] for row in metrics(output_dir)]


@pytest.mark.parametrize("shape", [(64, 576), (96, 16), (8, 8)])
def test_singular_values_become_one(shape: tuple[int, int]) -> None:
    """The singular vectors stay, and the polynomial acts on each singular value as on a number."""
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(2, *shape, generator=generator), full_matrices=False)
    values = torch.logspace(-2, 0, min(shape))
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    found = u.mT @ orthogonalize(u @ values.diag() @ v) @ v.mT
    torch.testing.assert_close(found, expected.diag().expand_as(found), atol=1e-3, rtol=0)
    assert 0.6 < expected[len(expected) // 2 :].min() < expected.max() < 1.25


def test_muon_updates_matrices_by_a_fixed_size_and_the_rest_as_adamw() -> None:
    torch.manual_seed(0)
    named = {
        "conv.weight": torch.randn(16, 8, 3, 3),
        "conv.bias": torch.randn(16),
        "embedding.weight": torch.randn(9, 9),
    }
    ours, theirs = ({name: torch.nn.Parameter(value.clone()) for name, value in named.items()} for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizers = (
        muon(ours.items(), **options, update_size=0.3),  # type: ignore[arg-type]
        torch.optim.AdamW(theirs.values(), **options),  # type: ignore[arg-type]
    )
    for _ in range(3):
        before = ours["conv.weight"].detach().clone()
        for name, value in named.items():
            ours[name].grad = theirs[name].grad = torch.randn_like(value)
        for optimizer in optimizers:
            optimizer.step()
        moved = ours["conv.weight"].detach() - before * (1 - 0.01 * 0.1)
        assert moved.square().mean().sqrt() == pytest.approx(0.01 * 0.3, rel=0.2)
    for name in ("conv.bias", "embedding.weight"):
        assert torch.equal(ours[name], theirs[name])
    assert not torch.equal(ours["conv.weight"], theirs["conv.weight"])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_of_a_gpu_skips_bad_gradients_by_itself(decay: float) -> None:
    """Fused Muon takes the same good steps as unfused Muon, and a bad step, first or later, changes nothing."""
    torch.manual_seed(0)
    shapes = {"conv.weight": (16, 8, 3, 3), "other.weight": (16, 72), "small.weight": (9, 30), "conv.bias": (16,)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    plain, fused = ({name: nn.Parameter(value.clone()) for name, value in values.items()} for _ in range(2))
    reference, other = (muon(each.items(), lr=0.01, weight_decay=decay) for each in (plain, fused))
    groups = [group | {"fused": True} for group in other.param_groups]
    optimizer = Muon(groups, lr=0.01, weight_decay=decay, fused=True)

    def state() -> list[Tensor]:
        moments = [value for parameter in fused.values() for value in optimizer.state[parameter].values()]
        return [each.detach().clone() for each in (*fused.values(), *moments)]

    for bad in (torch.nan, None, torch.inf, torch.nan, None):
        before = state()
        for name, parameter in fused.items():
            gradient = torch.randn(shapes[name])
            parameter.grad, plain[name].grad = gradient * (bad or 1), gradient
        optimizer.found_inf = torch.tensor(float(bad is not None))
        optimizer.step()
        if bad is None:
            reference.step()
            for name, parameter in fused.items():
                torch.testing.assert_close(parameter, plain[name], rtol=0, atol=1e-6)
                assert optimizer.state[parameter].keys() == reference.state[plain[name]].keys()
        else:
            # The first step adds the moments to the state.
            assert all(torch.equal(*pair) for pair in zip(before, state(), strict=False))
            assert all(each.isfinite().all() for each in state())


def test_muon_is_as_precise_under_autocast() -> None:
    """Autocast does not change an update: in bf16, the iterations diverge, and a weight may change by thousands."""
    weights = []
    for enabled in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(48, 288))
        optimizer = muon([("weight", weight)], lr=0.01, betas=(0.9, 0.99), weight_decay=0.0)
        weight.grad = torch.randn(48, 3) @ torch.randn(3, 288)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
        weights.append(weight.detach())
    assert torch.equal(*weights)


class Halves(torch.optim.SGD):
    """SGD with momentum on matrices and without on vectors, whose state has tensors of other types or a number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if group["momentum"]:
                    velocity = state.setdefault("velocity", torch.zeros_like(parameter, dtype=torch.bfloat16))
                    velocity.mul_(group["momentum"]).add_(parameter.grad)
                    state.setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)
                    parameter.data -= group["lr"] * velocity
                else:
                    state["times"] = state.get("times", 0) + 1
                    parameter.data -= group["lr"] / state["times"] * parameter.grad


@register(role="optimizer", needs=("lr",))
def halves(parameters: NamedParameters, *, lr: float, momentum: float = 0.5, **_flags: Any) -> torch.optim.Optimizer:
    """Vectors first: another order than the network's."""
    everything = list(parameters)
    vectors, others = ([(n, p) for n, p in everything if (p.ndim == 1) == wanted] for wanted in (True, False))
    return Halves([{"params": vectors, "lr": 2 * lr}, {"params": others, "momentum": momentum}], lr=lr)


@pytest.mark.parametrize(
    ("build", "world_size"),
    [(partial(halves, lr=0.1), 1), (partial(muon, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1), 2)],
    ids=["numbers", "Muon"],
)
def test_another_optimizer_resumes_byte_equal(
    tmp_path: Path, flowers: ImageDataset, world_size: int, build: BuildOptimizer
) -> None:
    config, parts = tiny_config(tmp_path / "straight", **FLAGS), {"optimizer": build}
    run_on_ranks(world_size, train_with, config, flowers, parts)
    assert_resumes_alike(world_size, tmp_path, train_with, config, flowers, parts)


def test_an_optimizer_is_found_by_its_name() -> None:
    options = ("weight_decay=0.1",)
    config, layer = TrainingConfig(learning_rate=0.5, optimizer=options), torch.nn.Linear(2, 2)
    default = find_optimizer(config, fused=True)(layer.named_parameters())
    assert isinstance(default, torch.optim.AdamW)
    assert {name: default.defaults[name] for name in ("lr", "betas", "weight_decay", "fused")} == {
        "lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.1, "fused": True,
    }  # fmt: skip
    config = TrainingConfig(learning_rate=0.5, optimizer=("halves", "momentum=0.25"))
    vectors, matrices = find_optimizer(config, fused=True)(layer.named_parameters()).param_groups
    assert (vectors["lr"], matrices["lr"], matrices["momentum"]) == (1.0, 0.5, 0.25)
    with pytest.raises(UsageError, match="`optimizer` adamv is not registered: choose adamw or halves"):
        find_optimizer(TrainingConfig(optimizer=("adamv",)), fused=True)


def test_warm_up_and_decay_in_closed_form() -> None:
    config = TrainingConfig(lr_warmup_steps=10)
    none, cosine, rsqrt = (build_schedule(replace(config, lr_decay=each)) for each in ("none", "cosine", "rsqrt"))
    for updates in range(10):
        assert none(updates, 110) == cosine(updates, 110) == rsqrt(updates, 110) == (updates + 1) / 10
    for updates in range(10, 120):
        assert none(updates, 110) == 1
        assert rsqrt(updates, 110) == rsqrt(updates, 5000) == pytest.approx((10 / (updates + 1)) ** 0.5)
    assert rsqrt(39, 110) == pytest.approx(0.5)
    expected = {10: 1.0, 35: (1 + 0.5**0.5) / 2, 60: 0.5, 85: (1 - 0.5**0.5) / 2, 110: 0.0, 120: 0.0}
    assert {updates: cosine(updates, 110) for updates in expected} == pytest.approx(expected)
    without = build_schedule(TrainingConfig(lr_warmup_steps=0, lr_decay="cosine"))
    assert [without(updates, 4) for updates in (0, 2, 4)] == pytest.approx([1, 0.5, 0])
    falling = [cosine(updates, 110) for updates in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(("warm_up", "own"), [(2, False), (8, False), (8, True)])
def test_a_warm_up_that_never_ends_is_printed(
    warm_up: int, own: bool, tmp_path: Path, flowers: ImageDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, train_num_steps=2, lr_warmup_steps=warm_up, num_samples=0)
    Trainer(Normed(), flowers, config, lr_schedule=(lambda _updates, _total: 1.0) if own else None).train()
    said = "warning: `lr_warmup_steps` is 8, so only 25% of `learning_rate` is reached in 2 steps: pass fewer"
    assert (said in capsys.readouterr().out) == (warm_up > 2 and not own)


def refused(config: TrainingConfig, dataset: ImageDataset) -> str:
    with pytest.raises(UsageError) as refusal:
        train(config, dataset)
    return str(refusal.value)


def halve_and_end_low(updates: int, total: int) -> float:
    """A schedule of one's own."""
    assert total == STEPS
    return 0.01 if updates == total - 1 else 0.5


def test_another_schedule(tmp_path: Path, flowers: ImageDataset) -> None:
    config, parts = tiny_config(tmp_path / "straight", **FLAGS), {"lr_schedule": halve_and_end_low, "optimizer": SGD}
    run_on_ranks(1, train_with, config, flowers, parts)
    assert rates(tmp_path / "straight") == pytest.approx([0.05] * 7 + [0.001])
    assert_resumes_alike(1, tmp_path, train_with, config, flowers, parts)
    assert rates(tmp_path / "half") == rates(tmp_path / "straight")
    [sentence] = run_on_ranks(1, refused, replace(config, train_num_steps=12), flowers)
    assert "was trained by SGD, not AdamW" in sentence


class OneChannel(nn.Module):
    """A network that returns one channel, which the loss would broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_a_network_that_returns_another_shape_is_refused(
    kind: type[Flow], tmp_path: Path, flowers: ImageDataset
) -> None:
    sentence = r"OneChannel returns \(\d+, 1, 8, 8\) for x of \(\d+, 3, 8, 8\): return the shape of x"
    with pytest.raises(UsageError, match=sentence):
        Trainer(kind(OneChannel()), flowers, tiny_config(tmp_path))


class Attending(nn.Module):
    """A network whose attention has no forward-mode derivative."""

    def __init__(self, *backends: SDPBackend) -> None:
        super().__init__()
        self.backends, self.layer = list(backends), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
        rows = self.layer(x).flatten(2).mT[:, None].contiguous()
        with sdpa_kernel(self.backends) if self.backends else nullcontext():
            return scaled_dot_product_attention(rows, rows, rows)[:, 0].mT.reshape(x.shape)


def test_mean_flow_refuses_fused_attention_before_the_run_begins(tmp_path: Path, flowers: ImageDataset) -> None:
    config = tiny_config(tmp_path / "run")
    with pytest.raises(UsageError, match=r"^`network` Attending has no forward-mode derivative \(Trying .*sdpa_kernel"):
        Trainer(MeanFlow(Attending()), flowers, config)
    assert not config.output_dir.exists()
    assert MeanFlow(Attending(SDPBackend.MATH))(images=torch.rand(4, 3, 8, 8)).isfinite()


def test_the_name_of_an_optimizer_belongs_to_the_config(tmp_path: Path, flowers: ImageDataset) -> None:
    with pytest.raises(UsageError, match="`optimizer` is the name adamw: pass it to TrainingConfig"):
        Trainer(Normed(), flowers, tiny_config(tmp_path), optimizer="adamw")  # type: ignore[arg-type]
