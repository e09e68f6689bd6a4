"""Text files as lines: an index of byte offsets on the disk, and the text itself in a memory map.

An index is a folder beside its file, or in the cache where that cannot be written: ``starts.uint64`` ``[n]`` and
``info.json``. All processes that read lines share the page cache's copy of both.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from rectified_flow.data.build import default_cache_dir
from rectified_flow.errors import DamageError, UsageError, require
from rectified_flow.system.files import (
    flush_folder,
    lock_of,
    open_regular,
    read_document,
    reading,
    remove,
    usable_path,
    write_document,
)
from rectified_flow.system.machine import require_disk
from rectified_flow.system.terminal import progress_bar

STARTS_FILE, INFO_FILE, PROGRESS_FILE = "starts.uint64", "info.json", "progress.json"
BLOCK = 2**24
"""Bytes that are indexed at once; a line may not be longer."""
GZIP, BYTE_ORDER_MARK = b"\x1f\x8b", b"\xef\xbb\xbf"
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Starts = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class IndexInfo:
    """``info.json``, and ``progress.json`` of an index that is being built."""

    size: Natural
    """Of the text [bytes]."""
    time: Natural
    """Of its last change [ns]."""
    skip_empty: bool
    done: Natural = 0
    """Bytes that are indexed."""
    read: Natural = 0
    """Lines in these, empty ones too."""
    lines: Natural = 0
    """Lines in the index."""
    hashes: list[str] = field(default_factory=list)
    """Of the blocks of the text."""
    sha256: str = ""
    """Of this document."""

    @property
    def content(self) -> str:
        """Hash of the text."""
        return blake2b("".join(self.hashes).encode(), digest_size=16).hexdigest()


class LineStore(Sequence[str]):
    """The lines of text files, in order, without their ends.

    Pickles as paths; each process maps the files when it first reads.

    Args:
        paths: UTF-8 text files with indexes, see :func:`open_lines`.
        indexes: the index of each.
    """

    def __init__(self, paths: Sequence[Path], indexes: Sequence[Path]) -> None:
        self.paths, self.indexes = [*paths], [*indexes]
        infos = [read_document(index / INFO_FILE, IndexInfo) for index in self.indexes]
        self._ends = np.cumsum([info.lines for info in infos])
        content = "".join(f"{info.content} {info.skip_empty}" for info in infos)
        self.fingerprint = blake2b(content.encode(), digest_size=16).hexdigest()
        """Hash of the lines: equal texts have equal fingerprints, wherever they are."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"line {index} is out of range for {len(self)} lines")
        index %= len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._files[number].line(index - (int(self._ends[number - 1]) if number else 0))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_files"}

    @cached_property
    def _files(self) -> list["_File"]:
        return [_File(path, index) for path, index in zip(self.paths, self.indexes, strict=True)]


class _File:
    """One text file and its index, mapped."""

    def __init__(self, path: Path, index: Path) -> None:
        self.path = path
        with reading(path), open_regular(path) as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with reading(index / STARTS_FILE):
            self.starts: Starts = np.memmap(index / STARTS_FILE, "<u8", "r")

    def line(self, number: int) -> str:
        if self.path.stat().st_size < len(self.text):  # else reading would end the process
            raise UsageError(f"{self.path} was cut while it was read: start again")
        start = int(self.starts[number])
        end = self.text.find(b"\n", start)
        line = self.text[start : len(self.text) if end < 0 else end]
        return line.removesuffix(b"\r").decode()


def open_lines(*paths: Path, skip_empty: bool = True, cache_dir: Path | None = None) -> LineStore:
    """Open text files as lines, building an index of each first if it has none.

    One process builds while others wait for its lock. An index is whole or absent, and a build that was killed goes on
    where it was. A file that has changed gets a new index.

    Args:
        paths: UTF-8 text files.
        skip_empty: leave empty lines out.
        cache_dir: folder for the indexes of files in folders that cannot be written; by default the user's cache.

    Raises:
        UsageError: if a file is missing, a folder, empty, compressed or not UTF-8, or its index cannot be written.
    """
    require(bool(paths), "no text file was given: name at least one")
    paths = tuple(usable_path("the text file", Path(path)).absolute() for path in paths)
    return LineStore(paths, [_open_index(path, skip_empty, cache_dir) for path in paths])


def _open_index(path: Path, skip_empty: bool, cache_dir: Path | None) -> Path:
    _check(path)
    index = _place(path, skip_empty, cache_dir)
    if _is_current(index, path):
        return index
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with lock_of(Path(f"{index}.lock")):
            if not _is_current(index, path):
                remove(index)
                _Build(path, index.with_name(f"{index.name}.building"), skip_empty).into(index)
        return index
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the index {index} of {path} cannot be written ({reason}): make room, or set RECTIFIED_FLOW_CACHE to a "
            "folder that can be written"
        ) from error


def _check(path: Path) -> None:
    require(not path.is_dir(), f"{path} is a folder: name text files")
    with reading(path), open_regular(path) as file:
        start = file.read(2)
    require(start != b"", f"{path} is empty")
    require(start != GZIP, f"{path} is compressed, and lines in it cannot be found: unpack it first (gunzip -k)")


