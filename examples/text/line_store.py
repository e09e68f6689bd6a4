"""Text files as lines that stay on the disk, whatever their number.

The index of a file is a folder beside it, or in the cache where its folder cannot be written: ``starts.uint64`` ``[n]``
has the byte offset of each line. A line is read from the text itself when it is asked for. All processes share the
operating system's cache of both files, so that eight of them need the memory of one.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rectified_flow.data.build import default_cache_dir
from rectified_flow.errors import UsageError
from rectified_flow.system.artifact import Artifact, remove
from rectified_flow.system.files import read_document, usable_path
from rectified_flow.system.terminal import progress_bar

KIND, STARTS_FILE, INFO_FILE = "text index", "starts.uint64", "info.json"
BLOCK = 2**24
"""Bytes that are indexed at once."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Starts = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class IndexInfo:
    """The contents of ``info.json``, and the progress of a build."""

    size: int
    """Size of the text [bytes]."""
    time: int
    """Time of its last change [ns]."""
    skip_empty: bool
    done: int = 0
    """Bytes that are indexed."""
    read: int = 0
    """Lines in these bytes, including empty ones."""
    lines: int = 0
    """Lines in the index."""
    hashes: list[str] = field(default_factory=list)
    """Hash of each block of the text."""


class LineStore(Sequence[str]):
    """The lines of text files, in order, without their ends.

    A store pickles as paths. Each process opens the files when it first reads.

    Args:
        paths: UTF-8 text files.
        indexes: the index of each file, see :func:`open_lines`.
    """

    def __init__(self, paths: Sequence[Path], indexes: Sequence[Path]) -> None:
        self.paths, self.indexes = [*paths], [*indexes]
        infos = [read_document(index / INFO_FILE, IndexInfo) for index in indexes]
        self._sizes = [info.size for info in infos]
        self._ends = np.cumsum([info.lines for info in infos])
        content = "".join(f"{_hash(''.join(info.hashes).encode())} {info.skip_empty}" for info in infos)
        self.fingerprint = _hash(content.encode())
        """Hash of the lines: equal texts have equal fingerprints, wherever they are."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"line {index} is out of range for {len(self)} lines")
        index %= len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._files[number].line(index - (int(self._ends[number - 1]) if number else 0))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_files"}

    @cached_property
    def _files(self) -> list["_File"]:
        return [_File(*each) for each in zip(self.paths, self.indexes, self._sizes, strict=True)]


class _File:
    """One text file and its index, open."""

    def __init__(self, path: Path, index: Path, size: int) -> None:
        self.path, self.size, self.text = path, size, path.open("rb", buffering=0)
        self.starts: Starts = np.memmap(index / STARTS_FILE, "<u8", "r")

    def line(self, number: int) -> str:
        start = int(self.starts[number])
        end = int(self.starts[number + 1]) if number + 1 < len(self.starts) else self.size
        # pread has no position that processes could share, and a file that was cut gives less: a map would crash.
        text = os.pread(self.text.fileno(), end - start, start)
        if len(text) != end - start:
            raise UsageError(f"{self.path} was truncated while it was read: run the command again")
        return text.partition(b"\n")[0].removesuffix(b"\r").decode()  # empty lines may follow


def open_lines(*paths: Path, skip_empty: bool = True, cache_dir: Path | None = None) -> LineStore:
    """Open text files as lines, and build an index of each file that has none.

    One process builds while others wait for its lock. A build that was killed resumes where it stopped. A file that has
    changed gets a new index.

    Args:
        paths: UTF-8 text files.
        skip_empty: leave empty lines out.
        cache_dir: folder for the indexes of files in folders that cannot be written; by default the user's cache.

    Raises:
        UsageError: if a file is missing, a folder, empty or not UTF-8, or its index cannot be written.
    """
    files = [usable_path("the text file", Path(path)).absolute() for path in paths]
    return LineStore(files, [_open_index(path, skip_empty, cache_dir) for path in files])


def _open_index(path: Path, skip_empty: bool, cache_dir: Path | None) -> Path:
    if not path.exists():
        raise UsageError(f"{path} does not exist: pass another file")
    if not path.is_file():
        raise UsageError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}: pass text files")
    if path.stat().st_size <= 0:
        raise UsageError(f"{path} is empty: pass another file")
    index = Artifact(_place(path, skip_empty, cache_dir), KIND, (STARTS_FILE, INFO_FILE))
    if not _is_current(index, path):
        with index.locked("make room, or set RECTIFIED_FLOW_CACHE to a folder that can be written"):
            if not _is_current(index, path):
                _build(index, path, skip_empty)
    return index.path


def _place(path: Path, skip_empty: bool, cache_dir: Path | None) -> Path:
    """Return the folder of a file's index."""
    kind = "lines-index" if skip_empty else "all-lines-index"
    beside = path.with_name(f"{path.name}.{kind}")
    if os.access(path.parent, os.W_OK) or beside.exists():
        return beside
    return (cache_dir or default_cache_dir()) / f"{path.name[-40:]}-{_hash(os.fsencode(path), 8)}.{kind}"


