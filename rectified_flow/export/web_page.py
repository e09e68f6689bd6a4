"""The format ``page``: a web page that samples in a browser, whose files are in the folder ``page``."""

import json
import lzma
from functools import partial
from hashlib import sha256
from pathlib import Path

from rectified_flow.errors import UsageError
from rectified_flow.export.call import NetworkCall, model_json
from rectified_flow.export.format import Export, Files
from rectified_flow.export.onnx import described, programs
from rectified_flow.load import Trained, model_hash, reading_of
from rectified_flow.registry import Document, register
from rectified_flow.spaces.degradations import Degradation, Downsample, Grey
from rectified_flow.spaces.pictures import RGB
from rectified_flow.system.files import read_bytes
from rectified_flow.system.pictures import PACKET

ON_PAGE = (Downsample, Grey)  # projections that the page applies to a picture
CONTROLS = ("caption", "label", "number")  # kinds of conditions that the page has controls for
SOURCES = Path(__file__).with_name("page")
INDEX, THUMBNAIL, OFFLINE = "index.html", "thumbnail.png", "offline.js"
THUMBNAIL_TAG = f'<meta property="og:image" content="{THUMBNAIL}">\n'.encode()
LARGE = (".onnx", ".wasm")  # suffixes of the files that a visitor waits for
READ_BY_PAGE = (".css", ".html", ".js", ".json", *LARGE)


@register(role="format", needs=("half", "metadata"))
def page(trained: Trained, *, half: bool = False, metadata: bool = True) -> Export:
    """Write a flow as a web page, which any static host can serve.

    Args:
        trained: the flow.
        half: store matrices and convolutions in float16.
        metadata: have the page write seed, settings and the mark of generated pictures into pictures that it saves.
    """
    fingerprint = model_hash(trained.flow)  # that of samples, before the call freezes all parameters
    flow, call = trained.flow, NetworkCall(trained.flow)
    check_page(call, trained.degradation)
    # a preview of a flow from pictures shows pictures of the data, which need not be public
    thumbnail = None if flow.takes_source else newest_samples(trained.run_folder)
    sources = page_sources(thumbnail)
    description = model_json(call, trained.degradation, reading_of(trained)) | {
        "hash": fingerprint,
        "metadata": PACKET if metadata else None,
    }
    export = programs(call, description, half=half)
    return Export(
        names=[*export.names, *sources],
        stages=export.stages,
        finish=partial(finished, sources, description),
        notes=export.notes,
    )


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
        return files | {INDEX: files[INDEX].replace(THUMBNAIL_TAG, b"")}
    return files | {THUMBNAIL: thumbnail}


def finished(sources: Files, description: Document, programs: Files) -> dict[str, bytes]:
    """Return the files of a page: its description has the sizes of large files, and its service worker a version."""
    files = {**sources, **programs}
    sizes = {name: len(content) for name, content in files.items() if name.endswith(LARGE)}
    files = described({**description, "sizes": sizes}, files)
    read = sorted(name for name in files if name.endswith(READ_BY_PAGE) and name != OFFLINE)
    version = sha256(b"".join(sha256(files[name]).digest() for name in read)).hexdigest()[:16]
    constants = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(read)};\n"
    files[OFFLINE] = constants.encode() + files[OFFLINE]
    return files


def check_page(call: NetworkCall, degradation: Degradation | None = None) -> None:
    """Check that the page can sample from the flow of a call and show its samples."""
    flow, space = call.flow, call.flow.space
    is_field, channels = bool(space.medium.page()), (space.medium.picture_shape or call.shape)[0]
    if channels not in (1, RGB) and not is_field:
        raise UsageError(f"a page supports grey and RGB pictures, not {channels} channels: choose the format onnx")
    for name, exported in ((name, kind.exported()) for name, kind in call.kinds.items()):
        if exported["kind"] not in CONTROLS or exported.get("encoder", True) is None:
            raise UsageError(f"a page has no control for the condition {name}: choose the format onnx")
    if flow.takes_source and (is_field or space.medium.decoders()):
        raise UsageError("a page reads no measurements or latents to translate: choose the format onnx")
    if degradation and degradation.is_projection and type(degradation) not in ON_PAGE:
        kind = type(degradation).__name__
        raise UsageError(f"a page cannot apply {kind} to the visitor's picture: choose the format onnx")
