"""Tests of the measured speed and memory of a training, scaled to the batch."""

import contextlib
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from ema_pytorch import EMA

from rectified_flow.condition import AugmentationLabels, Labels
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training import speed
from rectified_flow.training.speed import Speed, measure_speed


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as few steps as on a slow machine."""
    monkeypatch.setattr(speed, "MAX_SECONDS", 0.0)


def flow_of(side: int, kind: type[RectifiedFlow] = RectifiedFlow, dim: int = 16) -> Flow:
    network = Unet(dim, (1, 2), image_size=side, attention_sides=(), blocks_per_level=1)
    return kind(network, space=Pixels((3, side, side)))


def measured(flow: Flow, count: int, bf16: bool = False) -> Speed:
    autocast: Callable[[], Any] = contextlib.nullcontext
    if bf16:
        autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    return measure_speed(flow, lambda named: torch.optim.SGD([p for _, p in named], lr=0.1), count, autocast=autocast)


@pytest.mark.parametrize("kind", [RectifiedFlow, pytest.param(MeanFlow, marks=pytest.mark.slow)])
def test_memory_grows_with_images_pixels_and_width_and_bf16_halves_it(kind: type[RectifiedFlow]) -> None:
    """Measured on at most 2**14 pixels, so that a batch that exceeds the memory is measured, too."""
    few, many, large = (measured(flow_of(side, kind), count).memory for side, count in ((32, 4), (32, 400), (320, 4)))
    weights = 20 * sum(p.numel() for p in flow_of(32, kind).parameters())
    assert many - weights == pytest.approx(100 * (few - weights), rel=0.1)
    assert large - weights == pytest.approx(100 * (few - weights), rel=0.1)
    assert measured(flow_of(32, kind, dim=32), 4).memory > 1.5 * few
    assert measured(flow_of(32, kind), 4, bf16=True).memory < 0.85 * few
    assert measured(flow_of(512, kind), 10**6).memory > 1e13


def test_the_memory_is_that_of_the_tensors_kept_for_the_backward_pass() -> None:
    class Exponential(Flow):
        def __init__(self) -> None:
            super().__init__(torch.nn.Linear(1, 100, bias=False), space=Pixels((1, 1, 1)))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.network(images.flatten(1).float()).exp().sum()

    assert measured(Exponential(), 6).memory == 20 * 100 + 6 * (1 + 100) * 4, "its inputs, and the values of exp"


def test_the_time_is_that_of_the_median_step_and_the_update_is_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that another program slows down, and one that the processor hurries, change the range alone."""
    fast, usual, slow = (0.0, 1.0, 1.5), (10.0, 12.0, 12.5), (20.0, 29.0, 29.1)  # start, gradient and update of a step
    clock = iter(chain(fast, slow, fast, *[usual] * 4))  # the first step is not measured
    monkeypatch.setattr(speed, "MAX_SECONDS", float("inf"))
    monkeypatch.setattr(speed, "_now", lambda: next(clock))
    found = measured(flow_of(32), 64)
    assert found.rate == pytest.approx(64 / (4 * 2.0 + 0.5)), "16 of 64 images were measured"
    assert (found.slowest, found.fastest) == pytest.approx((64 / (4 * 9.0 + 0.1), 64 / (4 * 1.0 + 0.5)))
    assert str(found).startswith("7.5 images/s (1.8 to 14.2) in about ")
    assert not list(clock), "six steps were measured"


def test_two_steps_are_measured_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.5, 10.0, 12.0, 12.5, 20.0, 23.0, 23.5])  # three steps, the first of which is not measured
    monkeypatch.setattr(speed, "_now", lambda: next(clock))
    assert measured(flow_of(32), 64).rate == pytest.approx(64 / (4 * 2.5 + 0.5)), "the mean of both"


@pytest.mark.parametrize(("slow", "steps"), [(float("inf"), 3), (0.0, 2)])
def test_a_measured_step_clips_and_averages_as_a_run_does(
    slow: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take time that a run would lack. If steps are very slow, only one is measured after the first."""
    done: list[str] = []
    monkeypatch.setattr(speed, "SLOW_STEP", slow)
    monkeypatch.setattr(EMA, "update", lambda _: done.append("average"))
    monkeypatch.setattr(speed, "clip_grad_norm_", lambda *_: done.append("clip"))
    measured(flow_of(8), 2)
    assert done == ["clip", "average"] * steps, "the first step is not measured"


def test_a_network_gets_its_conditions() -> None:
    class Labelled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conditions = {"labels": Labels(2), "augmentation": AugmentationLabels(14)}
            self.layer = torch.nn.Embedding(3, 3)

        def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return x + self.layer(labels)[:, :, None, None]

    flow = RectifiedFlow(Labelled(), space=Pixels((3, 8, 8)), condition_dropout=0.1)
    assert measured(flow, 2).rate > 0


@pytest.mark.parametrize(
    "sentence", ["CUDA out of memory. Tried to", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"]
)
def test_a_batch_that_exceeds_the_memory_is_halved(sentence: str) -> None:
    class Small(RectifiedFlow):
        def forward(self, **batch: Any) -> torch.Tensor:
            if len(batch["images"]) > 4:
                raise RuntimeError(sentence)
            return super().forward(**batch)

    found = measured(flow_of(8, Small), 24)
    assert (found.at_once, found.rate > 0) == (3, True)
    assert found.memory == pytest.approx(measured(flow_of(8), 24).memory, rel=0.01)


def test_other_errors_of_a_step_are_not_hidden() -> None:
    class Broken(RectifiedFlow):
        def forward(self, *_: Any, **__: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        measured(flow_of(8, Broken), 2)


def test_a_full_memory_has_no_speed() -> None:
    class Full(RectifiedFlow):
        def forward(self, *_: Any, **__: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError

    assert measured(flow_of(8, Full), 2) == Speed(0.0, float("inf"))
