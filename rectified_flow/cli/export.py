"""Write a trained flow as a program for other software, or as a web page that samples in a browser."""

import json
import lzma
import webbrowser
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.export import Dim

from rectified_flow.cli.flags.sampling import ExportConfig
from rectified_flow.cli.network_call import DECODER_FILE, MODEL_FILE, NetworkCall, check, describe, load, to_onnx
from rectified_flow.errors import UsageError
from rectified_flow.load import model_hash, read_trained
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.degradations import Downsample, Grey
from rectified_flow.spaces.space import RGB
from rectified_flow.system.files import prepare_folder, read_bytes, replace_file, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.provenance import PACKET
from rectified_flow.system.terminal import lines, progress_bar

CHECKED_BATCHES = (1, 3)
ON_PAGE = (Downsample, Grey)  # projections that the page applies to a picture
SOURCES = Path(__file__).resolve().parents[1] / "page"
THUMBNAIL, DESCRIPTION, OFFLINE = "thumbnail.png", "model.json", "offline.js"
NAMES = (MODEL_FILE, DECODER_FILE, DESCRIPTION)
THUMBNAIL_TAG = f'<meta property="og:image" content="{THUMBNAIL}">\n'.encode()
LARGE = (".onnx", ".wasm")  # suffixes of the files that a visitor waits for
READ_BY_PAGE = (".css", ".html", ".js", ".json", *LARGE)


def export(config: ExportConfig) -> None:
    """Write the program of a checkpoint and its description.

    Raises:
        UsageError: if the checkpoint does not exist, or its flow cannot be exported.
        RunError: if the program differs from the flow, or cannot be written.
    """
    flags = config.model
    trained = checkpoint.read(flags.checkpoint, read_trained)
    call, is_page = NetworkCall(trained.flow), flags.format == "page"
    if is_page:
        _check_page(call)
    companions = (kind.companion(is_page=is_page) for kind in call.kinds.values())
    encoder = next((each for each in companions if each), None)  # all captions of a run have the same
    # a preview of a flow from pictures shows pictures of the data, which need not be public
    thumbnail = None if trained.flow.takes_source else newest_samples(trained.run_folder)
    files = page_sources(thumbnail) if is_page else {}
    folder = flags.output_dir or trained.run_folder / "exported"
    claim(prepare_folder("output_dir", folder), [*NAMES, *(encoder.files if encoder else ()), *files])
    description, decoder = describe(call), trained.flow.space.decoder()
    if is_page:
        description |= {"hash": model_hash(trained.flow), "metadata": PACKET if flags.metadata else None}
    report: dict[str, object] = {"model": trained, "output": description["output"]}
    stages = 1 + bool(decoder) + bool(encoder)
    with progress_bar(total=stages, desc="converting the network", unit="stage", leave=False) as bar:
        files[MODEL_FILE], text = converted(call, call.example, "flow", in_half=flags.half)
        report["program"] = f"{folder / MODEL_FILE}, {text}"
        bar.update()
        if decoder is not None:
            bar.set_description("converting the decoder")
            files[DECODER_FILE], text = converted(decoder, call.latents, "decoder", in_half=flags.half)
            report["decoder"] = f"{folder / DECODER_FILE}, {text}"
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

    Raises:
        RunError: if the program differs from the module.
    """
    expected = {count: module(**example(count)) for count in CHECKED_BATCHES}
    program = to_onnx(module, example(2), {0: Dim("batch")}, in_half=in_half)
    run = load(program)
    difference = check(((run(example(count))[0], each) for count, each in expected.items()), what, in_half)
    return program, f"{len(program) / 1e6:.1f} MB, difference at most {difference:.1e}, batches of 1 and 3"


def newest_samples(run_folder: Path) -> bytes | None:
    """Return the newest grid of samples that a run has written, a PNG file, or None if there is none."""
    grids = sorted((run_folder / "samples").glob("step_*.png"))
    return read_bytes(grids[-1]) if grids else None


def page_sources(thumbnail: bytes | None = None) -> dict[str, bytes]:
    """Return the files of the page that are the same for every model, by path, with the runtimes unpacked.

    Args:
        thumbnail: a PNG file that other sites show with a link to the page.
    """
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


def _check_page(call: NetworkCall) -> None:
    """Check that the page can sample from the flow of a call and show its samples.

    Raises:
        UsageError: if it cannot.
    """
    flow, space, degradation = call.flow, call.flow.space, call.flow.degradation
    is_field, channels = space.on_page() is not None, (space.picture_shape or call.shape)[0]
    if channels not in (1, RGB) and not is_field:
        raise UsageError(f"--format page supports grey and RGB pictures, not {channels} channels: pass --format onnx")
    if flow.takes_source and (is_field or space.autoencoder is not None):
        raise UsageError("--format page reads no measurements or latents to translate: pass --format onnx")
    if degradation and degradation.is_projection and type(degradation) not in ON_PAGE:
        kind = type(degradation).__name__
        raise UsageError(f"--format page cannot apply {kind} to the visitor's picture: pass --format onnx")
