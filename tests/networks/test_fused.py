"""The forms for compiled GPU code, against the others: here on a CPU, with the switch between them turned by hand."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp

from rectified_flow.condition import Labels
from rectified_flow.flows.flow import GPU_OPTIONS, Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks import fused
from rectified_flow.networks.forward_mode import Conv2d, GroupNorm
from rectified_flow.networks.unet import Attention, Unet
from rectified_flow.randomness import BatchRows, deterministic
from tests.networks.test_unet import inputs, small
from tests.patience import PATIENCE

LABELS = torch.tensor([0, 4, 2])
Compute = Callable[[], list[Tensor]]


def in_both_forms(compute: Compute) -> tuple[list[Tensor], list[Tensor]]:
    """What ``compute`` returns in the forms of eager code, and in those for a GPU."""
    plain = compute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "is_used", lambda _x: True)
        return plain, compute()


def results(unet: Unet, dtype: torch.dtype) -> list[Tensor]:
    """Value, forward-mode derivative, and the gradient of each parameter, under dropout."""
    x, t, r = (each.to(dtype) for each in inputs())
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


def test_both_forms_agree_in_bf16() -> None:
    unet = build()

    def value() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [unet(*inputs(), labels=LABELS)]

    unet.eval()
    exact = unet(*inputs(), labels=LABELS)
    for [found] in in_both_forms(value):
        assert (found - exact).norm() < 0.03 * exact.norm()


class Doubling(nn.Module):
    """A layer in the place of another, as an adapter is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def test_layers_that_were_replaced_or_hooked_are_called() -> None:
    unet = build().eval()
    block = unet.middle[0]

    def value() -> list[Tensor]:
        return [unet(*inputs(), labels=LABELS)]

    before = value()[0]
    attention = block.attention
    assert isinstance(attention, Attention)
    for name in ("norm1", "conv1", "modulation", "attention"):
        setattr(block, name, Doubling(getattr(block, name)))
    hooked: tuple[Any, ...] = (block.norm2, block.conv2, attention.qkv, attention.out)
    for layer in hooked:
        layer.register_forward_hook(lambda _layer, _inputs, output: output * 1.5)
        plain, other = in_both_forms(value)
        torch.testing.assert_close(other, plain, rtol=1e-3, atol=1e-4)
        assert (plain[0] - before).norm() > 1e-3 * before.norm()
        before = plain[0]


def test_a_norm_keeps_its_memory_format_and_precision() -> None:
    x = torch.randn(2, 64, 6, 6).to(torch.bfloat16, memory_format=torch.channels_last)
    [plain], [other] = in_both_forms(lambda: [GroupNorm(64)(x)])
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert other.dtype == plain.dtype == torch.bfloat16


def test_a_norm_is_accurate_where_the_mean_is_large() -> None:
    """The mean of squares minus the square of the mean would not be."""
    x = torch.randn(2, 64, 6, 6) + 3000
    exact = F.group_norm(x.double(), 16)
    [plain], [other] = in_both_forms(lambda: [GroupNorm(64)(x)])
    for found in (plain, other):
        assert (found - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("settings", [{}, {"stride": 2}, {"padding": 1}, {"groups": 2}, {"bias": False}], ids=str)
def test_a_convolution_of_pixels_has_the_value_of_any_other(settings: dict[str, Any]) -> None:
    layer, x = Conv2d(4, 6, 1, **settings), torch.randn(2, 4, 6, 6)
    plain, other = in_both_forms(lambda: [layer(x)])
    torch.testing.assert_close(other, plain)


def test_doubled_sides_are_those_of_interpolation() -> None:
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    doubled = fused.doubled(x)
    expected = F.interpolate(x, scale_factor=2.0, mode="nearest")
    weights = torch.randn_like(expected)
    assert torch.equal(doubled, expected)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x) for y in (doubled, expected)))


