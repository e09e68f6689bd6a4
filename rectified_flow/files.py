"""Files that are whole or absent, and locks that end with their process."""

import os
from pathlib import Path

from filelock import FileLock


def lock_of(path: Path) -> FileLock:
    """The operating system's lock on ``path``.

    Never a mere marker file in its place, which would outlive a process that is killed: where the file system has no
    locks, acquiring it raises NotImplementedError.
    """
    return FileLock(path, fallback_to_soft=False)


def flush(path: Path) -> None:
    """Have the operating system put a file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Flush every file in ``folder``, then the folder."""
    for path in [*folder.iterdir(), folder]:
        flush(path)


def replace_file(path: Path, content: bytes | str) -> None:
    """Write ``content`` beside ``path``, flush it and rename it there."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    flush(beside)
    beside.replace(path)
