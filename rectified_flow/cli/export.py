"""One network call of a flow as a module of fixed inputs and one output, which compilers and other software take."""

import json
import logging
import lzma
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from io import BytesIO
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.utils import parametrize

from rectified_flow.cli.flags.sampling import ExportConfig
from rectified_flow.condition import LARGEST, Condition, Kinds, Labels, Number, Picture, chosen
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import read_trained, solver_name
from rectified_flow.networks.captions import BagOfWords, Caption, PretrainedTextEncoder
from rectified_flow.registry import describe as describe_part
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import is_run
from rectified_flow.spaces.degradations import Downsample, Grey, Mask
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.pixels import RGB, Pixels
from rectified_flow.system.files import prepare_folder, replace_file, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.terminal import lines


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


class TextCall(nn.Module):
    """The vectors of texts and their hidden states, see :meth:`PretrainedTextEncoder.vectors`."""

    def __init__(self, encoder: PretrainedTextEncoder) -> None:
        super().__init__()
        self.encoder, self.module = encoder, encoder.parts[1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 ``[b, size]`` and ``[b, n, size]`` of int64 ``[b, n]``."""
        return self.encoder.vectors(input_ids, attention_mask)


class _Renamed(nn.Module):
    """A module with a parameter for each input, as torch.export needs one, under a name that may differ.

    Args:
        module: called with inputs by name.
        names: names of the inputs by parameter.
    """

    def __init__(self, module: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__()
        self.module = module

        def forward(**inputs: Tensor) -> Any:
            return module(**{names[parameter]: each for parameter, each in inputs.items()})

        parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


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
INPUT_KINDS = (Labels, Number, Caption)
"""Kinds of the conditions that are inputs of a program under their own names."""
UNKNOWN = "unknown"
"""Name of the input with the map of the unknown pixels of a source."""
TEXT_FILE, TOKENIZER_FILE = "text_encoder.onnx", "tokenizer.json"
MOST_BYTES = 2_000_000_000
"""Largest size of the weights of a text encoder in float32: a file in ONNX has less than 2 GiB."""
SENTENCE = "A red flower, and 2 blue ones!"
"""Text that an exported text encoder is checked with, beside the examples."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Greatest difference of program and module, relative to the greatest number that the module returns."""


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
    is_field = isinstance(trained.flow.space, Fields)
    if flags.format == "page" and channels not in (1, RGB) and not is_field:
        raise UsageError(f"--format page supports grey and RGB pictures, not {channels} channels: pass --format onnx")
    degradation = trained.flow.degradation
    if flags.format == "page" and is_field and trained.flow.takes_source:
        raise UsageError("--format page reads no measurements to translate: pass --format onnx")
    if flags.format == "page" and degradation and degradation.is_projection and type(degradation) not in ON_PAGE:
        kind = type(degradation).__name__
        raise UsageError(f"--format page cannot apply {kind} to the visitor's picture: pass --format onnx")
    encoder = None if flags.format == "torch" else _text_encoder(call.kinds, flags.format)
    folder = prepare_folder("output_dir", flags.output_dir or trained.run_folder / "exported")
    page = [each.name for each in PAGE_FILES.iterdir()] if flags.format == "page" else []
    texts = [TEXT_FILE, TOKENIZER_FILE] if encoder else []
    ours = is_run(folder if flags.output_dir else trained.run_folder)
    claim(folder, [FILES[flags.format], "model.json", *texts, *page], ours=ours)
    expected = {count: call(**call.example(count)) for count in CHECKED_BATCHES}
    if flags.half:
        call.keep_in_half()
    content, description = _serialise(call, flags.format), describe(call, flags.format)
    run = _load(content, flags.format)
    difference = _check(((run(call.example(count)), each) for count, each in expected.items()), "flow", flags.half)
    files: dict[str, bytes] = {FILES[flags.format]: content}
    inputs = [f"{name} {each['type']} {each['shape']}".replace("'", "") for name, each in description["inputs"].items()]
    report: dict[str, object] = {
        "model": trained,
        "program": f"{folder / FILES[flags.format]}, {len(content) / 1e6:.1f} MB",
        "inputs": ", ".join(inputs),
        "output": description["output"],
        "difference": f"at most {difference:.1e} of the greatest output, batches of 1 and 3",
    }
    if encoder:
        examples = [text for kind in call.kinds.values() if isinstance(kind, Caption) for text in kind.examples]
        files[TEXT_FILE], difference = _text_program(encoder, [SENTENCE, *examples], flags.half)
        files[TOKENIZER_FILE] = _tokenizer_file(encoder)
        size = f"{len(files[TEXT_FILE]) / 1e6:.1f} MB, from {encoder.name}"
        report["encoder"] = f"{folder / TEXT_FILE}, {size}, difference at most {difference:.1e}"
    files["model.json"] = (json.dumps(description, indent=1) + "\n").encode()
    with writing(f"the exported program in --output_dir {folder}"):
        for name, each in files.items():
            replace_file(folder / name, each)
        if flags.format == "page":
            write_page(folder)
    if flags.format == "page":
        report["page"] = f"{folder / 'index.html'}, to be served: python -m http.server --directory {folder}"
    print(lines(report))


def _text_encoder(kinds: Kinds, form: Format) -> PretrainedTextEncoder | None:
    """Return the text encoder that is to be exported, too.

    Raises:
        UsageError: if captions have several of them, one is too large for a file, or the page cannot run one.
    """
    encoders = [kind.encoder for kind in kinds.values() if isinstance(kind, Caption)]
    found = {each.fingerprint: each for each in encoders if isinstance(each, PretrainedTextEncoder)}
    if len(found) > 1:
        names = ", ".join(each.name for each in found.values())
        raise UsageError(f"--checkpoint has captions of several encoders ({names}): only one can be exported")
    for large in found.values():
        size = sum(parameter.numel() * 4 for parameter in large.parts[1].parameters())
        if size > MOST_BYTES:
            raise UsageError(f"the text encoder {large.name} has {size / 1e9:.1f} GB, too many for one file in ONNX")
    for each in encoders:
        if form == "page" and not isinstance(each, BagOfWords | PretrainedTextEncoder):
            raise UsageError(f"--format page cannot run the text encoder {each.name}: pass --format onnx")
    return next(iter(found.values()), None)


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


def _serialise(call: NetworkCall, form: Format) -> bytes:
    """Return the program, with a dynamic batch size."""
    if form != "torch":  # named here if they are missing, before the work
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401

    inputs, sizes = call.example(2), {0: Dim("batch")}
    if form != "torch":
        return _to_onnx(call, inputs, sizes, call.in_half)
    for name in inputs:
        if iskeyword(name) or not name.isascii():
            raise UsageError(f"--format torch cannot have an input with the name {name}: pass --format onnx")
    named = _Renamed(call, {name: name for name in inputs})
    program = torch.export.export(named, (), inputs, dynamic_shapes=dict.fromkeys(inputs, sizes))
    written = BytesIO()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # has paths of this machine
    torch.export.save(program, written)
    return written.getvalue()


def _to_onnx(module: nn.Module, inputs: dict[str, Tensor], sizes: dict[int, Dim], in_half: bool) -> bytes:
    """Return a module as ONNX; ``in_half`` stores matrices and convolutions in float16.

    Args:
        module: called with ``inputs`` by name.
        inputs: examples.
        sizes: the axes of every input whose sizes are dynamic.
        in_half: see above.
    """
    from onnx import TensorProto, helper, numpy_helper

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    names = {f"input_{number}": name for number, name in enumerate(inputs)}  # not any name can be a parameter's
    given, shapes = {each: inputs[name] for each, name in names.items()}, dict.fromkeys(names, sizes)
    program = torch.export.export(_Renamed(module, names), (), given, dynamic_shapes=shapes)
    exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, input_names=list(inputs))
    model = exported.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")  # stack traces, several times as large as a small network
    # The exporter has folded the casts of matrices and convolutions to float32, so they get casts anew.
    for weight in graph.initializer if in_half else ():
        if weight.data_type == TensorProto.FLOAT and len(weight.dims) > 1:
            name, values = weight.name, numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(values, f"{name}_half"))
            graph.node.insert(0, helper.make_node("Cast", [weight.name], [name], to=TensorProto.FLOAT))
    return bytes(model.SerializeToString())


