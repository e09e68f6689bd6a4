"""One network call of a flow as a module of fixed inputs and one output, which compilers and other software take."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.conditions import Labels, chosen
from rectified_flow.spaces.pixels import Pixels

Kind = Literal["rectified", "map"]


class NetworkCall(nn.Module):
    """The velocity of a :class:`RectifiedFlow`, or the average velocity of a :class:`FlowMap`, with averaged weights.

    What the network predicts is turned into the velocity inside. Conditions that are told (:class:`Told
    <rectified_flow.networks.conditions.Told>`) are no inputs: they are those of sampling.

    Args:
        flow: of pixels whose shape is known.

    Raises:
        UsageError: if the flow is of another kind, of other data, or takes conditions other than labels.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        if not isinstance(flow, RectifiedFlow | FlowMap):
            raise UsageError(
                f"a {type(flow).__name__} has no network call to export, only a rectified flow or a flow map"
            )
        if not isinstance(flow.space, Pixels) or flow.space.shape is None:
            raise UsageError(
                f"the flow is of {type(flow.space).__name__.lower()}: only flows of pixels can be exported"
            )
        others = [name for name, kind in chosen(flow.conditions).items() if not isinstance(kind, Labels)]
        if others or chosen(flow.conditions).keys() - {"labels"}:
            raise UsageError(f"the network takes {', '.join(chosen(flow.conditions))}: only labels can be exported")
        self.flow: RectifiedFlow | FlowMap = flow.eval().requires_grad_(False)
        self.kind: Kind = "map" if isinstance(flow, FlowMap) else "rectified"
        self.shape = flow.space.shape
        self.labels = flow.conditions.get("labels")
        self.told = {name: kind for name, kind in flow.conditions.items() if name != "labels"}

    def keep_in_half(self) -> None:
        """Keep matrices and convolutions in float16; vectors stay, and all is computed in float32."""
        for module in list(self.flow.network.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.ndim > 1:
                    parameter.data = parameter.data.half()
                    # unsafe: what is kept has another type than what is read
                    parametrize.register_parametrization(module, name, _Widened(), unsafe=True)

    def example(self, count: int) -> dict[str, Tensor]:
        """Inputs by name for ``count`` rows, drawn from a generator of their own.

        They are ``x`` float32 ``[b, c, h, w]``, ``t`` float32 ``[b]``, for a map the earlier time ``r`` float32
        ``[b]``, and, if the network takes them, ``labels`` int64 ``[b]``.
        """
        generator = torch.Generator().manual_seed(count)
        inputs = {"x": torch.randn(count, *self.shape, generator=generator)}
        inputs["t"] = 0.1 + 0.9 * torch.rand(count, generator=generator)
        if self.kind == "map":
            inputs["r"] = inputs["t"] * torch.rand(count, generator=generator)
        if isinstance(self.labels, Labels):
            inputs["labels"] = torch.randint(self.labels.num_classes + 1, (count,), generator=generator)
        return inputs

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The velocity, or the average velocity over ``[r, t]``, float32 ``[b, c, h, w]``, for any ``t`` but 0."""
        # len(x) would fix the batch size in a program of torch.export
        values = {name: kind.none(x.shape[0], x.device) for name, kind in self.told.items()}
        if labels is not None:
            values["labels"] = labels
        if isinstance(self.flow, FlowMap):
            return self.flow.average_velocity(x, t, t if r is None else r, **values)
        return self.flow.exact_velocity(x, t, **values)


class _Widened(nn.Module):
    """A parameter that is kept in float16 and read in float32."""

    def forward(self, kept: Tensor) -> Tensor:
        return kept.float()
