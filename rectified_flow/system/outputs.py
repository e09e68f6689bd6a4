"""Output files in the folders of a user, written without replacing any file of the user.

The hidden record of an output folder, ``.rectified-flow.json``, lists the names of the files that programs wrote there.
A program replaces only files in the record. Any other file, link or folder belongs to the user: if it has the name of
an output, the program raises an error that names the path, and writes nothing there. A name is added to the record
before its file is written, so a killed program leaves no file without a record.

For folders that are built as a whole (stores and checkpoints), the manifest takes the place of the record; see
:mod:`rectified_flow.system.artifact`.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from os.path import lexists
from pathlib import Path

from rectified_flow.errors import UsageError
from rectified_flow.system.artifact import is_artifact
from rectified_flow.system.files import locked, read_document, replace_file, writing

RECORD = ".rectified-flow.json"
LOCK = f"{RECORD}.lock"
"""Lock that a program holds while it changes the record, or another document of the folder."""


@dataclass(frozen=True)
class Record:
    """The contents of ``.rectified-flow.json``: the names of the files and subfolders that programs wrote there."""

    files: list[str]


def claim(folder: Path, names: Iterable[str], *, ours: bool = False) -> None:
    """Record that programs write files or subfolders of these names into ``folder``. Call in one process only.

    With ``ours``, for the folder of a run, a folder without a record is treated as written by this project, because a
    copy of a run may lack hidden files.
    """
    if is_artifact(folder):
        raise UsageError(f"{folder} is a checkpoint or another complete artifact: choose another folder")
    paths, record = list(names), folder / RECORD
    names = list(dict.fromkeys(path.partition("/")[0] for path in paths))
    with writing(record), locked(folder / LOCK):
        written = set(os.listdir(folder) if ours else ())
        if known := lexists(record):
            written = set(read_document(record, Record).files)
        for name in names:
            path = folder / name
            linked = path.is_symlink() and not path.is_dir()  # writing would replace the link or its target
            if linked or (lexists(path) and name not in written):
                raise UsageError(f"{path} would be overwritten, and this project did not write it: move it away")
        if not written.issuperset(names) or (written and not known):
            replace_file(record, json.dumps({"files": sorted(written.union(names))}, indent=1))
    for name in names:
        if inside := [path.partition("/")[2] for path in paths if path.startswith(f"{name}/")]:
            (folder / name).mkdir(exist_ok=True)
            claim(folder / name, inside)


def write_output(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write or replace a file as :func:`replace_file` does, unless ``path`` is a file of the user."""
    claim(path.parent, [path.name])
    replace_file(path, content, durable=durable)
