"""The format ``onnx``: the network call as a program in ONNX, with those of its decoder and its text encoder."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from rectified_flow.errors import RunError, UsageError, first_line
from rectified_flow.export.call import DECODER_FILE, MODEL_FILE, NetworkCall, model_json
from rectified_flow.export.format import Export, Files, Stage
from rectified_flow.exportable import Exportable, Inputs
from rectified_flow.load import Trained, reading_of
from rectified_flow.registry import Document, register

DESCRIPTION = "model.json"
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Greatest difference of program and module, relative to the greatest number that the module returns."""
CHECKED_BATCHES = (1, 3)
Program = Callable[[Inputs], list[Tensor]]


@register(role="format", needs=("half",))
def onnx(trained: Trained, *, half: bool = False) -> Export:
    """Write a flow as programs in ONNX, and ``model.json`` beside them.

    Args:
        trained: the flow.
        half: store matrices and convolutions in float16.
    """
    call = NetworkCall(trained.flow)
    return programs(call, model_json(call, trained.degradation, reading_of(trained)), half=half)


def programs(call: NetworkCall, description: Document, *, half: bool) -> Export:
    """Return the export of a network call, of its decoder, of its text encoder and of their description."""
    modules = modules_of(call)
    stages: dict[str, Stage] = {name: partial(converted, name, each, half=half) for name, each in modules.items()}
    names = [path for each in modules.values() for path in (each.file, *each.files)]
    return Export(
        names=[*names, DESCRIPTION],
        stages=stages,
        finish=partial(described, description),
        notes={"output": description["output"]},
    )


def described(description: Document, files: Files) -> dict[str, bytes]:
    """Return the files, and the description as ``model.json``."""
    return {**files, DESCRIPTION: (json.dumps(description, indent=1) + "\n").encode()}


def modules_of(call: NetworkCall) -> dict[str, Exportable]:
    """Return the modules of a flow that are written as programs, by their names in words."""
    batch = [("batch", None)]
    about = f", batches of {' and '.join(map(str, CHECKED_BATCHES))}"
    samples = [call.example(count) for count in CHECKED_BATCHES]
    modules = {"flow": Exportable(MODEL_FILE, call, call.example(2), batch, samples, about=about)}
    for name, decoder in call.flow.space.medium.decoders().items():
        latents = [{"x": each["x"]} for each in samples]
        modules[name] = Exportable(DECODER_FILE, decoder, {"x": call.example(2)["x"]}, batch, latents, about=about)
    companions = (kind.companion() for kind in call.kinds.values())
    if encoder := next((each for each in companions if each), None):  # all captions of a run have the same
        modules["encoder"] = encoder
    return modules


@torch.no_grad()
def converted(name: str, exported: Exportable, *, half: bool) -> tuple[Files, str]:
    """Return the files of a module as ONNX, and its size and its difference from the module in words.

    Args:
        name: the module in words, for an error.
        exported: the module.
        half: store matrices and convolutions in float16.
    """
    try:
        expected = [_listed(exported.module(**inputs)) for inputs in exported.checks]
        program = to_onnx(exported, half=half)
    except (ImportError, UsageError):
        raise
    except Exception as error:  # torch.export raises exceptions of many types
        rule = "its forward must accept batches of any size and be traceable by torch.export"
        raise UsageError(f"the {name} cannot be written as ONNX ({first_line(error)}): {rule}") from error
    run = load_program(program)
    found = [run(inputs) for inputs in exported.checks]
    pairs = [pair for one, other in zip(found, expected, strict=True) for pair in zip(one, other, strict=True)]
    difference = check_program(pairs, name, half=half)
    about = f"{len(program) / 1e6:.1f} MB, difference at most {difference:.1e}{exported.about}"
    return {exported.file: program, **exported.files}, about


def _listed(output: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a module as a program returns them."""
    return [output] if isinstance(output, Tensor) else [*output]


class _Positional(nn.Module):
    """A module called by position: not any name of a condition can be that of a parameter, as torch.export needs it."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self.names = module, names

    def forward(self, *inputs: Tensor) -> Tensor | Sequence[Tensor]:
        return self.module(**dict(zip(self.names, inputs, strict=True)))


def to_onnx(exported: Exportable, *, half: bool) -> bytes:
    """Return a module as ONNX.

    Args:
        exported: the module.
        half: store matrices and convolutions in float16. Vectors stay in float32, and so does the computation.
    """
    import onnxruntime  # noqa: F401  named here if it is missing, before the work
    import onnxscript  # noqa: F401
    from onnx import TensorProto, helper, numpy_helper

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    inputs = exported.inputs
    sizes = {axis: Dim(name, max=largest) for axis, (name, largest) in enumerate(exported.axes)}
    positional, shapes = _Positional(exported.module, [*inputs]), {"inputs": (sizes,) * len(inputs)}
    program = torch.export.export(positional, tuple(inputs.values()), dynamic_shapes=shapes)
    written = torch.onnx.export(program, dynamo=True, verbose=False, input_names=list(inputs))
    assert written is not None  # torch.onnx.export returns None only without dynamo
    model = written.model_proto
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")  # stack traces, several times as large as a small network
    for weight in graph.initializer if half else ():
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


def check_program(pairs: Iterable[tuple[Tensor, Tensor]], what: str, *, half: bool) -> float:
    """Return the largest difference between outputs of a program and of a module, relative to the module's largest."""
    tolerance = HALF_TOLERANCE if half else TOLERANCE
    differences = [(found - each).abs().max() / each.abs().max().clamp(min=1e-6) for found, each in pairs]
    greatest = float(torch.stack(differences).max())
    if not greatest <= tolerance:
        remedy = "leave out half" if half else "please report this"
        raise RunError(f"the program differs from the {what} by {greatest:.2g}, more than {tolerance:g}: {remedy}")
    return greatest
