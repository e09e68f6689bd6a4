"""Tests of flows from pictures to pictures, with a known map between Gaussians, and of samples by number."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import Picture, all_none, drop
from rectified_flow.data.degraded import degraded
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import SOURCE, sample_batches
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.spaces.degradations import Grey, Mask
from rectified_flow.spaces.pixels import Pixels
from tests.networks.tiny_unets import small
from tests.tiny_flows import FLOWS

SHAPE = (3, 8, 8)


def unet(**kinds: Any) -> Unet:
    return small(dim=8, conditions=kinds, blocks_per_level=1)


def images(count: int, seed: int) -> Tensor:
    return torch.randint(256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Linear(nn.Module):
    """A velocity that is linear in ``x`` at each time, which is that of optimal transport between Gaussians."""

    def __init__(self, a: Tensor, b: Tensor, root_a: Tensor, root_b: Tensor) -> None:
        super().__init__()
        self.a, self.b, self.root_a, self.root_b = a, b, root_a, root_b
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Along the optimal paths, x_t = (1 - t) x_0 + t x_1 with x_1 = a + root_a / root_b (x_0 - b)."""
        t = t[:, None, None, None]
        z = (x - (1 - t) * self.b - t * self.a) / ((1 - t) * self.root_b + t * self.root_a)
        return self.a - self.b + (self.root_a - self.root_b) * z + self.gain * x


def gaussian_flow(coupling: Any = "independent") -> tuple[RectifiedFlow, Tensor, Tensor]:
    """Return a flow from N(0.4, 0.1^2) to N(-0.3, 0.3^2), whose network is the optimal one; and 512 draws of both."""
    generator = torch.Generator().manual_seed(1)
    b, a = torch.full((1, 2, 2), -0.3), torch.full((1, 2, 2), 0.4)
    root_b, root_a = torch.full((1, 2, 2), 0.3), torch.full((1, 2, 2), 0.1)
    x_0, x_1 = (m + s * torch.randn(512, 1, 2, 2, generator=generator) for m, s in ((b, root_b), (a, root_a)))
    network = Linear(a, b, root_a, root_b)
    return RectifiedFlow(network, space=Pixels((1, 2, 2)), coupling=coupling, from_source=True), x_0, x_1


def test_optimal_transport_between_gaussians_is_sampled() -> None:
    flow, _, x_1 = gaussian_flow()
    expected = -0.3 + 0.3 / 0.1 * (x_1 - 0.4)
    made = flow.sample(source=x_1, steps=64, decode=False)
    assert torch.allclose(made, expected, atol=1e-3)


def test_the_optimal_network_has_no_loss_on_optimal_pairs_alone() -> None:
    """Compare the loss on optimal pairs, on those of the coupling, and on independent ones."""
    flow, x_0, x_1 = gaussian_flow()
    pairs = -0.3 + 0.3 / 0.1 * (x_1 - 0.4)
    perfect = flow(images=pairs, source=x_1).item()
    independent = flow(images=x_0, source=x_1).item()
    coupled, _, _ = gaussian_flow("ot")
    rows = coupled.pair(images=x_0, source=x_1)
    transported = coupled(images=x_0, source=x_1[rows], noise_rows=rows).item()
    assert perfect < 1e-10
    assert transported < 0.3 * independent


def test_noise_is_added_to_starts_and_fills_unknown_pixels() -> None:
    flow = RectifiedFlow(unet(), space=Pixels(SHAPE), from_source=True, source_noise=0.25)
    source = flow.space.encode(images(2, 1)).clone()
    source[0, :, :4] = torch.nan
    noise = torch.randn(2, *SHAPE)
    start, conditions = flow.start_from(noise, {SOURCE: source})
    assert conditions == {}
    assert torch.equal(start[0, :, :4], noise[0, :, :4])
    assert torch.allclose(start[1], source[1] + 0.25 * noise[1])


def test_source_and_target_are_mirrored_and_augmented_alike() -> None:
    flow = RectifiedFlow(unet(), space=Pixels(SHAPE, horizontal_flip=True), from_source=True)
    with deterministic(BatchRows(0, 3, 16, slice(None))):
        x_0, start, _ = flow.draw_batch({"images": images(16, 1), "source": images(16, 1)})
    assert torch.equal(x_0, start)
    plain = flow.space.encode(images(16, 1))
    mirrored = (x_0 != plain).flatten(1).any(dim=1)
    assert 0 < mirrored.sum() < 16


def test_a_flow_that_takes_sources_names_a_batch_without_them() -> None:
    flow = RectifiedFlow(unet(), space=Pixels(SHAPE), from_source=True)
    with pytest.raises(UsageError, match="a batch has no source"):
        flow(images=images(2, 1))


def test_the_network_sees_the_source_as_a_condition_and_it_is_dropped() -> None:
    kind = Picture(SHAPE)
    flow = RectifiedFlow(unet(source=kind), space=Pixels(SHAPE), condition_dropout=0.5)
    grey = degraded(images(32, 1), Grey(), flow.space)
    with deterministic(BatchRows(0, 3, 32, slice(None))):
        x_0, noise, conditions = flow.draw_batch({"images": images(32, 1), "source": grey})
    none = all_none(flow.conditions, conditions)
    assert 5 < none.sum() < 27
    assert torch.equal(conditions[SOURCE][~none], Grey()(x_0)[~none])
    assert conditions[SOURCE][none].isnan().all()
    assert abs(noise.mean().item()) < 0.05, "paths start from noise"
    x, t = torch.randn(32, *SHAPE), torch.rand(32)
    seen = flow.velocity(x, t, **conditions)
    assert torch.allclose(seen[none], flow.velocity(x[none], t[none]), atol=1e-5)
    assert not torch.allclose(seen[~none], flow.velocity(x[~none], t[~none]), atol=1e-2)


