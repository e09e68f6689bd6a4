"""Write a trained flow as a program for other software, or as a web page that samples in a browser."""

import json
import logging
import lzma
import webbrowser
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from rectified_flow.cli.config import ExportConfig
from rectified_flow.condition import LARGEST, WrittenCondition, chosen, written
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import model_hash, read_trained, solver_name
from rectified_flow.registry import describe as describe_part
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.degradations import Downsample, Grey, Mask
from rectified_flow.spaces.pictures import RGB
from rectified_flow.system.files import prepare_folder, read_bytes, replace_file, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.pictures import PACKET
from rectified_flow.system.terminal import lines, progress_bar

UNKNOWN = "unknown"
MODEL_FILE, DECODER_FILE = "model.onnx", "decoder.onnx"
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Greatest difference of program and module, relative to the greatest number that the module returns."""
Program = Callable[[dict[str, Tensor]], list[Tensor]]
CHECKED_BATCHES = (1, 3)
ON_PAGE = (Downsample, Grey)  # projections that the page applies to a picture
CONTROLS = ("caption", "label", "number")  # kinds of conditions that the page has controls for
SOURCES = Path(__file__).resolve().parents[1] / "page"
THUMBNAIL, DESCRIPTION, OFFLINE = "thumbnail.png", "model.json", "offline.js"
NAMES = (MODEL_FILE, DECODER_FILE, DESCRIPTION)
THUMBNAIL_TAG = f'<meta property="og:image" content="{THUMBNAIL}">\n'.encode()
LARGE = (".onnx", ".wasm")  # suffixes of the files that a visitor waits for
READ_BY_PAGE = (".css", ".html", ".js", ".json", *LARGE)


def export(config: ExportConfig) -> None:
    """Write the program of a checkpoint and its description."""
    flags = config.model
    trained = read_trained(checkpoint.resolve(flags.checkpoint))
    call, is_page = NetworkCall(trained.flow), flags.format == "page"
    if is_page:
        _check_page(call)
    companions = (kind.companion() for kind in call.kinds.values())
    encoder = next((each for each in companions if each), None)  # all captions of a run have the same
    # a preview of a flow from pictures shows pictures of the data, which need not be public
    thumbnail = None if trained.flow.takes_source else newest_samples(trained.run_folder)
    files = page_sources(thumbnail) if is_page else {}
    folder = flags.output_dir or trained.run_folder / "exported"
    claim(prepare_folder("output_dir", folder), [*NAMES, *(encoder.files if encoder else ()), *files])
    description = describe(call)
    if is_page:
        description |= {"hash": model_hash(trained.flow), "metadata": PACKET if flags.metadata else None}
    report: dict[str, object] = {"model": trained, "output": description["output"]}
    modules: dict[str, Any] = {"flow": (call, call.example, MODEL_FILE)}
    for name, decoder in trained.flow.space.medium.decoders().items():
        modules[name] = (decoder, call.latents, DECODER_FILE)
    with progress_bar(total=len(modules) + bool(encoder), unit="stage", leave=False) as bar:
        for name, (module, example, file) in modules.items():
            bar.set_description(f"converting the {name}")
            files[file], text = converted(module, example, name, in_half=flags.half)
            report[name] = f"{folder / file}, {text}"
            bar.update()
        if encoder:
            bar.set_description("converting the text encoder")
            more, found = encoder.write(flags.half)
            files |= more
            size = f"{len(more[encoder.files[0]]) / 1e6:.1f} MB, from {encoder.encoder.name}"
            report["encoder"] = f"{folder / encoder.files[0]}, {size}, difference at most {found:.1e}"
            bar.update()
    with writing(f"the exported program in --output_dir {folder}"):
        for name, written in finished(files, description).items():
            replace_file(folder / name, written)
    if is_page:
        report["page"] = f"{folder / 'index.html'}, to be served: python -m http.server --directory {folder}"
    print(lines(report), flush=True)
    if flags.open:
        _open(folder)


def converted(
    module: nn.Module, example: Callable[[int], dict[str, Tensor]], what: str, *, in_half: bool
) -> tuple[bytes, str]:
    """Return a module as ONNX, and its size and its difference from the module in words.

    Args:
        module: the module.
        example: returns random inputs by name for a number of rows.
        what: the module in words, for an error.
        in_half: store matrices and convolutions in float16.
    """
    expected = {count: module(**example(count)) for count in CHECKED_BATCHES}
    program = to_onnx(module, example(2), {0: Dim("batch")}, in_half=in_half)
    run = load_program(program)
    difference = check_program(((run(example(count))[0], each) for count, each in expected.items()), what, in_half)
    return program, f"{len(program) / 1e6:.1f} MB, difference at most {difference:.1e}, batches of 1 and 3"


def newest_samples(run_folder: Path) -> bytes | None:
    """Return the newest grid of samples that a run has written, a PNG file, or None if there is none."""
    grids = sorted((run_folder / "samples").glob("step_*.png"))
    return read_bytes(grids[-1]) if grids else None


def page_sources(thumbnail: bytes | None = None) -> dict[str, bytes]:
    """Return the files of the page that are the same for every model, by path, with the runtimes unpacked."""
    files = {str(file.relative_to(SOURCES)): file.read_bytes() for file in sorted(SOURCES.rglob("*")) if file.is_file()}
    for name in [name for name in files if name.endswith(".xz")]:
        files[name.removesuffix(".xz")] = lzma.decompress(files.pop(name))
    if thumbnail is None:
        return files | {"index.html": files["index.html"].replace(THUMBNAIL_TAG, b"")}
    return files | {THUMBNAIL: thumbnail}


def finished(files: Mapping[str, bytes], description: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files with their description; a page's also has sizes, and its service worker a version."""
    files, is_page = dict(files), OFFLINE in files
    if is_page:
        sizes = {name: len(content) for name, content in files.items() if name.endswith(LARGE)}
        description = {**description, "sizes": sizes}
    files[DESCRIPTION] = (json.dumps(description, indent=1) + "\n").encode()
    if is_page:
        read = sorted(name for name in files if name.endswith(READ_BY_PAGE) and name != OFFLINE)
        version = sha256(b"".join(sha256(files[name]).digest() for name in read)).hexdigest()[:16]
        constants = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(read)};\n"
        files[OFFLINE] = constants.encode() + files[OFFLINE]
    return files


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves the files of a folder without a line for each."""

    def log_message(self, *_arguments: Any) -> None:
        """Print nothing."""


def _open(folder: Path) -> None:
    """Serve the page in a folder until Ctrl-C, and open it in a browser."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        print(lines({"server": f"{address}, until Ctrl-C"}), flush=True)
        webbrowser.open(address)
        server.serve_forever()


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
            raise UsageError(f"--checkpoint has a {type(flow).__name__}: pass one of a rectified flow or flow map")
        flow.space.medium.page()  # raises an error for data of another kind
        if others := conditions.keys() - written(conditions).keys() - {SOURCE}:
            raise UsageError(f"--checkpoint has a network with the condition {min(others)}, which cannot be exported")
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

    def latents(self, count: int) -> dict[str, Tensor]:
        """Return random inputs of the decoder for ``count`` rows, if there is one: ``x`` alone."""
        return {"x": self.example(count)["x"]}

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


