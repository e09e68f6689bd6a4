"""Files that are whole or absent, folders that can be written, and locks that end with their process."""

import json
import os
import tempfile
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from errno import EACCES, EMFILE, ENAMETOOLONG, ENFILE, ENOENT, ENOMEM, EPERM, ESTALE, ETIMEDOUT
from functools import cache
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from secrets import token_hex
from stat import S_IRUSR, S_ISREG, S_IWUSR
from typing import TYPE_CHECKING, TypeVar, cast

from filelock import FileLock, Timeout

from rectified_flow.errors import LONGEST, BusyError, DamageError, NewerError, RunError, UsageError
from rectified_flow.system.terminal import warn_once

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PASSING = (EMFILE, ENFILE, ENOMEM, ESTALE, ETIMEDOUT)
"""Error numbers of temporary errors, such as a busy network disk or too many open files."""
NO_DAMAGE = (EACCES, EPERM, *PASSING)
"""Error numbers that do not indicate damage: missing permissions or temporary errors."""
SILENT_WAIT = 1.0  # time after which a line says that another process is waited for [s]
LOCK_TIMEOUT = 10.0
"""Time to wait for a process that is ending; loader processes may outlive a killed run by five seconds [s]."""


@contextmanager
def locked(
    folder: Path,
    name: str,
    busy: str = "",
    timeout: float = -1,
    remedy: str = "choose another folder",
    *,
    is_contested: bool = False,
) -> Iterator[None]:
    """Hold the lock of ``name`` in ``folder`` inside the block; on a file system without locks, warn instead.

    The operating system releases a lock when its process ends, even if it is killed. The file of the lock is the hidden
    file ``.NAME.lock``, which every user who may write in the folder may open.

    Args:
        folder: an existing folder.
        name: what is locked, such as a store in the folder, or the run in it.
        busy: beginning of the error message, such as "another process is writing to FOLDER".
        timeout: time to wait for another process that holds the lock [s]; negative waits as long as it takes.
        remedy: end of the error message.
        is_contested: whether other processes of the same program lock it, too, so that a missing lock is an error.
    """
    path = folder / f".{name}.lock"
    with ExitStack() as held:
        try:
            mode = folder.stat().st_mode & 0o666 | S_IRUSR | S_IWUSR
            # A marker file in place of a lock would outlive a killed process.
            lock = FileLock(path, mode=mode, fallback_to_soft=False)
            held.enter_context(_acquired(lock, busy or f"another process holds {path}", timeout))
        except Timeout as error:
            raise BusyError(f"{busy}: wait until it ends, or {remedy}") from error
        except PermissionError as error:
            raise UsageError(f"{path} cannot be opened ({error.strerror}): {remedy}, or permit access") from error
        except (OSError, NotImplementedError) as error:
            if is_contested:
                several = f"{folder} cannot be locked ({error}), and several processes would write there"
                raise UsageError(f"{several}: run with one process first, or {remedy}") from error
            warn_once(f"{folder} cannot be locked ({error}): make sure that no other process writes there")
        yield


def _acquired(lock: FileLock, busy: str, timeout: float) -> AbstractContextManager[object]:
    """Acquire a lock, and print a line if that takes longer than a second; raise Timeout after ``timeout`` seconds."""
    if 0 <= timeout <= SILENT_WAIT:
        return lock.acquire(timeout=timeout)
    with suppress(Timeout):
        return lock.acquire(timeout=SILENT_WAIT)
    warn_once(f"{busy}: waiting until it ends")
    return lock.acquire(timeout=timeout if timeout < 0 else timeout - SILENT_WAIT)


def flush(path: Path) -> None:
    """Have the operating system put a file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some file systems cannot flush a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes | str, *, durable: bool = True, beside: Path | None = None) -> None:
    """Write ``content`` beside ``path`` and rename it there, so that the file is whole or absent.

    Processes may replace the same file at once; the last rename stays. A process that is killed while it writes leaves
    a hidden file.

    Args:
        path: file to write.
        content: bytes, or text that is encoded as UTF-8.
        durable: wait until the content is on the disk.
        beside: another path on the same disk, beside which the content is written first.
    """
    place = beside or path
    # A part of the name, since file systems limit names to 255 bytes, and a character has up to 4.
    temporary = place.with_name(f".{place.name[:50]}.{token_hex(4)}.tmp")
    try:
        # Not by tempfile, whose files no other user may read.
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # absent after the file was renamed


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an error in reading ``path`` into a sentence."""
    try:
        yield
    except OSError as error:
        problem = "is missing" if error.errno == ENOENT else f"cannot be read ({error.strerror or error})"
        sentence = f"{error.filename or path} {problem}"
        if error.errno in NO_DAMAGE:
            raise UsageError(f"{sentence}: change its permissions, or try again") from error
        raise DamageError(sentence) from error