def test_a_picture_with_a_hole_is_a_condition_yet() -> None:
    kinds = {SOURCE: Picture(SHAPE)}
    holes = torch.zeros(1, *SHAPE).masked_fill(torch.rand(SHAPE) < 0.5, torch.nan)
    assert not all_none(kinds, {SOURCE: holes}).item()
    assert all_none(kinds, {SOURCE: drop(kinds, {SOURCE: holes}, 1.0)[SOURCE]}).item()


def test_a_fresh_source_changes_nothing_until_it_is_trained() -> None:
    """A run that starts from the weights of another run without a source is as good as that run."""
    network = Unet(8, (1, 2), conditions={SOURCE: Picture(SHAPE)}, image_size=8, attention_sides=(4,))
    nn.init.normal_(network.conv_out.weight)
    x, t = torch.randn(2, *SHAPE), torch.rand(2)
    assert torch.equal(network(x, t, source=torch.randn(2, *SHAPE)), network(x, t))


def test_a_mean_flow_learns_from_starts_and_conditions() -> None:
    start = MeanFlow(unet(), space=Pixels(SHAPE), from_source=True)
    condition = MeanFlow(unet(source=Picture(SHAPE)), space=Pixels(SHAPE))
    holes = degraded(images(4, 1), Mask("box"), condition.space)
    for flow, batch in ((start, {"source": images(4, 2)}), (condition, {"source": holes})):
        loss = flow(images=images(4, 1), **batch)
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad is None or p.grad.isfinite().all() for p in flow.parameters())


@pytest.mark.parametrize("level", [1.0, 0.6])
def test_a_part_is_kept_on_its_path_and_to_the_end(level: float) -> None:
    flow = RectifiedFlow(unet(), space=Pixels(SHAPE))
    known, mask = images(2, 5), torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    mask[:, :, :, 4:] = True
    seen: list[tuple[float, Tensor]] = []
    noise = torch.randn(2, *SHAPE)
    how: dict[str, Any] = {"start": known, "mask": mask, "noise": noise, "strength": level}
    made = flow.sample(**how, steps=4, watch=lambda t, x: seen.append((t, x)))
    x_0 = flow.space.encode(known)
    assert torch.equal(seen[0][1], torch.lerp(x_0, noise, level))
    for t, x in seen:
        assert torch.allclose(x[..., :4], torch.lerp(x_0, noise, t)[..., :4], atol=1e-6)
    assert torch.allclose(made[..., :4], known[..., :4] / 255, atol=1e-6)
    assert not torch.allclose(made[..., 4:], known[..., 4:] / 255, atol=0.1)


def test_no_solver_replaces_a_source_by_noise() -> None:
    flow, _, x_1 = gaussian_flow()
    with pytest.raises(UsageError, match="`solver` stochastic is for paths from noise"):
        flow.sample(source=x_1, solver="stochastic")


def pictures(numbers: Sequence[int], batch_size: int = 64, **how: object) -> dict[int, Tensor]:
    drawn = sample_batches(FLOWS["rectified"]().eval(), numbers, batch_size=batch_size, steps=2, **how)  # type: ignore[arg-type]
    return {i: picture for some, batch in drawn for i, picture in zip(some, batch, strict=True)}


@pytest.mark.parametrize("solver", ["midpoint", "ab2", "dpmpp_2m", "stochastic"])
def test_a_picture_is_the_same_in_any_company(solver: str) -> None:
    together = pictures(range(6), solver=solver)
    assert {picture.dtype for picture in together.values()} == {torch.uint8}
    for numbers, batch_size in (((5, 0, 3), 64), (range(6), 4), ((4,), 1)):
        for i, picture in pictures(numbers, batch_size, solver=solver).items():
            assert (picture.int() - together[i].int()).abs().max() <= 1, "more than rounding"
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[0], pictures([0], seed=1)[0])


def test_classes_take_turns() -> None:
    both = pictures(range(4), conditions={"labels": torch.tensor([1, 0])})
    for turn, label in enumerate((1, 0)):
        alone = pictures(range(4), conditions={"labels": torch.tensor([label])})
        for i in range(4):
            assert torch.equal(both[i], alone[i]) == (i % 2 == turn)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_from_pictures(kind: type[RectifiedFlow | MeanFlow]) -> None:
    """A network that predicts no velocity leaves the noisy picture as it is."""
    silent = kind(Unet(8, (1,), image_size=8), space=Pixels((3, 8, 8)))
    given = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    drawn = {
        i: picture
        for level in (0.001, 0.5)
        for some, batch in sample_batches(silent, range(3), start=given, strength=level)
        for i, picture in zip((f"{j} {level}" for j in some), batch, strict=True)
    }
    for i in range(3):
        near, far = (drawn[f"{i} {level}"].int() - given[i % 2].int() for level in (0.001, 0.5))
        assert near.abs().max() <= 1
        assert far.abs().float().mean() > 20
