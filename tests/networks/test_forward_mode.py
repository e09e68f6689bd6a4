"""Tests of layers with derivatives of their own against the layers of PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.networks.forward_mode import Conv2d, GroupNorm, modulated

FORMATS = pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """Return one of the layers, and the layer of PyTorch with the same weights."""
    torch.manual_seed(0)
    ours: nn.Module = {"conv": lambda: Conv2d(64, 8, 3, padding=1), "norm": lambda: GroupNorm(64)}[name]()
    theirs: nn.Module = {"conv": lambda: nn.Conv2d(64, 8, 3, padding=1), "norm": lambda: nn.GroupNorm(16, 64)}[name]()
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    return ours.to(dtype), theirs.to(dtype)


def inputs(order: torch.memory_format) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, direction = torch.randn(2, 2, 64, 6, 6, dtype=torch.float64) + 1
    return x.contiguous(memory_format=order), direction.contiguous(memory_format=order)


@FORMATS
@pytest.mark.parametrize("name", ["conv", "norm"])
def test_value_gradient_and_tangent_are_pytorchs(name: str, order: torch.memory_format) -> None:
    ours, theirs = pair(name)
    x, direction = inputs(order)
    weights = torch.randn_like(ours(x))

    def gradients(layer: nn.Module, of_tangent: bool) -> list[Tensor]:
        y = jvp(layer, (x,), (direction,))[1] if of_tangent else layer(x)
        return list(torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()], materialize_grads=True))

    assert torch.equal(ours(x), theirs(x))
    torch.testing.assert_close(jvp(ours, (x,), (direction,)), jvp(theirs, (x,), (direction,)))
    x.requires_grad_()
    torch.testing.assert_close(gradients(ours, of_tangent=False), gradients(theirs, of_tangent=False))
    if name == "conv":
        torch.testing.assert_close(gradients(ours, of_tangent=True), gradients(theirs, of_tangent=True))
    else:
        with pytest.raises(RuntimeError, match="native_group_norm_backward"):
            gradients(ours, of_tangent=True)


def test_modulation_has_the_derivative_of_pytorchs() -> None:
    x, scale, shift, *directions = torch.randn(6, 2, 8, 3, 3, dtype=torch.float64, generator=torch.Generator())
    scale, shift, directions[1], directions[2] = (
        each[..., :1, :1] for each in (scale, shift, directions[1], directions[2])
    )
    values, changes = (x, scale, shift), tuple(directions)
    torch.testing.assert_close(
        jvp(modulated, values, changes), jvp(lambda x, scale, shift: x * (scale + 1) + shift, values, changes)
    )
    some = jvp(lambda x: modulated(x, scale, shift), (x,), changes[:1])
    torch.testing.assert_close(some, jvp(lambda x: x * (scale + 1) + shift, (x,), changes[:1]))


def test_a_derivative_of_a_convolution_costs_two_of_them() -> None:
    x, direction = inputs(torch.contiguous_format)

    def flops(layer: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            jvp(layer, (x,), (direction,))
        return int(counter.get_total_flops())

    ours, theirs = pair("conv")
    with FlopCounterMode(display=False) as once:
        ours(x)
    assert flops(ours) == 2 * once.get_total_flops()
    assert flops(theirs) == 3 * once.get_total_flops(), "PyTorch's own has become as cheap: remove ours"


@FORMATS
def test_a_norm_stays_in_the_precision_of_its_input(
    order: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, exact = pair("norm", torch.float32)[0], pair("norm")[0]
    x, direction = inputs(order)
    group_norm, autocast = F.group_norm, list[bool]()

    def note_autocast(*arguments: Any, **settings: Any) -> Tensor:
        autocast.append(torch.is_autocast_enabled("cpu"))
        return group_norm(*arguments, **settings)

    monkeypatch.setattr(F, "group_norm", note_autocast)
    with torch.autocast("cpu", torch.bfloat16):
        norm(x.bfloat16())
        value, tangent, *_ = jvp(norm, (x.bfloat16(),), (direction.bfloat16(),))
    assert autocast == [False], "on a GPU autocast has this operation in float32"
    assert value.dtype == tangent.dtype == torch.bfloat16
    expected, change, *_ = jvp(exact, (x,), (direction,))
    assert (value - expected).norm() < 0.01 * expected.norm()
    assert (tangent - change).norm() < 0.01 * change.norm()
