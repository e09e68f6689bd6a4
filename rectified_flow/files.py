"""Files that are whole or absent, folders that can be written, and locks that end with their process."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from rectified_flow.errors import UsageError


def lock_of(path: Path) -> FileLock:
    """The operating system's lock on ``path``.

    A marker file in its place would outlive a killed process, so on a file system without locks acquiring this one
    raises NotImplementedError.
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


def replace_file(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write ``content`` beside ``path`` and rename it there, so that the file is whole or absent.

    Args:
        path: the file.
        content: bytes, or text for UTF-8.
        durable: wait until the disk has it.

    Raises:
        OSError: if that fails; the file is then as it was.
    """
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            flush(beside)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def prepare_folder(flag: str, folder: Path) -> Path:
    """Make ``folder`` and check that it can be written.

    Args:
        flag: the option that names the folder, for the error message.
        folder: the folder.

    Raises:
        UsageError: if it cannot be made or written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"a full disk shows here")
    except OSError as error:
        raise UsageError(f"--{flag} {folder} cannot be written: {error.strerror}") from error
    return folder
