"""The manifest of a folder: the size and hash of each of its files, by which damage is noticed."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rectified_flow.errors import DamageError, NewerError
from rectified_flow.system.files import hash_file, read_document, reading

MANIFEST = "manifest.json"
FORMAT = 1
"""Of checkpoints; to be raised when a program that knows the keys of one would still misunderstand it."""
KINDS = (".json", ".safetensors")
"""Of the files that are read; a user may keep others beside them, and a copy may leave hidden ones."""

Natural = Annotated[int, Field(ge=0, lt=2**53)]
FileName = Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")]
"""Of a file in the folder itself."""


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    size: Natural
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is in a folder."""

    step: Natural
    files: dict[FileName, FileRecord]
    format: Natural = FORMAT
    """Earlier versions did not record it."""


def write_manifest(folder: Path, step: int) -> None:
    """Describe all files that are in ``folder``."""
    files = {file.name: FileRecord(file.stat().st_size, hash_file(file)) for file in folder.iterdir()}
    _write(folder, Manifest(step, files))


def write_part(manifest: Manifest, folder: Path, names: Collection[str]) -> None:
    """Describe the files in ``folder``, which are some of those of another folder's ``manifest``."""
    _write(folder, Manifest(manifest.step, {name: manifest.files[name] for name in names}))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``.

    Raises:
        UsageError: if it may not be read.
        NewerError: if the folder was written by a newer version of this project.
        DamageError: if it is damaged.
    """
    path = folder / MANIFEST
    manifest = read_document(path, Manifest)
    if manifest.format > FORMAT:
        raise NewerError(
            f"{folder} was written by a newer version of this project (in format {manifest.format}, and this one knows "
            f"{FORMAT}): upgrade"
        )
    return manifest


def find_damage(folder: Path) -> str | None:
    """The damage of what is in ``folder`` in words, or None.

    Raises:
        UsageError: if a file may not be read, or a newer version of this project wrote it, which is no damage.
    """
    try:
        with reading(folder):
            return _compare(folder, read_manifest(folder).files)
    except NewerError:
        raise
    except DamageError as error:
        return str(error)


def _compare(folder: Path, files: Mapping[str, FileRecord]) -> str | None:
    for name, expected in files.items():
        if (folder / name).stat().st_size != expected.size:
            return f"{name} has the wrong size"
        if hash_file(folder / name) != expected.sha256:
            return f"{name} was altered"
    for path in folder.iterdir():
        if path.suffix in KINDS and path.name not in (*files, MANIFEST) and not path.name.startswith("."):
            return f"{path.name} is not in its manifest"
    return None


def _write(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
