"""Tests of joining the processes of a launch on GPUs that the installed torch does not support."""

from types import SimpleNamespace

import pytest
import torch

from rectified_flow import distributed
from rectified_flow.distributed import join_processes
from rectified_flow.errors import UsageError

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"]


@pytest.mark.parametrize(
    ("capability", "kernels", "has_kernels"),
    [
        ((6, 1), WHEEL, False),
        ((7, 0), WHEEL, False),
        ((7, 5), WHEEL, True),
        ((8, 9), WHEEL, True),
        ((9, 0), WHEEL, True),
        ((12, 0), WHEEL[:-1], False),
        ((12, 0), [*WHEEL[:-1], "compute_90"], True),
        ((6, 1), ["sm_75", "compute_75"], False),
        ((6, 1), [], True),  # unknown
    ],
)
def test_a_gpu_without_kernels_is_refused(
    capability: tuple[int, int], kernels: list[str], has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(num_processes=1, device=torch.device("cuda", 0))
    monkeypatch.setattr(distributed, "PartialState", lambda **_: state)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla P100")
    if has_kernels:
        assert join_processes() is state
    else:
        with pytest.raises(UsageError, match=r"no kernels for the Tesla P100 \(sm_\d+\): install .* ACCELERATE"):
            join_processes()