def describe(call: NetworkCall) -> dict[str, Any]:
    """Return the contents of ``model.json``: the inputs and output of the program, and the settings of sampling."""
    flow = call.flow
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
        "guidance": flow.default_guidance,
        "source": {
            "as": "start" if flow.from_source else "condition",
            "noise": flow.source_noise,
            "degradation": None if flow.degradation is None else describe_part(flow.degradation),
            "paints": isinstance(flow.degradation, Mask),
        }
        if flow.takes_source
        else None,
    }


class _Positional(nn.Module):
    """A module called by position: not any name of a condition can be that of a parameter, as torch.export needs it."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(**dict(zip(self.names, inputs, strict=True)))


def to_onnx(module: nn.Module, inputs: dict[str, Tensor], sizes: dict[int, Dim], *, in_half: bool) -> bytes:
    """Return a module as ONNX.

    Args:
        module: called with ``inputs`` by name.
        inputs: examples.
        sizes: the axes of every input whose sizes are dynamic.
        in_half: store matrices and convolutions in float16. Vectors stay in float32, and so does the computation.
    """
    import onnxruntime  # noqa: F401  named here if it is missing, before the work
    import onnxscript  # noqa: F401
    from onnx import TensorProto, helper, numpy_helper

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    positional, shapes = _Positional(module, [*inputs]), {"inputs": (sizes,) * len(inputs)}
    program = torch.export.export(positional, tuple(inputs.values()), dynamic_shapes=shapes)
    exported: Any = torch.onnx.export(program, dynamo=True, verbose=False, input_names=list(inputs))
    model = exported.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")  # stack traces, several times as large as a small network
    for weight in graph.initializer if in_half else ():
        if weight.data_type == TensorProto.FLOAT and len(weight.dims) > 1:
            name, values = weight.name, numpy_helper.to_array(weight).astype(np.float16)
            weight.CopyFrom(numpy_helper.from_array(values, f"{name}_half"))
            graph.node.insert(0, helper.make_node("Cast", [weight.name], [name], to=TensorProto.FLOAT))
    return bytes(model.SerializeToString())


def load_program(content: bytes) -> Program:
    """Return a function that runs a program in ONNX."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda inputs: [
        torch.from_numpy(each) for each in session.run(None, {name: x.numpy() for name, x in inputs.items()})
    ]


def check_program(pairs: Iterable[tuple[Tensor, Tensor]], what: str, in_half: bool) -> float:
    """Return the largest difference between outputs of a program and of a module, relative to the module's largest."""
    tolerance = HALF_TOLERANCE if in_half else TOLERANCE
    differences = [(found - each).abs().max() / each.abs().max().clamp(min=1e-6) for found, each in pairs]
    greatest = float(torch.stack(differences).max())
    if not greatest <= tolerance:
        remedy = "leave out --half" if in_half else "please report this"
        raise RunError(f"the program differs from the {what} by {greatest:.2g}, more than {tolerance:g}: {remedy}")
    return greatest


def _check_page(call: NetworkCall) -> None:
    """Check that the page can sample from the flow of a call and show its samples."""
    flow, space, degradation = call.flow, call.flow.space, call.flow.degradation
    is_field, channels = bool(space.medium.page()), (space.medium.picture_shape or call.shape)[0]
    if channels not in (1, RGB) and not is_field:
        raise UsageError(f"--format page supports grey and RGB pictures, not {channels} channels: pass --format onnx")
    for name, exported in ((name, kind.exported()) for name, kind in call.kinds.items()):
        if exported["kind"] not in CONTROLS or exported.get("encoder", True) is None:
            raise UsageError(f"--format page has no control for the condition {name}: pass --format onnx")
    if flow.takes_source and (is_field or space.medium.decoders()):
        raise UsageError("--format page reads no measurements or latents to translate: pass --format onnx")
    if degradation and degradation.is_projection and type(degradation) not in ON_PAGE:
        kind = type(degradation).__name__
        raise UsageError(f"--format page cannot apply {kind} to the visitor's picture: pass --format onnx")
