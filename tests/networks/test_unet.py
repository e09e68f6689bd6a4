"""Tests of the Unet: sizes, conditions, derivatives and memory formats."""

import pytest
import torch
from torch import nn
from torch.func import jvp
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.condition import Labels, Number
from rectified_flow.errors import UsageError
from rectified_flow.networks.network import Network, checkpoint_gradients
from rectified_flow.networks.unet import Attention, Block, TimeEmbedding, Unet
from rectified_flow.randomness import BatchRows, deterministic
from tests.networks.tiny_unets import inputs, small


def test_default_size() -> None:
    unet = Unet()
    assert sum(parameter.numel() for parameter in unet.parameters()) == pytest.approx(25.1e6, rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        unet(torch.zeros(1, 3, 64, 64), torch.zeros(1))
    assert counter.get_total_flops() == pytest.approx(17.7e9, rel=0.01)


def test_attention_only_at_16_and_8_px() -> None:
    unet = Unet(dim=8)
    sides: list[int] = []
    for module in unet.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(lambda _m, args, _out: sides.append(args[0].shape[-1]))
    unet(torch.zeros(1, 3, 64, 64), torch.zeros(1))
    assert sides == [16, 16, 8, 8, 8, 8, 8, 8, 16, 16, 16]


def test_it_starts_at_zero() -> None:
    x, t, _ = inputs()
    assert torch.equal(Unet(dim=16, dim_mults=(1, 2), image_size=8)(x, t), torch.zeros_like(x))


@pytest.mark.parametrize(("shape", "side"), [((10, 8), 10), ((8, 6), 6)])
def test_a_side_that_does_not_divide_is_named(shape: tuple[int, int], side: int) -> None:
    unet = Unet(dim=8, dim_mults=(1, 1, 1), image_size=8)
    with pytest.raises(ValueError, match=f"image side {side} is not divisible by 4"):
        unet(torch.zeros(1, 3, *shape), torch.zeros(1))


def test_without_r_it_is_the_velocity_at_r_equal_t() -> None:
    unet = small()
    x, t, r = inputs()
    assert torch.equal(unet(x, t), unet(x, t, r=t))
    assert not torch.allclose(unet(x, t), unet(x, t, r=r))


def test_the_interval_is_untouched_by_training_without_r() -> None:
    unet = small()
    x, t, _ = inputs()
    unet(x, t).square().mean().backward()
    interval = unet.time_embedding.interval.weight.grad
    assert interval is not None
    assert torch.equal(interval, torch.zeros_like(interval))


def test_labels() -> None:
    unet = small(conditions={"labels": Labels(5)})
    x, t, _ = inputs()
    none = unet(x, t)
    assert torch.equal(none, unet(x, t, labels=torch.full((3,), 5)))
    assert not torch.allclose(none, unet(x, t, labels=torch.tensor([0, 1, 2])))
    with pytest.raises(ValueError, match=r"this Unet does not take labels, only \[\]"):
        small()(x, t, labels=torch.tensor([0, 1, 2]))


def test_every_parameter_gets_a_gradient() -> None:
    """DistributedDataParallel refuses parameters without one."""
    unet = small(conditions={"labels": Labels(5), "place": Number((0, 1))})
    x, t, _ = inputs()
    unet(x, t).square().mean().backward()
    assert [name for name, p in unet.named_parameters() if p.requires_grad and p.grad is None] == []


def test_forward_mode_derivative_is_the_limit_of_differences() -> None:
    unet = small().double()
    x, t, r = (value.double() for value in inputs())
    direction = torch.randn_like(x)
    _, derivative, *_ = jvp(unet, (x, t, r), (direction, torch.ones_like(t), torch.zeros_like(r)))
    h = 1e-6
    difference = (unet(x + h * direction, t + h, r) - unet(x - h * direction, t - h, r)) / (2 * h)
    torch.testing.assert_close(derivative, difference, rtol=1e-5, atol=1e-7)
    assert derivative.norm() > 1


def test_forward_mode_derivative_under_bf16_autocast() -> None:
    unet = small(dropout=0.1)
    x, t, r = inputs()
    tangents = torch.randn_like(x), torch.ones_like(t), torch.zeros_like(r)
    with deterministic(BatchRows(0, 0, 3, slice(None))):
        value, derivative, *_ = jvp(unet, (x, t, r), tangents)
        with torch.autocast("cpu", torch.bfloat16):
            value_16, derivative_16, *_ = jvp(unet, (x, t, r), tangents)
    assert value_16.dtype == derivative_16.dtype == torch.bfloat16
    assert (value_16 - value).norm() < 0.03 * value.norm()
    assert (derivative_16 - derivative).norm() < 0.06 * derivative.norm()


def test_dropout_acts_in_training_only() -> None:
    unet = small(dropout=0.5)
    x, t, _ = inputs()
    assert not torch.equal(unet(x, t), unet(x, t))
    unet.eval()
    assert torch.equal(unet(x, t), unet(x, t))


def test_gradient_checkpointing_is_refused_where_it_has_no_effect() -> None:
    unet = Unet(8, (1,), image_size=8, attention_sides=())
    checkpoint_gradients(unet)
    assert unet.gradient_checkpointing
    for network in (nn.Linear(1, 1), Network()):
        with pytest.raises(UsageError, match=f"`gradient_checkpointing` has no effect: {type(network).__name__} keeps"):
            checkpoint_gradients(network)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    """Gradient checkpointing evaluates each block twice, and changes no gradient under dropout."""
    unet = small(dropout=0.3)
    calls = []
    for block in unet.modules():
        if isinstance(block, Block):
            block.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradient() -> torch.Tensor:
        unet.zero_grad()
        calls.clear()
        with deterministic(BatchRows(0, 0, 3, slice(None))):
            unet(*inputs()).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in unet.parameters() if p.grad is not None])

    kept, once = gradient(), len(calls)
    unet.gradient_checkpointing = True
    torch.testing.assert_close(gradient(), kept)
    assert len(calls) == 2 * once


