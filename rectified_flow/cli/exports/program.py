"""Programs of modules: written by torch.export or as ONNX, loaded, and compared with the modules."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from io import BytesIO
from keyword import iskeyword
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from rectified_flow.cli.exports.call import TOKENIZER_FILE, Format, NetworkCall
from rectified_flow.errors import RunError, UsageError
from rectified_flow.networks.captions import PretrainedTextEncoder

Program = Callable[[dict[str, Tensor]], Tensor]
SENTENCE = "A red flower, and 2 blue ones!"
"""Text that an exported text encoder is checked with, beside the examples."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Greatest difference of program and module, relative to the greatest number that the module returns."""


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


def serialise(call: NetworkCall, form: Format) -> bytes:
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
def text_program(encoder: PretrainedTextEncoder, texts: Sequence[str], in_half: bool) -> tuple[bytes, float]:
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
    return content, check(pairs, "text encoder", in_half)


def tokenizer_file(encoder: PretrainedTextEncoder) -> bytes:
    """Return the contents of ``tokenizer.json``, without the padding and truncation of the latest call.

    Raises:
        UsageError: if the tokenizer cannot be written in this form.
    """
    backend = getattr(encoder.parts[0], "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"the text encoder {encoder.name} has no {TOKENIZER_FILE}: pass --format torch")
    document = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def load(content: bytes, form: Format) -> Program:
    """Return a function that runs a program."""
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


def check(pairs: Iterable[tuple[Tensor, Tensor]], what: str, in_half: bool) -> float:
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
