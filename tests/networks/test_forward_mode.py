"""Tests of layers with custom derivatives against the derivatives of PyTorch, also compiled for a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.condition import Labels
from rectified_flow.networks import forward_mode
from rectified_flow.networks.forward_mode import Conv2d, GroupNorm, modulated
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from tests.networks.tiny_unets import inputs as inputs_of_unet
from tests.networks.tiny_unets import small

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


LABELS = torch.tensor([0, 4, 2])
Compute = Callable[[], list[Tensor]]


def in_both_forms(compute: Compute) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of ``compute`` in the forms of eager code and of code for a GPU."""
    plain = compute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_mode, "is_compiled_for_gpu", lambda _x: True)
        return plain, compute()


def results(unet: Unet, dtype: torch.dtype) -> list[Tensor]:
    """Value, forward-mode derivative, and the gradient of each parameter, under dropout."""
    x, t, r = (each.to(dtype) for each in inputs_of_unet())
    tangents = torch.randn_like(x), torch.ones_like(t), torch.zeros_like(r)
    unet.zero_grad()
    with deterministic(BatchRows(0, 0, 3, slice(None))):
        value = unet(x, t, r, labels=LABELS)
        (value * torch.linspace(-1, 1, value.numel(), dtype=dtype).view(value.shape)).sum().backward()
        with torch.no_grad():
            _, derivative, *_ = jvp(lambda x, t, r: unet(x, t, r, labels=LABELS), (x, t, r), tangents)
    gradients = [p.grad for p in unet.parameters() if p.grad is not None]
    assert len(gradients) == sum(p.requires_grad for p in unet.parameters())
    return [value, derivative, *gradients]


def build(**settings: object) -> Unet:
    return small(dropout=0.2, blocks_per_level=1, conditions={"labels": Labels(5)}, **settings)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)], ids=str)
def test_both_forms_have_the_same_value_and_derivatives(
    dtype: torch.dtype, tolerance: float, checkpointing: bool
) -> None:
    unet = build().to(dtype)
    unet.gradient_checkpointing = checkpointing
    plain, other = in_both_forms(lambda: results(unet, dtype))
    assert any(not torch.equal(*pair) for pair in zip(plain, other, strict=True)), "there is only one form"
    for expected, found in zip(plain, other, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def test_a_norm_is_accurate_where_the_mean_is_large() -> None:
    """The mean of squares minus the square of the mean would not be."""
    x = torch.randn(2, 64, 6, 6) + 3000
    exact = F.group_norm(x.double(), 16)
    [plain], [other] = in_both_forms(lambda: [GroupNorm(64)(x)])
    for found in (plain, other):
        assert (found - exact).norm() < 2e-3 * exact.norm()


@FORMATS
def test_group_norm_of_a_gpu_gets_contiguous_values_and_tangents(
    order: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = list[bool]()

    class Layouts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "native_group_norm" in str(func):
                tensors = [each for each in args[:2] if isinstance(each, Tensor) and each.ndim == 4]
                layouts.extend(each.is_contiguous() for each in tensors)
            return func(*args, **(kwargs or {}))

    norm, (x, direction) = pair("norm")[0], inputs(order)
    expected = jvp(norm, (x,), (direction,))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with Layouts():
        found = jvp(norm, (x,), (direction,))
    assert layouts == [True] * 3
    torch.testing.assert_close(found, expected)


def test_it_is_for_compiled_code_on_a_gpu_only() -> None:
    """The form for a GPU is chosen in compiled code on a GPU alone."""

    def choose(x: Tensor) -> Tensor:
        return x.flatten() if forward_mode.is_compiled_for_gpu(x) else x

    x = torch.zeros(1, 1)
    assert choose(x).ndim == torch.compile(choose, backend="eager")(x).ndim == 2