@torch.no_grad()
def _text_program(encoder: PretrainedTextEncoder, texts: Sequence[str], in_half: bool) -> tuple[bytes, float]:
    """Return a text encoder as ONNX, with dynamic numbers of texts and tokens, and its difference from the encoder.

    Raises:
        RunError: if the difference is above the tolerance.
    """
    sizes = {0: Dim("batch"), 1: Dim("tokens", max=encoder.most_tokens)}
    inputs = encoder.tokenize(texts if len(texts) > 1 else [*texts, ""])
    content = _to_onnx(TextCall(encoder), inputs, sizes, in_half)
    run = _session(content)
    pairs = []
    for given in (inputs, encoder.tokenize(texts[:1])):
        known = given["attention_mask"].bool()[..., None]
        for found, expected in zip(run(given), encoder.vectors(**given), strict=True):
            rows = known if found.ndim == known.ndim else known.any(dim=1)  # padding is not used
            pairs.append((found.masked_fill(~rows, 0), expected.masked_fill(~rows, 0)))
    return content, _check(pairs, "text encoder", in_half)


def _tokenizer_file(encoder: PretrainedTextEncoder) -> bytes:
    """Return the contents of ``tokenizer.json``, without the padding and truncation of the latest call.

    Raises:
        UsageError: if the tokenizer cannot be written in this form.
    """
    backend = getattr(encoder.parts[0], "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"the text encoder {encoder.name} has no {TOKENIZER_FILE}: pass --format torch")
    document = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _load(content: bytes, form: Format) -> Program:
    if form == "torch":
        module = torch.export.load(BytesIO(content)).module()
        return lambda inputs: module(**inputs)
    run = _session(content)
    return lambda inputs: run(inputs)[0]


def _session(content: bytes) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    """Return a function that runs a program in ONNX."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda inputs: [
        torch.from_numpy(each) for each in session.run(None, {name: x.numpy() for name, x in inputs.items()})
    ]


def _check(pairs: Iterable[tuple[Tensor, Tensor]], what: str, in_half: bool) -> float:
    """Return the largest difference between outputs of a program and of a module, relative to the module's largest.

    Raises:
        RunError: if the difference is above the tolerance or not a number.
    """
    tolerance = HALF_TOLERANCE if in_half else TOLERANCE
    differences = [(found - each).abs().max() / each.abs().max().clamp(min=1e-6) for found, each in pairs]
    greatest = float(torch.stack(differences).max())
    if not greatest <= tolerance:
        remedy = "leave out --half" if in_half else "pass another --format"
        raise RunError(f"the program differs from the {what} by {greatest:.2g}, more than {tolerance:g}: {remedy}")
    return greatest
