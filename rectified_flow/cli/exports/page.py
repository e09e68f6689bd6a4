"""The files of the web page that samples in a browser."""

import json
import lzma
from collections.abc import Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from rectified_flow.runs.watched import SAMPLES
from rectified_flow.system.files import read_bytes, replace_file

SOURCES = Path(__file__).resolve().parents[2] / "page"
THUMBNAIL = "thumbnail.png"
THUMBNAIL_TAG = f'<meta property="og:image" content="{THUMBNAIL}">\n'.encode()
OFFLINE = "offline.js"
DESCRIPTION = "model.json"
WAITED_FOR = (".onnx", ".wasm")
READ_BY_PAGE = (".css", ".html", ".json", ".mjs", ".onnx", ".wasm")


def newest_samples(run_folder: Path) -> bytes | None:
    """Return the newest grid of samples that a run has written, a PNG file, or None if there is none."""
    grids = sorted((run_folder / SAMPLES).glob("step_*.png"))
    return read_bytes(grids[-1]) if grids else None


def written_description(description: Mapping[str, Any]) -> bytes:
    """Return a description of a program as the file ``model.json``."""
    return (json.dumps(description, indent=1) + "\n").encode()


def page_files(
    program: Mapping[str, bytes], description: Mapping[str, Any], thumbnail: bytes | None = None
) -> dict[str, bytes]:
    """Return the contents of all files of the page by their paths in its folder, with the runtimes unpacked.

    Args:
        program: the exported program and its further files by name.
        description: the contents of ``model.json``, to which the sizes of the files are added that a visitor waits for.
        thumbnail: a PNG file that other sites show with a link to the page.
    """
    files = dict(program)
    for file in sorted(SOURCES.rglob("*")):
        if file.is_file():
            name, content = file.relative_to(SOURCES), file.read_bytes()
            if file.suffix == ".xz":
                name, content = name.with_suffix(""), lzma.decompress(content)
            files[name.as_posix()] = content
    sizes = {name: len(content) for name, content in files.items() if name.endswith(WAITED_FOR)}
    files[DESCRIPTION] = written_description({**description, "sizes": sizes})
    if thumbnail is None:
        files["index.html"] = files["index.html"].replace(THUMBNAIL_TAG, b"")
    else:
        files[THUMBNAIL] = thumbnail
    read = sorted(name for name in files if name.endswith(READ_BY_PAGE))
    version = sha256(b"".join(sha256(files[name]).digest() for name in read)).hexdigest()[:16]
    constants = f"const VERSION = {json.dumps(version)};\nconst FILES = {json.dumps(read)};\n"
    files[OFFLINE] = constants.encode() + files[OFFLINE]
    return files


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into ``folder`` and its subfolders, which are made if they do not exist.

    Args:
        folder: an existing folder.
        files: contents by path in ``folder``.

    Raises:
        OSError: if a file cannot be written; its earlier contents then remain.
    """
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_file(folder / name, content)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """Return a .zip of files, which is the same for the same files: their order and times are fixed."""
    written = BytesIO()
    with ZipFile(written, "w") as archive:
        for name, content in sorted(files.items()):
            entry = ZipInfo(name)  # of the year 1980
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # a file of Unix that everyone may read
            archive.writestr(entry, content, ZIP_DEFLATED)
    return written.getvalue()
