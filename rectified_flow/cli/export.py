"""One network call of a flow as a module of fixed inputs and one output, which compilers and other software take."""

import json
import logging
import lzma
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import parametrize

from rectified_flow.cli.run_flags import ExportConfig
from rectified_flow.condition import Labels, chosen
from rectified_flow.errors import RunError, UsageError, require
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import Trained, read_trained, solver_name
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.pixels import RGB, Pixels
from rectified_flow.system.files import prepare_folder, replace_file
from rectified_flow.system.terminal import lines

if TYPE_CHECKING:
    from onnx import ModelProto


Kind = Literal["rectified", "map"]


class NetworkCall(nn.Module):
    """The velocity of a :class:`RectifiedFlow`, or the average velocity of a :class:`FlowMap`, with averaged weights.

    What the network predicts is turned into the velocity inside. Conditions that are told (:class:`AugmentationLabels
    <rectified_flow.condition.AugmentationLabels>`) are no inputs: they are those of sampling.

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
        """Return random inputs by name for ``count`` rows.

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
        """Return the velocity, or the average velocity over ``[r, t]``, float32 ``[b, c, h, w]``, for ``t`` above 0."""
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


Format = Literal["onnx", "torch", "page"]
Inputs = dict[str, Tensor]
Program = Callable[[Inputs], Tensor]
FILES: dict[Format, str] = {"onnx": "model.onnx", "page": "model.onnx", "torch": "model.pt2"}
DESCRIPTION = "model.json"
PAGE = "index.html"
PAGE_FILES = Path(__file__).resolve().parent.parent / "page"
PACKED = ".xz"
GREY = 1
CHECKED_BATCHES = (1, 3)
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Greatest difference of program and flow, relative to the greatest number that the flow returns."""
LARGEST_ONNX = 2**31
"""Bytes of an ONNX file: those of a protocol buffer."""


def export(config: ExportConfig) -> None:
    """Write the program of a checkpoint and its description.

    Raises:
        UsageError: if the checkpoint does not exist, or its flow cannot be exported.
        RunError: if the program differs from the flow, or cannot be written.
    """
    flags = config.model
    trained = checkpoint.read(flags.checkpoint, read_trained)
    flow, source = trained.flow, trained.source
    call = _network_call(flow, source)
    require(
        flags.format != "page" or call.shape[0] in (GREY, RGB),
        f"--format page shows grey and RGB pictures, and those of {source} have {call.shape[0]} channels: "
        "pass --format onnx",
    )
    folder = prepare_folder("output_dir", flags.output_dir or trained.run_folder / "exported")
    expected = {count: call(**call.example(count)) for count in CHECKED_BATCHES}
    if flags.half:
        call.keep_in_half()
    content = _serialise(call, flags.format, half=flags.half)
    difference = _check(_load(content, flags.format), call, expected, HALF_TOLERANCE if flags.half else TOLERANCE)
    description = describe(flow, call, flags.format, half=flags.half)
    try:
        replace_file(folder / FILES[flags.format], content)
        replace_file(folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")
        if flags.format == "page":
            write_page(folder)
    except OSError as error:
        raise RunError(f"could not write the program into --output_dir {folder} ({error})") from error
    print(_report(trained, folder, flags.format, description, len(content), difference))


def write_page(folder: Path) -> None:
    """Copy the page into ``folder``, beside the program and its description, and unpack the ONNX runtime there."""
    for file in sorted(PAGE_FILES.rglob("*")):
        if file.is_file():
            target = folder / file.relative_to(PAGE_FILES)
            target.parent.mkdir(exist_ok=True)
            if file.suffix == PACKED:
                replace_file(target.with_suffix(""), lzma.decompress(file.read_bytes()))
            else:
                replace_file(target, file.read_bytes())


def _network_call(flow: Flow, source: Path) -> NetworkCall:
    try:
        return NetworkCall(flow)
    except UsageError as error:
        raise UsageError(f"--checkpoint {source}: {error}") from error


def describe(flow: Flow, call: NetworkCall, form: Format, *, half: bool) -> dict[str, Any]:
    """Return the contents of ``model.json``: the inputs and output of the program, and the settings of sampling."""
    inputs = {
        name: {"type": str(value.dtype).removeprefix("torch."), "shape": ["b", *value.shape[1:]]}
        for name, value in call.example(1).items()
    }
    return {
        "file": FILES[form],
        "kind": call.kind,
        "inputs": inputs,
        "output": {"map": "average velocity", "rectified": "velocity"}[call.kind],
        "half": half,
        "channels": call.shape[0],
        "range": [-1, 1],
        "classes": flow.class_names,
        "no_label": call.labels.num_classes if isinstance(call.labels, Labels) else None,
        "steps": flow.default_steps,
        "solver": solver_name(flow, {}),
        "velocity_at_data": not (isinstance(flow, RectifiedFlow) and flow.prediction == "clean"),
    }


def _serialise(call: NetworkCall, form: Format, *, half: bool) -> bytes:
    """Return the program, with a dynamic batch size.

    Raises:
        UsageError: if it is larger than its format can hold.
    """
    if form != "torch":  # named here if they are missing, before the work
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401

    inputs = call.example(2)
    batch = Dim("batch")
    program = torch.export.export(call, (), inputs, dynamic_shapes={name: {0: batch} for name in inputs})
    if form == "torch":
        _drop_stack_traces(program)
        written = BytesIO()
        torch.export.save(program, written)
        return written.getvalue()
    return _to_onnx(program, half=half)


def _drop_stack_traces(program: ExportedProgram) -> None:
    """They hold paths of this machine."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)


