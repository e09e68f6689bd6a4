"""Tests of invalid arguments of ``sample``: each is refused with an error message."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import Labels, Number
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.spaces.pixels import Pixels
from tests.tiny_flows import unet, unet_with

PICTURES = torch.zeros(2, 3, 8, 8)
START, MASK = {"start": PICTURES}, torch.ones(2, 1, 8, 8).bool()


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"steps": 0}, "`steps` is 0; it must be greater than 0"),
        ({"grid": "even"}, "`grid` is even; it must be 'uniform'"),
        ({"strength": 0.5}, "`strength` needs `start`"),
        ({"start": PICTURES, "strength": 2.0}, "`strength` is 2.0; it must be less than"),
        ({"start": PICTURES[:, :1]}, r"`start` \(2, 1, 8, 8\) becomes \(2, 1, 8, 8\), and x is \(2, 3, 8, 8\): pass"),
        ({"start": PICTURES[0]}, r"`start` \(3, 8, 8\) becomes"),
        ({"mask": torch.ones(2, 1, 8, 8).bool()}, "`mask` needs `start`"),
        ({"labels": [0, 1]}, r"`labels` is \[0, 1\]; it must be an instance of Tensor"),
        (
            {"sovler": "euler"},
            "`sovler` is neither an argument of .*Flow.sample nor a condition of the network: leave",
        ),
        ({"noise": PICTURES, "labels": torch.zeros(3).long()}, "`noise` has 2 rows, `labels` has 3 rows: pass tensors"),
        ({"start": PICTURES, "noise": PICTURES[:1]}, "`start` has 2 rows, `noise` has 1 row: pass tensors"),
        ({"mask": MASK.float(), **START}, r"`mask` is torch.float32 \(2, 1, 8, 8\): pass torch.bool \(2, 1, 8, 8\)"),
        ({"mask": MASK[..., ::2], **START}, r"`mask` is torch.bool \(2, 1, 8, 4\): pass torch.bool \(2, 1, 8, 8\)"),
        ({"mask": MASK.repeat(3, 1, 1, 1), **START}, r"`mask` is torch.bool \(6, 1, 8, 8\): pass torch.bool \(2, 1,"),
        ({"labels": 1}, "`labels` is 1; it must be an instance of Tensor"),
        ({"labels": torch.tensor([0, 7])}, "labels reach 7, and `Labels"),
    ],
)
def test_a_request_without_meaning_is_refused(kind: type[Flow], request_: dict[str, Any], sentence: str) -> None:
    flow = kind(unet(), space=Pixels((3, 8, 8)))
    with pytest.raises(UsageError, match=sentence):
        flow.sample(2, **request_)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_a_flow_from_sources_needs_a_source(kind: type[Flow]) -> None:
    flow = kind(unet(), space=Pixels((3, 8, 8)), from_source=True)
    with pytest.raises(UsageError, match="the flow translates data: pass `source`"):
        flow.sample(2)


def test_a_solver_or_guidance_without_meaning_is_refused() -> None:
    flow = RectifiedFlow(unet(), space=Pixels((3, 8, 8)))
    with pytest.raises(UsageError, match="`solver` is rk4; it must be 'euler', "):
        flow.sample(2, solver="rk4")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`guidance` is 2; it must be an instance of Guidance"):
        flow.sample(2, guidance=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"`scales` of Guidance has label, which is not a condition .*: pass labels"):
        flow.sample(2, guidance=Guidance(scales={"label": 2}))
    with pytest.raises(UsageError, match=r"`guidance` is neither an argument of MeanFlow\.sample"):
        MeanFlow(unet(), space=Pixels((3, 8, 8))).sample(2, guidance=Guidance(2))
    with pytest.raises(UsageError, match="is not finite"):
        Guidance(float("nan"))
    with pytest.raises(UsageError, match="`autoguidance` needs `earlier`"):
        Guidance(2, autoguidance=1.5)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
@pytest.mark.parametrize("name", ["steps", "start", "mask", "count"])
def test_a_condition_that_could_not_be_chosen_is_refused(kind: type[Flow], name: str) -> None:
    with pytest.raises(UsageError, match=f"the condition {name} has the name of an argument of sample: rename it"):
        kind(unet_with((), **{name: Labels(3)}))
    assert (
        kind(unet_with((), conditions=Labels(3))).sample(2, noise=PICTURES, conditions=torch.tensor([0, 1])).shape[0]
        == 2
    )


class WithoutInterval(nn.Module):
    """A network that would get ``r`` among its conditions."""

    def forward(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("kind", [MeanFlow, DistilledFlow])
def test_a_flow_map_needs_a_network_that_takes_an_interval(kind: type[Flow]) -> None:
    with pytest.raises(UsageError, match="`network` WithoutInterval has no input r, the end of an interval, which"):
        kind(WithoutInterval())


class Named(RectifiedFlow):
    """A flow of one's own that names a condition in ``sample``."""

    def sample(self, count: int = 1, *, labels: Tensor | None = None, **options: Any) -> Tensor:
        given: dict[str, Any] = {} if labels is None else {"labels": labels}
        return super().sample(count, **given, **options)


def test_a_flow_of_ones_own_may_name_its_conditions() -> None:
    flow = Named(unet_with((), labels=Labels(3)), space=Pixels((3, 8, 8)))
    assert flow.sample(labels=torch.tensor([1, 2]), steps=1).shape == (2, 3, 8, 8)


def test_a_wrapper_of_a_network_hands_on_the_end_of_the_interval() -> None:
    assert MeanFlow(nn.DataParallel(unet()), space=Pixels((3, 8, 8))).sample(2).shape == (2, 3, 8, 8)


def test_arrays_stand_for_sequences() -> None:
    assert Number(np.linspace(0, 1, 3)).quantiles[1] == 0.5  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`shape` is"):
        Pixels(np.array(["a"]))  # type: ignore[arg-type]
