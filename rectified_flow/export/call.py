"""The network call of a flow, which an exported program computes, and its description for callers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rectified_flow.condition import LARGEST, WrittenCondition, chosen, written
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import grid_name, solver_name
from rectified_flow.registry import Document, describe
from rectified_flow.spaces.degradations import Degradation

UNKNOWN = "unknown"
MODEL_FILE, DECODER_FILE = "model.onnx", "decoder.onnx"


class NetworkCall(nn.Module):
    """The velocity of a :class:`RectifiedFlow`, or the average velocity of a :class:`FlowMap`, with averaged weights.

    The prediction of the network is converted to the velocity. Augmentation labels (:class:`AugmentationLabels
    <rectified_flow.condition.AugmentationLabels>`) are no inputs: they have the constant values of sampling. A source
    that is a condition is two inputs, its known pixels and the map of the unknown ones. Every other condition is an
    input under its own name.

    Args:
        flow: a flow of pixels, latents or measurements whose shape is known.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        conditions = chosen(flow.conditions)
        if not isinstance(flow, RectifiedFlow | FlowMap):
            raise UsageError(f"a {type(flow).__name__} cannot be exported: export a rectified flow or flow map")
        flow.space.medium.page()  # raises an error for data of another kind
        if others := conditions.keys() - written(conditions).keys() - {SOURCE}:
            raise UsageError(f"a flow with the condition {min(others)} cannot be exported: train without it")
        self.flow: RectifiedFlow | FlowMap = flow.eval().requires_grad_(False)
        self.is_map, self.shape = isinstance(flow, FlowMap), flow.space.shape or ()
        self.kinds = written(conditions)
        """Kinds of the inputs that are conditions, without a source."""
        self.takes_source = SOURCE in conditions and not flow.from_source
        """Whether the source is an input; a path that starts from it has it in ``x``."""
        inputs = {*self.kinds, SOURCE} if self.takes_source else {*self.kinds}
        self.constants = {name: each for name, each in flow.conditions.items() if name not in inputs}

    def example(self, count: int) -> dict[str, Tensor]:
        """Return example inputs by name for ``count`` rows.

        They are ``x`` float32 ``[b, c, h, w]``, ``t`` float32 ``[b]``, for a map the earlier time ``r`` float32
        ``[b]``, and, if the network takes them: labels int64 ``[b]``; numbers float32 ``[b]``; captions float32
        ``[b, 1 + tokens, size]``; the pixels of a ``source`` float32 ``[b, c, h, w]``, 0 where they are unknown, and
        ``unknown`` float32 ``[b, 1, h, w]``, 1 where they are unknown. Every third row has no condition.
        """
        generator = torch.Generator().manual_seed(count)
        inputs = {"x": torch.randn(count, *self.shape, generator=generator)}
        inputs["t"] = 0.1 + 0.9 * torch.rand(count, generator=generator)
        if self.is_map:
            inputs["r"] = inputs["t"] * torch.rand(count, generator=generator)
        inputs |= {name: _example_of(kind, count) for name, kind in self.kinds.items()}
        if self.takes_source:
            unknown = (torch.rand(count, 1, *self.shape[1:], generator=generator) < 0.5).float()
            pixels = 2 * torch.rand(count, *self.shape, generator=generator) - 1
            inputs |= {SOURCE: pixels * (1 - unknown), UNKNOWN: unknown}
        return inputs

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Return the velocity, or the average velocity over ``[r, t]``, float32 ``[b, c, h, w]``, for ``t`` above 0."""
        # len(x) would fix the batch size of the program
        values = {name: kind.none(x.shape[0], x.device) for name, kind in self.constants.items()} | conditions
        if self.takes_source:
            values[SOURCE] = torch.cat((values[SOURCE], values.pop(UNKNOWN)), dim=1)  # see condition.with_map
        if isinstance(self.flow, FlowMap):
            return self.flow.average_velocity(x, t, t if r is None else r, **values)
        return self.flow.exact_velocity(x, t, **values)


def _example_of(kind: WrittenCondition, count: int) -> Tensor:
    """Return values of a condition as a program takes them: "none" is a number of ``LARGEST``, and not NaN."""
    values, texts = kind.none(count, torch.device("cpu")), kind.examples
    for row in range(count if texts else 0):
        if row % 3 < 2:
            values[row] = kind.parse([texts[row % len(texts)]])[0]
    return values.nan_to_num(LARGEST)


def model_json(
    call: NetworkCall, degradation: Degradation | None = None, reading: Mapping[str, object] | None = None
) -> Document:
    """Return the contents of ``model.json``: the inputs and output of the program, and the settings of sampling.

    Args:
        call: the program.
        degradation: the degradation that made the sources of the training, if one did.
        reading: how the training read pictures, see :func:`reading_of`.
    """
    flow, framing = call.flow, {"pad": False, "resize": "lanczos", **(reading or {})}
    return {
        "file": MODEL_FILE,
        "kind": "map" if call.is_map else "rectified",
        "inputs": {
            name: {"type": str(value.dtype).removeprefix("torch."), "shape": ["b", *value.shape[1:]]}
            for name, value in call.example(1).items()
        },
        "output": "average velocity" if call.is_map else "velocity",
        "channels": call.shape[0],
        "range": [-1, 1],
        "fields": flow.space.medium.page() or None,
        "decoder": {"file": DECODER_FILE, "shape": [*flow.space.medium.picture_shape]}
        if flow.space.medium.decoders()
        else None,
        "conditions": [{"name": name} | kind.exported() for name, kind in call.kinds.items()],
        "steps": flow.default_steps,
        "solver": solver_name(flow, {}),
        "time_grid": grid_name(flow, {}),
        "guidance": flow.default_guidance,
        "source": {
            "as": "start" if flow.from_source else "condition",
            "noise": flow.source_noise,
            "degradation": None if degradation is None else describe(degradation),
            "paints": degradation is not None and degradation.leaves_holes,
        }
        if flow.takes_source
        else None,
        "framing": {name: framing[name] for name in ("pad", "resize")},
    }