def _to_onnx(program: ExportedProgram, *, half: bool) -> bytes:
    size = sum(value.nbytes for value in program.state_dict.values())
    require(size < LARGEST_ONNX, "--format onnx holds at most 2 GB: pass --half, or --format torch")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    model = exported.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")  # stack traces, several times as large as a small network
    if half:
        _store_in_half(model)
    return model.SerializeToString()


def _store_in_half(model: "ModelProto") -> None:
    """Store matrices and convolutions in float16 again: the exporter has folded their casts to float32."""
    from onnx import TensorProto, helper, numpy_helper

    casts = []
    for weight in model.graph.initializer:
        if weight.data_type == TensorProto.FLOAT and len(weight.dims) > 1:
            name = weight.name
            kept = numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(kept, f"{name}_half"))
            casts.append(helper.make_node("Cast", [weight.name], [name], to=TensorProto.FLOAT))
    operations = [*casts, *model.graph.node]
    model.graph.ClearField("node")
    model.graph.node.extend(operations)


def _load(content: bytes, form: Format) -> Program:
    if form == "torch":
        module = torch.export.load(BytesIO(content)).module()
        return lambda inputs: module(**inputs)
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


@torch.no_grad()
def _check(program: Program, call: NetworkCall, expected: Mapping[int, Tensor], tolerance: float) -> float:
    """Return the greatest difference between the program and the flow.

    Raises:
        RunError: if it is above ``tolerance``.
    """
    differences = [
        (program(call.example(count)) - outputs).abs().max() / outputs.abs().max().clamp(min=1e-6)
        for count, outputs in expected.items()
    ]
    greatest = float(torch.stack(differences).max())  # not a number if one is none
    if not greatest <= tolerance:
        raise RunError(
            f"the program differs from the flow by {greatest:.2g} of its greatest output, above {tolerance:g}, and was "
            "not written: try the other --format, or leave out --half"
        )
    return greatest


def _report(
    trained: Trained, folder: Path, form: Format, description: Mapping[str, Any], size: int, difference: float
) -> str:
    inputs = [f"{name} {each['type']} {each['shape']}".replace("'", "") for name, each in description["inputs"].items()]
    page = {"page": f"{folder / PAGE}, to be served: python -m http.server --directory {folder}"}
    return lines(
        {
            "model": f"{type(trained.flow).__name__}, {trained.weights_name()} of {trained.source}",
            "program": f"{folder / description['file']}, {size / 1e6:.1f} MB",
            "inputs": ", ".join(inputs),
            "output": description["output"],
            "difference": f"at most {difference:.1e} of the greatest output, batches of 1 and 3",
        }
        | (page if form == "page" else {})
    )
