"""The options with which a flow is compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rectified_flow.flows.flow import GPU_OPTIONS, Flow
from rectified_flow.flows.rectified import RectifiedFlow


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cpu", {}, {}),
        ("cuda", {}, {"options": GPU_OPTIONS}),
        ("cuda", {"options": {"combo_kernels": False}}, {"options": {"combo_kernels": False}}),
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


def test_a_pytorch_that_lacks_an_option_gets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would raise."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda function, **settings: given.update(settings) or function)
    monkeypatch.setattr(torch._inductor, "list_options", lambda: [*GPU_OPTIONS][1:])
    monkeypatch.setattr(Flow, "device", torch.device("cuda"))
    RectifiedFlow(nn.Identity()).compile()
    assert given["options"].keys() == {*[*GPU_OPTIONS][1:]}
