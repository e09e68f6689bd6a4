"""Write a trained flow as a program for other software, or as a web page."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rectified_flow.cli.exports.call import FILES, TEXT_FILE, TOKENIZER_FILE, Format, NetworkCall, describe
from rectified_flow.cli.exports.page import (
    DESCRIPTION,
    SOURCES,
    THUMBNAIL,
    newest_samples,
    page_files,
    write_files,
    written_description,
    zipped,
)
from rectified_flow.cli.exports.program import SENTENCE, check, load, serialise, text_program, tokenizer_file
from rectified_flow.cli.exports.space import find_space, publish
from rectified_flow.cli.flags.sampling import ExportConfig, ExportedConfig
from rectified_flow.condition import Kinds
from rectified_flow.errors import UsageError
from rectified_flow.hub import about_model
from rectified_flow.load import read_trained
from rectified_flow.networks.captions import BagOfWords, Caption, PretrainedTextEncoder
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import is_run
from rectified_flow.spaces.degradations import Downsample, Grey
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.pixels import RGB
from rectified_flow.system.files import prepare_folder, replace_file, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.server import folder_server
from rectified_flow.system.terminal import lines

CHECKED_BATCHES = (1, 3)
ON_PAGE = (Downsample, Grey)
"""Projections that the page applies to a picture."""
MOST_BYTES = 2_000_000_000
"""Largest size of the weights of a text encoder in float32: a file in ONNX has less than 2 GiB."""


def export(config: ExportConfig) -> None:
    """Write the program of a checkpoint and its description.

    Raises:
        UsageError: if the checkpoint does not exist, or its flow cannot be exported.
        RunError: if the program differs from the flow, or cannot be written.
    """
    flags = config.model
    trained = checkpoint.read(flags.checkpoint, read_trained)
    call = NetworkCall(trained.flow)
    if flags.format == "page":
        _check_page(call)
    encoder = None if flags.format == "torch" else _text_encoder(call.kinds, flags.format)
    space = find_space(flags)
    names = [FILES[flags.format], DESCRIPTION, *([TEXT_FILE, TOKENIZER_FILE] if encoder else [])]
    thumbnail = None
    if flags.format == "page":
        # a preview of a flow from pictures shows pictures of the data, which need not be public
        thumbnail = None if trained.flow.takes_source else newest_samples(trained.run_folder)
        names += [each.name for each in SOURCES.iterdir()] + [THUMBNAIL] * (thumbnail is not None)
    folder, archive = _claim(flags, trained.run_folder, names)
    expected = {count: call(**call.example(count)) for count in CHECKED_BATCHES}
    if flags.half:
        call.keep_in_half()
    content, description = serialise(call, flags.format), describe(call, flags.format)
    description["about"] = about_model(trained, flags.license if space is None else space.license_name)
    run = load(content, flags.format)
    difference = check(((run(call.example(count)), each) for count, each in expected.items()), "flow", flags.half)
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
        files[TEXT_FILE], difference = text_program(encoder, [SENTENCE, *examples], flags.half)
        files[TOKENIZER_FILE] = tokenizer_file(encoder)
        size = f"{len(files[TEXT_FILE]) / 1e6:.1f} MB, from {encoder.name}"
        report["encoder"] = f"{folder / TEXT_FILE}, {size}, difference at most {difference:.1e}"
    if flags.format == "page":
        files = page_files(files, description, thumbnail)
    else:
        files[DESCRIPTION] = written_description(description)
    with writing(f"the exported program in --output_dir {folder}"):
        write_files(folder, files)
        if flags.zip:
            replace_file(archive, zipped(files))
            report["archive"] = f"{archive}, {archive.stat().st_size / 1e6:.1f} MB"
    if flags.format == "page":
        report["page"] = f"{folder / 'index.html'}, to be served: python -m http.server --directory {folder}"
    print(lines(report), flush=True)
    if space is not None:
        publish(space, files, "flow map" if call.is_map else "rectified flow", asks=not flags.yes)
    if flags.open:
        _open(folder)


def _claim(flags: ExportedConfig, run: Path, names: Sequence[str]) -> tuple[Path, Path]:
    """Claim the names of files in the output folder, and that of its archive; return folder and archive."""
    folder = prepare_folder("output_dir", flags.output_dir or run / "exported")
    claim(folder, names, ours=is_run(folder if flags.output_dir else run))
    archive = folder.resolve().parent / f"{folder.resolve().name}.zip"
    if flags.zip:
        claim(archive.parent, [archive.name], ours=is_run(archive.parent))
    return folder, archive


def _open(folder: Path) -> None:
    """Serve the page in a folder until Ctrl-C, and open it in a browser."""
    with folder_server(folder) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        print(lines({"server": f"{address}, until Ctrl-C"}), flush=True)
        webbrowser.open(address)
        server.serve_forever()


def _check_page(call: NetworkCall) -> None:
    """Check that the page can sample from the flow of a call and show its samples.

    Raises:
        UsageError: if it cannot.
    """
    flow, channels = call.flow, call.shape[0]
    is_field, degradation = isinstance(flow.space, Fields), flow.degradation
    if channels not in (1, RGB) and not is_field:
        raise UsageError(f"--format page supports grey and RGB pictures, not {channels} channels: pass --format onnx")
    if is_field and flow.takes_source:
        raise UsageError("--format page reads no measurements to translate: pass --format onnx")
    if degradation and degradation.is_projection and type(degradation) not in ON_PAGE:
        kind = type(degradation).__name__
        raise UsageError(f"--format page cannot apply {kind} to the visitor's picture: pass --format onnx")


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