def test_they_are_for_compiled_code_on_a_gpu_only() -> None:
    """Where no GPU is, a device that has no contents either stands in for another one."""

    def choose(x: Tensor) -> Tensor:
        return x.flatten() if fused.is_used(x) else x

    x = torch.zeros(1, 1)
    assert choose(x).ndim == torch.compile(choose, backend="eager")(x).ndim == 2


@pytest.mark.slow
def test_forward_mode_passes_through_them_inside_a_compiled_loss() -> None:
    """After a pass with gradient whose values it reuses, as mean flow has it.

    In a process of its own, as a failure spoils later ones.
    """
    program = """
        import torch
        from torch.func import jvp
        from rectified_flow.networks import fused, tangents
        from rectified_flow.networks.unet import Block
        from rectified_flow.randomness import BatchRows, deterministic

        torch.manual_seed(0)
        block = Block(16, 32, condition_dim=8, heads=2, dropout=0.1, layer=1, resample=None)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        x, condition = torch.randn(3, 16, 8, 8), torch.randn(3, 8)

        def loss(x, condition):
            with tangents.keeping_values() as kept:
                u = block(x, condition)
            x, condition = x[:2].clone(), condition[:2].clone()
            with torch.no_grad(), tangents.reusing_values(kept, 2):
                _, du = jvp(block, (x, condition), (torch.ones_like(x), torch.ones_like(condition)))
            return (u[:2] + du).square().mean() + u.mean()

        def gradient(function):
            block.zero_grad()
            function(x, condition).backward()
            return torch.cat([p.grad.flatten() for p in block.parameters()])

        with deterministic(BatchRows(0, 0, 3, slice(None))):
            eager = gradient(loss)
            fused.is_used = lambda x: torch.compiler.is_compiling()
            compiled = gradient(torch.compile(loss, backend="aot_eager", fullgraph=True))
        print(float((compiled - eager).norm() / eager.norm()))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert run.returncode == 0, run.stderr
    assert 0 < float(run.stdout) < 1e-5, "equal to the last bit means: the same form"


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {}, {}),
        ("cuda", {}, {"options": GPU_OPTIONS}),
        ("cuda", {"options": {"combo_kernels": False}}, {"options": {**GPU_OPTIONS, "combo_kernels": False}}),
        ("cuda", {"mode": "max-autotune"}, {"mode": "max-autotune"}),
        ("cuda", {"backend": "eager"}, {"backend": "eager"}),
    ],
)
def test_a_flow_is_compiled_with_options_of_its_own_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found: dict[str, Any] = {}

    def note(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        found.update(settings)
        return function

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(Flow, "device", torch.device(device))
    RectifiedFlow(nn.Identity()).compile(**given)
    assert found == expected


def test_a_pytorch_that_lacks_an_option_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would raise."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **settings: given.update(settings) or function)
    monkeypatch.setattr(torch._inductor, "list_options", lambda: [*GPU_OPTIONS][1:])
    monkeypatch.setattr(Flow, "device", torch.device("cuda"))
    RectifiedFlow(nn.Identity()).compile()
    assert given == {"options": {}}


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["rectified flow", "improved mean flow"])
def test_the_kernels_of_a_step_compile_for_a_gpu(flow: str) -> None:
    """In a process of its own, since libraries remember the card that is pretended."""
    program = f"""
        import sys
        sys.path.insert(0, "benchmarks")
        from launches import Flags, compile_step
        from tests.pretended_card import compile_kernel, pretended_card

        SMALL = dict(image_size=16, dim_mults=(1,), blocks_per_level=1)
        graphs = compile_step("{flow}", Flags(dim=16, batch_size=8, **SMALL))
        assert len(graphs) == 2, "forward and backward"
        kernels = set().union(*(graph.kernels for graph in graphs))
        assert len(kernels) > 20
        with pretended_card():
            for kernel in kernels:
                compile_kernel(kernel)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert run.returncode == 0, run.stderr