def test_time_embedding_stays_float32_under_autocast() -> None:
    embedding = TimeEmbedding(16, 64)
    t = torch.tensor([0.5, 0.50001])
    with torch.autocast("cpu", torch.bfloat16):
        out = embedding(t, t)
    assert out.dtype == torch.float32
    assert torch.equal(out, embedding(t, t))
    assert not torch.equal(out[0], out[1])


def test_blocks_have_layers_of_their_own() -> None:
    """Two blocks with one number would drop the same elements."""
    layers = [module.layer for module in Unet(dim=8).modules() if isinstance(module, Block)]
    assert len(layers) == len(set(layers))


@pytest.mark.parametrize(
    ("mults", "down", "up"),
    [((1, 1, 2), 2, 0), ((1, 1, 1, 2), 4, 0), ((1,), 0, -3), ((1, 3), 0, 0)],
    ids=["a level more", "two more", "a level fewer", "as many"],
)
def test_weights_of_a_unet_with_other_levels(mults: tuple[int, ...], down: int, up: int) -> None:
    """A deeper network has the weights at its lowest levels, and a shallower network has those of the highest levels.

    A level has two blocks on the way down and three on the way up; the first has no resampling block.
    """
    weights = small(blocks_per_level=1).state_dict()
    aligned = small(dim_mults=mults, blocks_per_level=1, attention_sides=()).align(weights)
    assert aligned["conv_in.weight"] is weights["conv_in.weight"]
    for part, count, shift in (("down", 3, down), ("up", 5, up)):
        for index in range(count):
            assert aligned[f"{part}.{index + shift}.conv1.weight"] is weights[f"{part}.{index}.conv1.weight"]


def test_weights_of_a_unet_with_other_numbers_of_blocks() -> None:
    weights = small(blocks_per_level=1).state_dict()
    assert small(blocks_per_level=2, dim_mults=(1, 1, 2), attention_sides=()).align(weights) == weights
