"""One network call of a flow as a module of fixed inputs and one output, which compilers and other software take."""

import json
import logging
import lzma
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils import parametrize

from rectified_flow.cli.flags.sampling import ExportConfig
from rectified_flow.condition import Labels, Picture, chosen
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import read_trained, solver_name
from rectified_flow.registry import describe as describe_part
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import is_run
from rectified_flow.spaces.degradations import Downsample, Grey, Mask
from rectified_flow.spaces.pixels import RGB, Pixels
from rectified_flow.system.files import prepare_folder, replace_file, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.terminal import lines


class NetworkCall(nn.Module):
    """The velocity of a :class:`RectifiedFlow`, or the average velocity of a :class:`FlowMap`, with averaged weights.

    The prediction of the network is converted to the velocity. Augmentation labels (:class:`AugmentationLabels
    <rectified_flow.condition.AugmentationLabels>`) are no inputs: they have the constant values of sampling. A source
    that is a condition is two inputs, its known pixels and the map of the unknown ones.

    Args:
        flow: a flow of pixels whose shape is known.

    Raises:
        UsageError: if the flow is of another kind, of other data, or takes conditions other than labels and a source.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        kind, space, conditions = type(flow).__name__, flow.space, chosen(flow.conditions)
        if not isinstance(flow, RectifiedFlow | FlowMap):
            raise UsageError(f"--checkpoint has a {kind}: only a rectified flow or a flow map can be exported")
        if not isinstance(space, Pixels) or space.shape is None:
            raise UsageError(f"--checkpoint has a flow of {type(space).__name__.lower()}: only pixels can be exported")
        if any(not isinstance(each, INPUT_KINDS.get(name, ())) for name, each in conditions.items()):
            raise UsageError(
                f"--checkpoint has a network with {', '.join(conditions)}: only labels and a source can be exported"
            )
        self.flow: RectifiedFlow | FlowMap = flow.eval().requires_grad_(False)
        self.is_map, self.shape, self.in_half = isinstance(flow, FlowMap), space.shape, False
        self.labels = conditions.get("labels")
        self.takes_source = SOURCE in conditions and not flow.from_source
        """Whether the source is an input; a path that starts from it has it in ``x``."""
        inputs = {"labels", SOURCE} if self.takes_source else {"labels"}
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
        ``[b]``, and, if the network takes them, ``labels`` int64 ``[b]``, the pixels of a ``source`` float32
        ``[b, c, h, w]``, 0 where they are unknown, and ``unknown`` float32 ``[b, 1, h, w]``, 1 where they are unknown.
        """
        generator = torch.Generator().manual_seed(count)
        inputs = {"x": torch.randn(count, *self.shape, generator=generator)}
        inputs["t"] = 0.1 + 0.9 * torch.rand(count, generator=generator)
        if self.is_map:
            inputs["r"] = inputs["t"] * torch.rand(count, generator=generator)
        if isinstance(self.labels, Labels):
            inputs["labels"] = torch.randint(self.labels.num_classes + 1, (count,), generator=generator)
        if self.takes_source:
            unknown = (torch.rand(count, 1, *self.shape[1:], generator=generator) < 0.5).float()
            pixels = 2 * torch.rand(count, *self.shape, generator=generator) - 1
            inputs |= {SOURCE: pixels * (1 - unknown), "unknown": unknown}
        return inputs

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        r: Tensor | None = None,
        labels: Tensor | None = None,
        source: Tensor | None = None,
        unknown: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity, or the average velocity over ``[r, t]``, float32 ``[b, c, h, w]``, for ``t`` above 0."""
        # len(x) would fix the batch size in a program of torch.export
        values = {name: kind.none(x.shape[0], x.device) for name, kind in self.constants.items()}
        if labels is not None:
            values["labels"] = labels
        if source is not None and unknown is not None:
            values[SOURCE] = torch.cat((source, unknown), dim=1)  # see rectified_flow.condition.with_map
        if isinstance(self.flow, FlowMap):
            return self.flow.average_velocity(x, t, t if r is None else r, **values)
        return self.flow.exact_velocity(x, t, **values)


class _Widened(nn.Module):
    """A parameter that is kept in float16 and read in float32."""

    def forward(self, kept: Tensor) -> Tensor:
        return kept.float()


Format = Literal["onnx", "torch", "page"]
Program = Callable[[dict[str, Tensor]], Tensor]
FILES: dict[Format, str] = {"onnx": "model.onnx", "page": "model.onnx", "torch": "model.pt2"}
PAGE_FILES = Path(__file__).resolve().parent.parent / "page"
CHECKED_BATCHES = (1, 3)
ON_PAGE = (Downsample, Grey)
"""Projections that the page applies to a picture."""
INPUT_KINDS: dict[str, type] = {"labels": Labels, SOURCE: Picture}
"""Names and kinds of the conditions that are inputs of a program."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Greatest difference of program and flow, relative to the greatest number that the flow returns."""


