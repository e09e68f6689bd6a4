"""Tests of the flow of the example on Wan against the schedulers, transformers and pipelines of diffusers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from rectified_flow.cli.settings import parse
from rectified_flow.condition import all_none, drop
from rectified_flow.errors import UsageError
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.solvers import Guidance, guided, integrate
from rectified_flow.randomness import BatchRows, deterministic
from tests.examples.wan.tiny_wan import BOUNDARY, Kind, save_pipeline
from wan_flags import WanFlags
from wan_flow import Captions, ClipFlow, ExpertTimes, WanNetwork
from wan_pipeline import Wan

FLAGS: dict[Kind, str] = {
    "text": "",
    "experts": "--expert high",
    "tokens": "--first_frame",
    "image": "--expert low",
}
IMAGE = torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    folder = tmp_path_factory.mktemp("wan")
    return {kind: save_pipeline(folder / kind, kind) for kind in FLAGS}


def wan_of(model: Path, flags: str) -> Wan:
    words = f"--model {model} --frames 9 --height 32 --width 32 {flags}"
    return Wan(parse(WanFlags, "", words.split()).wan, torch.device("cpu"))


def flow_of(wan: Wan, empty: Tensor) -> Any:
    transformer = wan.load_transformer(wan.expert, torch.float32)
    return ClipFlow(WanNetwork(transformer, empty, "here", wan.first_frame), space=wan.space).eval()


def draws(wan: Wan, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return data, noise and embeddings of captions."""
    shape = wan.space.shape or ()
    return torch.randn(count, *shape), torch.randn(count, *shape), torch.randn(count, 7, 32)


def condition_of(pipeline: Any, wan: Wan) -> tuple[Tensor, ...]:
    """Return what the pipeline prepares of the image: the condition, and the mask of the frames to sample if it has."""
    arguments = (IMAGE * 2 - 1, 1, (wan.space.shape or (0,))[0], 32, 32, 9, torch.float32, torch.device("cpu"))
    prepared: tuple[Tensor, ...] = pipeline.prepare_latents(*arguments)[1:]
    return prepared


def test_the_loss_is_that_of_diffusers(models: dict[Kind, Path]) -> None:
    wan = wan_of(models["text"], "")
    x_0, noise, text = draws(wan, 2)
    flow, t = flow_of(wan, text[0]), torch.tensor([0.25, 0.875])
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.sigmas, scheduler.timesteps = t, 1000 * t
    noisy = scheduler.scale_noise(x_0, 1000 * t, noise)
    predicted = flow.network.transformer(noisy, 1000 * t, text, return_dict=False)[0]
    expected = torch.nn.functional.mse_loss(predicted, noise - x_0)
    torch.testing.assert_close(flow.loss(x_0, noise, t, {"text": text}), expected, atol=1e-6, rtol=1e-6)


def test_the_loss_from_a_first_frame_is_that_of_other_frames_at_the_times_of_tokens(models: dict[Kind, Path]) -> None:
    """Compare the loss with one on the input and the times of tokens of WanImageToVideoPipeline for TI2V-5B."""
    wan = wan_of(models["tokens"], "--first_frame")
    x_0, noise, text = draws(wan, 1)
    flow, t = flow_of(wan, text[0]), torch.tensor([0.25])
    condition, mask = condition_of(wan.pipeline, wan)
    noisy = (1 - mask) * condition + mask * ((1 - t) * x_0 + t * noise)
    times = (mask[0][0][:, ::2, ::2] * 1000 * t).flatten()[None]
    predicted = flow.network.transformer(noisy, times, text, return_dict=False)[0]
    expected = (mask * (predicted - (noise - x_0)).square()).sum() / mask.expand_as(x_0).sum()
    conditions = {"text": text, "given": condition}
    torch.testing.assert_close(flow.loss(x_0, noise, t, conditions), expected, atol=1e-6, rtol=1e-6)
    other = torch.cat((noise[:, :, :1] + 7, noise[:, :, 1:]), dim=2)
    assert torch.equal(flow.loss(x_0, other, t, conditions), flow.loss(x_0, noise, t, conditions))


