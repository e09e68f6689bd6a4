"""The files below a folder, and a hash by which changes of them are found."""

import os
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from math import inf
from pathlib import Path
from stat import S_ISREG
from time import monotonic
from typing import NamedTuple

from rectified_flow.data.sources.kinds import CLOUD
from rectified_flow.system.artifact import written_names
from rectified_flow.system.pictures import IMAGE_SUFFIXES
from rectified_flow.system.terminal import warn_once

SILENT_LISTING = 5.0  # time after which a line says that the files of a folder are still being listed [s]
BYPRODUCTS = {
    *("@eadir", "@recycle", "@recently-snapshot", "@__thumb", "@tmp", "#recycle", "#snapshot", "$recycle.bin"),
    *("recycler", "system volume information", "__macosx", "lost+found", "network trash folder", "temporary items"),
    *("files_trashbin", "__pycache__", "node_modules"),
}
"""Folders that photo servers, file servers and systems create, in lower case; names with a dot in front are others."""
SAMPLED, BLOCK = 256, 4096
"""Largest number of files whose contents are part of the fingerprint of a folder, and size of a part [bytes]."""


def is_image(file: Path) -> bool:
    """Return whether a file has the name of an image that can be read."""
    return file.suffix.lower() in IMAGE_SUFFIXES


class Listing(NamedTuple):
    """The files below a folder."""

    files: list[Path]
    """All files, sorted, without those of programs, hidden files, by-products of systems, and their folders."""
    left_out: list[Path]
    """Hidden pictures, and the folders that are left out or cannot be read."""
    written: list[Path]
    """Files that programs of this package wrote, by the manifests beside them, sorted."""


def find_files(folder: Path) -> list[Path]:
    """Return the ``files`` of :func:`list_folder`."""
    return list_folder(folder).files


def list_folder(folder: Path) -> Listing:
    """List the files below ``folder``. Links are followed, but each real folder is visited once, by its own name."""
    files, visited, other, unreadable = list[str](), set[str](), list[Path](), list[OSError]()
    written = list[Path]()
    silent_until = monotonic() + SILENT_LISTING
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unreadable.append):
        if (real := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real)
        if monotonic() > silent_until:
            warn_once(f"still listing the files of {folder}, now in {parent}: Ctrl-C stops it")
            silent_until = inf
        other += [Path(parent, name) for name in folders if is_byproduct(name)]
        hidden = (Path(parent, name) for name in names if is_byproduct(name))
        other += [path for path in hidden if is_image(path) or path.suffix == CLOUD]
        kept = [name for name in folders if not is_byproduct(name)]
        folders[:] = sorted(kept, key=lambda name: (os.path.islink(os.path.join(parent, name)), name))
        outputs = written_names(Path(parent), names)
        written += [Path(parent, name) for name in names if name in outputs]
        files += [os.path.join(parent, name) for name in names if not is_byproduct(name) and name not in outputs]
    # Paths are compared by their parts, texts are not; and texts are compared faster.
    files.sort(key=lambda path: path.replace(os.sep, "\0"))
    return Listing([*map(Path, files)], other + [Path(error.filename) for error in unreadable], sorted(written))


def is_byproduct(name: str) -> bool:
    """Return whether a file or folder is hidden, or a by-product of a system, by its name."""
    return name.startswith(".") or name.lower() in BYPRODUCTS or name.lower().endswith(".lrdata")


def files_fingerprint(folder: Path, files: Sequence[Path]) -> str:
    """Hash the place of ``folder``, the path of each file in it, its size and its times, and parts of some contents.

    The time of the last change of status is among the times: unlike the time of modification, programs cannot set it.
    The contents are for file systems that keep no such time. Only some files are opened, since opening each of 200,000
    files takes minutes on a disk or a network file system whose cache is cold.
    """
    digest, regular, beginning = blake2b(os.fsencode(os.path.realpath(folder)), digest_size=16), [], f"{folder}{os.sep}"
    for path in map(str, files):
        identity: tuple[int, ...] = ()  # of a link that leads nowhere
        with suppress(OSError):
            found = os.stat(path)
            identity = found.st_size, found.st_mtime_ns, found.st_ctime_ns
            if S_ISREG(found.st_mode):
                regular.append((path, found.st_size))
        digest.update(os.fsencode(f"{path.removeprefix(beginning)}\0{identity}\n"))
    for path, size in regular[:: 1 + len(regular) // SAMPLED]:
        digest.update(_sample(path, size))
    return digest.hexdigest()


def _sample(path: str, size: int) -> bytes:
    """Return the first, the middle and the last bytes of a file of ``size`` bytes; none if it cannot be read."""
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        middle, end = max(0, (size - BLOCK) // 2), max(0, size - BLOCK)
        return b"".join(os.pread(file.fileno(), BLOCK, start) for start in sorted({0, middle, end}))
    return b""
