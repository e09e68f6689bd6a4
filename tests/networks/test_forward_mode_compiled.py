"""Tests of the form of a norm in code compiled for a GPU against the eager form, both on a CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

from rectified_flow.condition import Labels
from rectified_flow.networks import forward_mode
from rectified_flow.networks.forward_mode import GroupNorm
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from tests.networks.test_unet import inputs, small

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


def test_a_norm_is_accurate_where_the_mean_is_large() -> None:
    """The mean of squares minus the square of the mean would not be."""
    x = torch.randn(2, 64, 6, 6) + 3000
    exact = F.group_norm(x.double(), 16)
    [plain], [other] = in_both_forms(lambda: [GroupNorm(64)(x)])
    for found in (plain, other):
        assert (found - exact).norm() < 2e-3 * exact.norm()


def test_it_is_for_compiled_code_on_a_gpu_only() -> None:
    """The form for a GPU is chosen in compiled code on a GPU alone."""

    def choose(x: Tensor) -> Tensor:
        return x.flatten() if forward_mode.is_compiled_for_gpu(x) else x

    x = torch.zeros(1, 1)
    assert choose(x).ndim == torch.compile(choose, backend="eager")(x).ndim == 2