def _is_current(index: Artifact, path: Path) -> bool:
    """Return whether the index is whole, and the file is as it was when it was indexed."""
    if not index.is_whole:
        return False
    info, now = read_document(index.path / INFO_FILE, IndexInfo), path.stat()
    if info.size != now.st_size or info.time == now.st_mtime_ns:
        return info.size == now.st_size
    with path.open("rb") as file:  # the time alone may have changed, as after copying
        return info.hashes == [_hash(block) for block in iter(partial(_read_block, file), b"")]


def _build(index: Artifact, path: Path, skip_empty: bool) -> None:
    """Build the index of a file, from where an earlier build stopped."""
    if index.is_whole:  # it is of an earlier text
        remove(index.path, KIND)
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        source = {"size": stat.st_size, "time": stat.st_mtime_ns, "skip_empty": skip_empty}
        info = IndexInfo(**(index.begin(source) or source))
        file.seek(info.done)
        bar = progress_bar(total=info.size, initial=info.done, desc=f"indexing {path.name}", unit="B", unit_scale=True)
        with bar, (index.stage / STARTS_FILE).open("ab") as starts:
            starts.truncate(8 * info.lines)
            for block in iter(partial(_read_block, file), b""):
                found, info = _index_block(block, info, path)
                starts.write(found.astype("<u8").tobytes())
                starts.flush()
                os.fsync(starts.fileno())
                index.reached(asdict(info))
                bar.update(len(block))
        now = os.fstat(file.fileno())
    unchanged = (info.done, info.time) == (now.st_size, now.st_mtime_ns)
    if not unchanged:
        raise UsageError(f"{path} changed while it was read: run the command again when it is complete")
    if info.lines <= 0:
        raise UsageError(f"{path} contains only empty lines: pass another file")
    (index.stage / INFO_FILE).write_text(json.dumps(asdict(info)))
    index.finish()


def _read_block(file: BinaryIO) -> bytes:
    """Read whole lines of some ``BLOCK`` bytes."""
    block = file.read(BLOCK)
    return block if block.endswith(b"\n") else block + file.readline()


def _index_block(block: bytes, info: IndexInfo, path: Path) -> tuple[Starts, IndexInfo]:
    """Return the offsets of the lines of a block in the file, and the progress after it."""
    try:
        block.decode()
    except UnicodeDecodeError as error:
        line = info.read + block.count(b"\n", 0, error.start) + 1
        remedy = "unpack or convert the file (gunzip -k, iconv -t UTF-8)"
        raise UsageError(f"line {line} of {path} is not UTF-8: {remedy}") from error
    starts, read = line_starts(block, skip_empty=info.skip_empty)
    if info.done == 0 and block.startswith(BYTE_ORDER_MARK):
        starts[0] = len(BYTE_ORDER_MARK)
    done, hashes = info.done + len(block), [*info.hashes, _hash(block)]
    progress = replace(info, done=done, read=info.read + read, lines=info.lines + len(starts), hashes=hashes)
    return starts + np.uint64(info.done), progress


def line_starts(block: bytes, *, skip_empty: bool) -> tuple[Starts, int]:
    """Return the offsets of the lines of a block of whole lines, and its number of lines with the empty ones."""
    values = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(values == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts
    only_return = (lengths == 1) & (values[np.minimum(starts, len(values) - 1)] == ord("\r"))
    kept = starts[(lengths > 0) & ~only_return] if skip_empty else starts
    return kept.astype(np.uint64), len(ends)


def _hash(content: bytes, size: int = 16) -> str:
    return blake2b(content, digest_size=size).hexdigest()
