"""One network call of a flow as a module of fixed inputs and one output, and its description."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rectified_flow.condition import LARGEST, Condition, Labels, Number, Picture, chosen
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import solver_name
from rectified_flow.networks.captions import BagOfWords, Caption, PretrainedTextEncoder
from rectified_flow.registry import describe as describe_part
from rectified_flow.spaces.degradations import Mask
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.pixels import Pixels

Format = Literal["onnx", "torch", "page"]
FILES: dict[Format, str] = {"onnx": "model.onnx", "page": "model.onnx", "torch": "model.pt2"}
"""Name of the program's file by format."""
INPUT_KINDS = (Labels, Number, Caption)
"""Kinds of the conditions that are inputs of a program under their own names."""
UNKNOWN = "unknown"
TEXT_FILE, TOKENIZER_FILE = "text_encoder.onnx", "tokenizer.json"


class NetworkCall(nn.Module):
    """The velocity of a :class:`RectifiedFlow`, or the average velocity of a :class:`FlowMap`, with averaged weights.

    The prediction of the network is converted to the velocity. Augmentation labels (:class:`AugmentationLabels
    <rectified_flow.condition.AugmentationLabels>`) are no inputs: they have the constant values of sampling. A source
    that is a condition is two inputs, its known pixels and the map of the unknown ones. Every other condition is an
    input under its own name.

    Args:
        flow: a flow of pixels or fields whose shape is known.

    Raises:
        UsageError: if the flow is of another kind, of other data, or takes conditions of other kinds than
            ``INPUT_KINDS`` and a source.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        kind, space, conditions = type(flow).__name__, flow.space, chosen(flow.conditions)
        if not isinstance(flow, RectifiedFlow | FlowMap):
            raise UsageError(f"--checkpoint has a {kind}: only a rectified flow or a flow map can be exported")
        if not isinstance(space, Pixels | Fields) or space.shape is None:
            raise UsageError(
                f"--checkpoint has a flow of {type(space).__name__.lower()}: only pixels and fields can be exported"
            )
        for name, each in conditions.items():
            if not isinstance(each, Picture if name == SOURCE else INPUT_KINDS) or name == UNKNOWN:
                raise UsageError(
                    f"--checkpoint has a network with the condition {name}, a {type(each).__name__}: only labels, "
                    "numbers, captions and a source can be exported"
                )
        self.flow: RectifiedFlow | FlowMap = flow.eval().requires_grad_(False)
        self.is_map, self.shape, self.in_half = isinstance(flow, FlowMap), space.shape, False
        self.kinds = {name: each for name, each in conditions.items() if name != SOURCE}
        """Kinds of the inputs that are conditions, without a source."""
        self.takes_source = SOURCE in conditions and not flow.from_source
        """Whether the source is an input; a path that starts from it has it in ``x``."""
        inputs = {*self.kinds, SOURCE} if self.takes_source else {*self.kinds}
        self.constants = {name: each for name, each in flow.conditions.items() if name not in inputs}

    def keep_in_half(self) -> None:
        """Store matrices and convolutions in float16. Vectors stay in float32, and so does the computation."""
        self.in_half = True
        for module in list(self.flow.network.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.ndim > 1:
                    parameter.data = parameter.data.half()
                    # unsafe: the stored parameter and the parameter that is read differ in type
                    parametrize.register_parametrization(module, name, _Widened(), unsafe=True)

    def example(self, count: int) -> dict[str, Tensor]:
        """Return random inputs by name for ``count`` rows.

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
        inputs |= {name: _example_of(kind, count, generator) for name, kind in self.kinds.items()}
        if self.takes_source:
            unknown = (torch.rand(count, 1, *self.shape[1:], generator=generator) < 0.5).float()
            pixels = 2 * torch.rand(count, *self.shape, generator=generator) - 1
            inputs |= {SOURCE: pixels * (1 - unknown), UNKNOWN: unknown}
        return inputs

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None, **conditions: Tensor) -> Tensor:
        """Return the velocity, or the average velocity over ``[r, t]``, float32 ``[b, c, h, w]``, for ``t`` above 0."""
        # len(x) would fix the batch size in a program of torch.export
        values = {name: kind.none(x.shape[0], x.device) for name, kind in self.constants.items()} | conditions
        if self.takes_source:
            values[SOURCE] = torch.cat((values[SOURCE], values.pop(UNKNOWN)), dim=1)  # see condition.with_map
        if isinstance(self.flow, FlowMap):
            return self.flow.average_velocity(x, t, t if r is None else r, **values)
        return self.flow.exact_velocity(x, t, **values)