def test_the_loss_from_an_image_is_that_of_all_frames_and_further_channels(models: dict[Kind, Path]) -> None:
    wan = wan_of(models["image"], "--expert low")
    x_0, noise, text = draws(wan, 1)
    flow, t = flow_of(wan, text[0]), torch.tensor([0.25])
    [condition] = condition_of(wan.pipeline, wan)
    assert condition.shape == (1, 4 + 16, 3, 4, 4)
    noisy = torch.cat(((1 - t) * x_0 + t * noise, condition), dim=1)
    predicted = flow.network.transformer(noisy, 1000 * t, text, return_dict=False)[0]
    expected = torch.nn.functional.mse_loss(predicted, noise - x_0)
    loss = flow.loss(x_0, noise, t, {"text": text, "given": condition})
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", FLAGS)
def test_euler_steps_are_those_of_the_pipeline(models: dict[Kind, Path], kind: Kind) -> None:
    """On the noise levels of the scheduler, with guidance 3, from text and from a first frame.

    The pipeline calls each expert in its range of noise levels, the boundary included in that of the high one.
    """
    wan = wan_of(models[kind], FLAGS[kind])
    x, _, text = draws(wan, 1)
    empty = torch.randn(1, 7, 32)
    pipeline: Any = wan.pipeline
    given = {} if wan.first_frame == "none" else {"given": condition_of(pipeline, wan)[0]}
    flags = ("--expert high", "--expert low") if wan.boundary is not None else (FLAGS[kind],)
    experts = [wan_of(models[kind], each) for each in flags]
    flows = [flow_of(expert, empty[0]) for expert in experts]
    for expert, flow in zip(experts, flows, strict=True):
        pipeline.register_modules(**{expert.expert: flow.network.transformer})
    expected = pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=empty,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=6,
        guidance_scale=3.0,
        latents=x.clone(),
        output_type="latent",
        **({"image": IMAGE} if given else {}),
    ).frames
    conditions, ours = {"text": text, **given}, x
    grid = pipeline.scheduler.sigmas.tolist()
    used = []
    with torch.no_grad():
        for t, t_next in pairwise(grid):
            [number] = [n for n, each in enumerate(experts) if each.noise_range[0] <= t <= each.noise_range[1]]
            network = flows[number].network
            used.append(number)
            field = guided(network, network.conditions, conditions, Guidance(3.0))
            ours = integrate(field, ours, [t, t_next], "euler")
    assert set(used) == set(range(len(experts)))
    known = int(wan.first_frame == "tokens")
    torch.testing.assert_close(ours[:, :, known:], expected[:, :, known:], atol=1e-5, rtol=1e-5)
    assert (ours - x).norm() > 0.1 * x.norm()


def test_captions_are_dropped_and_first_frames_are_not() -> None:
    text, given = torch.randn(400, 7, 32), torch.randn(400, 4, 1, 2, 2)
    kinds = WanNetwork(torch.nn.Identity(), torch.zeros(7, 32), "here", "tokens").conditions
    with deterministic(BatchRows(0, 0, 400, slice(None))):
        dropped = drop(kinds, {"text": text, "given": given}, 0.25)
    assert torch.equal(dropped["given"], given)
    count = int(all_none({"text": kinds["text"]}, {"text": dropped["text"]}).sum())
    assert 70 < count < 130
    assert isinstance(kinds["text"], Captions)


@pytest.mark.parametrize(("low", "high"), [(0.875, 1.0), (0.0, 0.875)])
def test_times_of_an_expert_are_those_of_the_model_in_its_range(low: float, high: float) -> None:
    torch.manual_seed(0)
    every = ExpertTimes(5.0).draw(400_000, torch.device("cpu"))
    torch.testing.assert_close(every.logit().mean().item(), torch.tensor(5.0).log().item(), atol=0.01, rtol=0)
    within = every[(every > low) & (every < high)]
    drawn = ExpertTimes(5.0, low, high).draw(100_000, torch.device("cpu"))
    assert low <= drawn.min() < drawn.max() <= high
    shares = torch.linspace(0.05, 0.95, 10)
    torch.testing.assert_close(drawn.quantile(shares), within.quantile(shares), atol=5e-3, rtol=0)


def test_an_expert_has_the_range_of_the_pipeline(models: dict[Kind, Path]) -> None:
    high, low = (wan_of(models["experts"], f"--expert {each}") for each in ("high", "low"))
    assert (high.expert, high.noise_range) == ("transformer", (BOUNDARY, 1.0))
    assert (low.expert, low.noise_range) == ("transformer_2", (0.0, BOUNDARY))
    assert wan_of(models["text"], "").noise_range == (0.0, 1.0)


def test_the_shift_is_that_of_the_scheduler_or_of_the_flag(models: dict[Kind, Path]) -> None:
    assert wan_of(models["text"], "").time_shift == 5.0
    assert wan_of(models["text"], "--time_shift 2").time_shift == 2.0


def test_objectives_that_need_an_interval_are_refused(models: dict[Kind, Path]) -> None:
    wan = wan_of(models["text"], "")
    network = flow_of(wan, torch.zeros(7, 32)).network
    with pytest.raises(UsageError, match="`network` WanNetwork has no input r, the end of an interval"):
        MeanFlow(network, space=wan.space)
    with pytest.raises(UsageError, match="a Wan transformer does not accept r: train it as a rectified flow"):
        network(torch.randn(2, *(wan.space.shape or ())), torch.ones(2), r=torch.zeros(2), text=torch.randn(2, 7, 32))