@contextmanager
def writing(
    what: object, kind: type[Exception] = RunError, remedy: str = "make room, or choose another folder"
) -> Iterator[None]:
    """Raise ``kind``, with a sentence that ends with ``remedy``, if an error occurs in writing ``what``."""
    try:
        yield
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            raise UsageError(f"the name of {error.filename or what} is too long: choose a shorter name") from error
        raise kind(f"{what} cannot be written ({error.strerror or error}): {remedy}") from error


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read it: reading a pipe might wait, and a device might never end."""
    if "\0" in str(path):
        raise OSError("its name contains a null character")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """Read a regular file, with the errors of :func:`reading`."""
    with reading(path), open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a text in UTF-8, or in UTF-16 with a byte order mark, with the ends of lines of Unix."""
    content = read_bytes(path)
    encoding = "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    with suppress(UnicodeDecodeError):
        text = content.decode(encoding)
        if "\0" not in text:  # every second byte of UTF-16 without a mark is 0
            return text.replace("\r\n", "\n").replace("\r", "\n")
    raise UsageError(f"{path} is not encoded as UTF-8, but perhaps as Windows-1252: save it as UTF-8")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text that are not empty, as :func:`read_text` does."""
    # Not by splitlines, which also cuts a line at characters such as U+2028 that are copied with a text.
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, with the errors of :func:`reading`."""
    with reading(path), open_regular(path) as file:
        return file_digest(file, "sha256").hexdigest()


def printable(path: Path | str) -> str:
    """Return ``path`` for text and JSON, with escapes for bytes that are not UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()


def usable_path(name: str, path: Path) -> Path:
    """Return ``path`` with ``~`` expanded."""
    try:
        str(path).encode()  # a JSON file cannot contain a name that is not UTF-8
        if "\0" in str(path):
            raise ValueError("its name contains a null character")
        return path.expanduser()
    except (ValueError, RuntimeError) as error:
        reason = "its name is not UTF-8" if isinstance(error, UnicodeError) else str(error).rstrip(".")
        raise UsageError(f"{name} {printable(path)} cannot be used ({reason}): choose another path") from error


def prepare_folder(flag: str, folder: Path) -> Path:
    """Make ``folder``, which the option ``flag`` names, and return it; a UsageError if it cannot be written."""
    with writing(f"`{flag}` {folder}", UsageError):
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
    return folder


def check_folder(flag: str, folder: Path) -> Path:
    """Return ``folder`` as :func:`prepare_folder` does, and with its errors, but without making it."""
    with writing(f"`{flag}` {folder}", UsageError):
        for place in (folder, *folder.parents):
            with suppress(FileNotFoundError):
                place.lstat()  # other errors, such as that of a name that is too long, are those of the folder
                _probe(place)
                break
    return folder


def _probe(folder: Path) -> None:
    """Write a file without a name into a folder."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"a full disk shows here")


T = TypeVar("T")


def read_document(path: Path, schema: type[T]) -> T:
    """Read the JSON document at ``path``, with the errors of :func:`reading` and :func:`parse_document`."""
    return parse_document(read_bytes(path).removeprefix(BOM_UTF8), schema, path)  # editors of Windows add the mark


def parse_document(content: bytes | str, schema: type[T], source: object) -> T:
    """Parse a JSON document."""
    from pydantic import ValidationError  # as slow to import as the rest of a command line

    try:
        return cast(T, _adapter(schema).validate_json(content, strict=True, extra="forbid"))  # type: ignore[arg-type]
    except ValidationError as error:
        problems = error.errors(include_url=False)
    newer = [each for each in problems if each["type"] == "unexpected_keyword_argument"]
    if any(each["type"] == "missing" for each in problems):
        newer = []  # a newer version adds keys; a document that lacks some is another program's, or damaged
    problem = [*newer, *problems][0]
    key = ".".join(map(str, problem["loc"]))
    if newer:
        raise NewerError(f"{source} was written by a newer version of this project (it has the key {key!r}): upgrade")
    words = f"{key} {problem['msg']}".strip()
    if problem["type"] not in ("json_invalid", "missing"):
        shown, message = json.dumps(problem["input"], default=repr), problem["msg"]
        short = f"{shown[:LONGEST]}{'...' * (len(shown) > LONGEST)}"
        words = f"{key or 'it'} is {short}, but {message[0].lower()}{message[1:]}"
    raise DamageError(f"{source} is damaged: {words}")


def check_document(document: object, schema: type[T], source: object) -> T:
    """Check a document that was read already, as :func:`parse_document` does."""
    return parse_document(json.dumps(document), schema, source)


@cache
def _adapter(schema: type[object]) -> "TypeAdapter[object]":
    from pydantic import TypeAdapter

    return TypeAdapter(schema)
