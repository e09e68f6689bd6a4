"""Single files in folders of the user's, written so that no file of the user's is ever replaced.

A folder that programs write into has a hidden record, ``.rectified-flow.json``, of the names of the files that they
wrote there. A program replaces only a file whose name is in the record. Any other file, link or folder belongs to the
user: where it has a name that the program needs, the program refuses to start, or to write, with an error that names
it. A name enters the record before its file is written, so a killed program leaves no file without a record.

Folders that are built as a whole (stores, checkpoints) follow the same rule by their manifest, see
:mod:`rectified_flow.system.artifact`.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from os.path import lexists
from pathlib import Path

from rectified_flow.errors import UsageError
from rectified_flow.system.artifact import is_artifact
from rectified_flow.system.files import read_document, replace_file

RECORD = ".rectified-flow.json"


@dataclass(frozen=True)
class Record:
    """The contents of ``.rectified-flow.json``: the names of the files and folders that programs wrote beside it."""

    files: list[str]


def claim(folder: Path, names: Iterable[str], *, ours: bool = False) -> None:
    """Record that programs write files or subfolders of these names into ``folder``. Call in one process only.

    Args:
        folder: an existing folder.
        names: names in it.
        ours: the folder is the project's own, such as the folder of a run. Without a record, which versions before
            0.3 did not write, all that it holds is taken for the project's.

    Raises:
        UsageError: if one exists that the record does not have, the record cannot be read, or the folder is a
            checkpoint or store, in which a foreign file would count as damage.
        OSError: if the record cannot be written.
    """
    if is_artifact(folder):
        raise UsageError(f"{folder} is a checkpoint or another folder that is complete: choose a folder of its own")
    record, names = folder / RECORD, list(names)
    is_recorded = lexists(record)
    if is_recorded:
        written = set(read_document(record, Record).files)
    else:
        written = {entry.name for entry in folder.iterdir()} if ours else set()
    for name in names:
        path = folder / name
        linked = path.is_symlink() and not path.is_dir()  # the link would be replaced, or what it leads to written
        if linked or (lexists(path) and name not in written):
            raise UsageError(
                f"{path} would be overwritten, and this project did not write it: move it away, or choose another "
                "folder"
            )
    if not written.issuperset(names) or (written and not is_recorded):
        replace_file(record, json.dumps(asdict(Record(sorted(written.union(names)))), indent=1))


def write_output(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write or replace a file as :func:`replace_file` does, unless it is a file of the user's.

    Raises:
        UsageError: if it exists and the project did not write it.
        OSError: if it cannot be written.
    """
    claim(path.parent, [path.name])
    replace_file(path, content, durable=durable)