def _example_of(kind: Condition, count: int, generator: torch.Generator) -> Tensor:
    """Return random values of a condition as a program takes them: "none" is a number of ``LARGEST``, and not NaN."""
    given = torch.arange(count) % 3 < 2
    if isinstance(kind, Labels):
        labels = torch.randint(kind.num_classes, (count,), generator=generator)
        return torch.where(given, labels, kind.num_classes)
    if isinstance(kind, Number):
        low, high = kind.quantiles[0], kind.quantiles[-1]
        return torch.where(given, low + (high - low) * torch.rand(count, generator=generator), LARGEST)
    none = kind.none(count, torch.device("cpu"))
    values = torch.nn.functional.normalize(torch.randn(none.shape, generator=generator), dim=2)
    values[::2, 1 + values.shape[1] // 2 :] = LARGEST  # padding
    return torch.where(given[:, None, None], values, LARGEST)


class _Widened(nn.Module):
    """A parameter that is kept in float16 and read in float32."""

    def forward(self, kept: Tensor) -> Tensor:
        return kept.float()


def describe(call: NetworkCall, form: Format) -> dict[str, Any]:
    """Return the contents of ``model.json``: the inputs and output of the program, and the settings of sampling."""
    flow, labels = call.flow, call.kinds.get("labels")
    return {
        "file": FILES[form],
        "kind": "map" if call.is_map else "rectified",
        "inputs": {
            name: {"type": str(value.dtype).removeprefix("torch."), "shape": ["b", *value.shape[1:]]}
            for name, value in call.example(1).items()
        },
        "output": "average velocity" if call.is_map else "velocity",
        "half": call.in_half,
        "channels": call.shape[0],
        "range": [-1, 1],
        "fields": _describe_fields(flow.space) if isinstance(flow.space, Fields) else None,
        "classes": flow.class_names,
        "no_label": labels.num_classes if isinstance(labels, Labels) else None,
        "conditions": [{"name": name} | _describe_condition(kind, form) for name, kind in call.kinds.items()],
        "steps": flow.default_steps,
        "solver": solver_name(flow, {}),
        "guidance": getattr(flow, "default_guidance", 1.0),
        "velocity_at_data": getattr(flow, "prediction", None) != "clean",
        "source": {
            "as": "start" if flow.from_source else "condition",
            "noise": flow.source_noise,
            "degradation": None if flow.degradation is None else describe_part(flow.degradation),
            "paints": isinstance(flow.degradation, Mask),
        }
        if flow.takes_source
        else None,
    }


def _describe_fields(space: Fields) -> dict[str, Any]:
    """Return what a caller needs to convert the output to physical units, and how the page shows it."""
    legend = space.legend
    return {
        "low": list(space.low),
        "high": list(space.high),
        "transform": describe_part(space.transform),
        "files": space.files,
        "shown": space.shown,
        "colours": None if legend is None else legend.colours.tolist(),
        "ends": None if legend is None else [legend.least, legend.greatest],
    }


def _describe_condition(kind: Condition, form: Format) -> dict[str, Any]:
    """Return what a caller needs to know to choose values of a condition."""
    if isinstance(kind, Labels):
        names = list(kind.names) or [str(label) for label in range(kind.num_classes)]
        return {"kind": "label", "names": names, "none": kind.num_classes}
    if isinstance(kind, Number):
        return {"kind": "number", "quantiles": list(kind.quantiles)}
    assert isinstance(kind, Caption)
    encoder: dict[str, Any] | None = None
    if isinstance(kind.encoder, BagOfWords):
        encoder = {"kind": "words", "words": list(kind.encoder.words)}
    elif isinstance(kind.encoder, PretrainedTextEncoder) and form != "torch":
        files = {"file": TEXT_FILE, "tokenizer": TOKENIZER_FILE}
        encoder = {"kind": "program", **files, "most_tokens": kind.encoder.most_tokens, "pools": kind.encoder.pools}
    sizes = {"size": kind.size, "tokens": kind.tokens}
    return {"kind": "caption", **sizes, "examples": list(kind.examples), "encoder": encoder}