def _place(path: Path, skip_empty: bool, cache_dir: Path | None) -> Path:
    """Where the index of a file is, or goes."""
    kind = "lines" if skip_empty else "all-lines"
    beside = path.with_name(f"{path.name}.{kind}")
    if os.access(path.parent, os.W_OK) or (beside / INFO_FILE).exists():
        return beside
    key = blake2b(str(path).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return (cache_dir or default_cache_dir()) / f"{path.name[-40:]}-{key}.{kind}"


def _is_current(index: Path, path: Path) -> bool:
    """Whether there is an undamaged index of the file as it is now."""
    try:
        info = read_document(index / INFO_FILE, IndexInfo)
        with reading(index / STARTS_FILE):
            whole = (index / STARTS_FILE).stat().st_size == 8 * info.lines
    except DamageError:
        return False
    now = path.stat()
    if not whole or info.size != now.st_size:
        return False
    return info.time == now.st_mtime_ns or _hashes(path) == info.hashes


def _hashes(path: Path) -> list[str]:
    """Of the blocks of a file, whose time alone may have changed, as after copying."""
    with reading(path), open_regular(path) as file:
        return [_hash(block) for block in iter(lambda: _read_block(file), b"")]


def _read_block(file: Any) -> bytes:
    """The next whole lines, some ``BLOCK`` bytes."""
    block: bytes = file.read(BLOCK)
    return block if block.endswith(b"\n") else block + file.readline(BLOCK)


def _hash(block: bytes) -> str:
    return blake2b(block, digest_size=16).hexdigest()


@dataclass
class _Build:
    """Builds the index of one file.

    Args:
        path: the text.
        stage: the folder that the index grows in.
        skip_empty: leave empty lines out.
    """

    path: Path
    stage: Path
    skip_empty: bool

    def into(self, index: Path) -> None:
        """Build it, from where an earlier build ended, and give it its name."""
        with reading(self.path), open_regular(self.path) as file:
            info = self._begin(os.fstat(file.fileno()))
            file.seek(info.done)
            bar = progress_bar(
                total=info.size, initial=info.done, desc=f"indexing {self.path.name}", unit="B", unit_scale=True
            )
            with bar, (self.stage / STARTS_FILE).open("r+b") as starts:
                starts.truncate(8 * info.lines)
                starts.seek(0, os.SEEK_END)
                while block := _read_block(file):
                    info = self._add(block, info, starts)
                    bar.update(len(block))
            now = os.fstat(file.fileno())
        require(
            (info.done, info.time) == (now.st_size, now.st_mtime_ns),
            f"{self.path} changed while it was read: start again when it is whole",
        )
        require(info.lines > 0, f"{self.path} has no lines but empty ones")
        write_document(self.stage / INFO_FILE, asdict(info))
        (self.stage / PROGRESS_FILE).unlink()
        flush_folder(self.stage)
        self.stage.rename(index)

    def _begin(self, stat: os.stat_result) -> IndexInfo:
        """What is done already."""
        fresh = IndexInfo(stat.st_size, stat.st_mtime_ns, self.skip_empty)
        try:
            known = read_document(self.stage / PROGRESS_FILE, IndexInfo)
            if (known.size, known.time, known.skip_empty) == (fresh.size, fresh.time, fresh.skip_empty):
                return known
        except DamageError:
            pass
        remove(self.stage)
        require_disk(fresh.size // 4, self.stage.parent, f"the index of {self.path}", "make room")
        self.stage.mkdir(parents=True)
        (self.stage / STARTS_FILE).touch()
        write_document(self.stage / PROGRESS_FILE, asdict(fresh))
        return fresh

    def _add(self, block: bytes, info: IndexInfo, starts: Any) -> IndexInfo:
        """Index the lines of a block, and record that."""

        def number(offset: int | None = None) -> int:
            """Of the line at ``offset`` in the block, or of the last."""
            return info.read + block.count(b"\n", 0, offset) + 1

        require(
            block.endswith(b"\n") or info.done + len(block) == info.size,
            f"line {number()} of {self.path} is longer than {BLOCK} bytes: is it a text?",
        )
        try:
            block.decode()
        except UnicodeDecodeError as error:
            line = number(error.start)
            raise UsageError(f"line {line} of {self.path} is not UTF-8: convert the file (iconv -t UTF-8)") from error
        found, read = line_starts(block, skip_empty=self.skip_empty)
        if info.done == 0 and block.startswith(BYTE_ORDER_MARK) and len(found) and found[0] == 0:
            found[0] = len(BYTE_ORDER_MARK)
        starts.write((found + np.uint64(info.done)).astype("<u8").tobytes())
        starts.flush()
        os.fsync(starts.fileno())
        info = replace(
            info,
            done=info.done + len(block),
            read=info.read + read,
            lines=info.lines + len(found),
            hashes=[*info.hashes, _hash(block)],
        )
        write_document(self.stage / PROGRESS_FILE, asdict(info))
        return info


def line_starts(block: bytes, *, skip_empty: bool) -> tuple[Starts, int]:
    """Offsets of the lines of a block of whole lines, and how many lines it has with the empty ones."""
    values = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(values == ord("\n"))
    if not block.endswith(b"\n"):
        ends = np.append(ends, len(block))
    starts = np.concatenate(([0], ends[:-1] + 1))
    if skip_empty:
        lengths = ends - starts
        only_return = (lengths == 1) & (values[np.minimum(starts, len(values) - 1)] == ord("\r"))
        kept = starts[(lengths > 0) & ~only_return]
    else:
        kept = starts
    return kept.astype(np.uint64), len(ends)