def export(config: ExportConfig) -> None:
    """Write the program of a checkpoint and its description.

    Raises:
        UsageError: if the checkpoint does not exist, or its flow cannot be exported.
        RunError: if the program differs from the flow, or cannot be written.
    """
    flags = config.model
    trained = checkpoint.read(flags.checkpoint, read_trained)
    call = NetworkCall(trained.flow)
    channels = call.shape[0]
    if flags.format == "page" and channels not in (1, RGB):
        raise UsageError(f"--format page supports grey and RGB pictures, not {channels} channels: pass --format onnx")
    degradation = trained.flow.degradation
    if flags.format == "page" and degradation and degradation.is_projection and type(degradation) not in ON_PAGE:
        kind = type(degradation).__name__
        raise UsageError(f"--format page cannot apply {kind} to the visitor's picture: pass --format onnx")
    folder = prepare_folder("output_dir", flags.output_dir or trained.run_folder / "exported")
    page = [each.name for each in PAGE_FILES.iterdir()] if flags.format == "page" else []
    ours = is_run(folder if flags.output_dir else trained.run_folder)
    claim(folder, [FILES[flags.format], "model.json", *page], ours=ours)
    expected = {count: call(**call.example(count)) for count in CHECKED_BATCHES}
    if flags.half:
        call.keep_in_half()
    content, description = _serialise(call, flags.format), describe(call, flags.format)
    difference = _check(_load(content, flags.format), call, expected)
    program = folder / FILES[flags.format]
    with writing(f"the exported program in --output_dir {folder}"):
        replace_file(program, content)
        replace_file(folder / "model.json", json.dumps(description, indent=1) + "\n")
        if flags.format == "page":
            write_page(folder)
    inputs = [f"{name} {each['type']} {each['shape']}".replace("'", "") for name, each in description["inputs"].items()]
    texts: dict[str, object] = {
        "model": trained,
        "program": f"{program}, {len(content) / 1e6:.1f} MB",
        "inputs": ", ".join(inputs),
        "output": description["output"],
        "difference": f"at most {difference:.1e} of the greatest output, batches of 1 and 3",
    }
    if flags.format == "page":
        texts["page"] = f"{folder / 'index.html'}, to be served: python -m http.server --directory {folder}"
    print(lines(texts))


def write_page(folder: Path) -> None:
    """Copy the page into ``folder``, beside the program and its description, and unpack the ONNX runtime there."""
    for file in PAGE_FILES.rglob("*"):
        if file.is_file():
            target, content = folder / file.relative_to(PAGE_FILES), file.read_bytes()
            if file.suffix == ".xz":
                target, content = target.with_suffix(""), lzma.decompress(content)
            target.parent.mkdir(exist_ok=True)
            replace_file(target, content)


def describe(call: NetworkCall, form: Format) -> dict[str, Any]:
    """Return the contents of ``model.json``: the inputs and output of the program, and the settings of sampling."""
    flow = call.flow
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
        "classes": flow.class_names,
        "no_label": call.labels.num_classes if isinstance(call.labels, Labels) else None,
        "steps": flow.default_steps,
        "solver": solver_name(flow, {}),
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


def _serialise(call: NetworkCall, form: Format) -> bytes:
    """Return the program, with a dynamic batch size."""
    if form != "torch":  # named here if they are missing, before the work
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401

    inputs, batch = call.example(2), Dim("batch")
    program = torch.export.export(call, (), inputs, dynamic_shapes={name: {0: batch} for name in inputs})
    if form == "torch":
        written = BytesIO()
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)  # has paths of this machine
        torch.export.save(program, written)
        return written.getvalue()
    from onnx import TensorProto, helper, numpy_helper

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    exported: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    model = exported.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")  # stack traces, several times as large as a small network
    # The exporter has folded the casts of matrices and convolutions to float32, so they get casts anew.
    for weight in graph.initializer if call.in_half else ():
        if weight.data_type == TensorProto.FLOAT and len(weight.dims) > 1:
            name, values = weight.name, numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(values, f"{name}_half"))
            graph.node.insert(0, helper.make_node("Cast", [weight.name], [name], to=TensorProto.FLOAT))
    return bytes(model.SerializeToString())


def _load(content: bytes, form: Format) -> Program:
    if form == "torch":
        module = torch.export.load(BytesIO(content)).module()
        return lambda inputs: module(**inputs)
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


@torch.no_grad()
def _check(program: Program, call: NetworkCall, expected: Mapping[int, Tensor]) -> float:
    """Return the largest difference between the program and the flow, relative to the largest output of the flow.

    Raises:
        RunError: if the difference is above the tolerance or not a number.
    """
    tolerance = HALF_TOLERANCE if call.in_half else TOLERANCE
    differences = [
        (program(call.example(count)) - outputs).abs().max() / outputs.abs().max().clamp(min=1e-6)
        for count, outputs in expected.items()
    ]
    greatest = float(torch.stack(differences).max())
    if not greatest <= tolerance:
        remedy = "leave out --half" if call.in_half else "pass another --format"
        raise RunError(f"the program differs from the flow by {greatest:.2g}, more than {tolerance:g}: {remedy}")
    return greatest
