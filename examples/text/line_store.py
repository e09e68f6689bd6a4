"""Lines of text files that stay on the disk, whatever their number.

An index of the files is a folder in the cache: ``starts.uint64`` ``[n]`` has the byte offset of each line in its file,
and ``info.json`` the files. A line is read from its file when it is asked for. All processes share the operating
system's cache of the files and of the index, so eight processes need hardly more memory than one.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow.data.store_writer import default_cache_dir
from rectified_flow.errors import UsageError
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import read_document, reading, usable_path
from rectified_flow.system.terminal import progress_bar

KIND, STARTS_FILE, INFO_FILE = "text index", "starts.uint64", "info.json"
BLOCK = 2**24
"""Bytes that are indexed at once."""
OPEN_FILES = 64
"""Files that a process keeps open."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACE = 32
"""Largest byte of ASCII white space and control characters."""
Starts = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class TextFile:
    """A text file as it was when it was indexed: its size [bytes] and the time of its last change [ns]."""

    path: str
    size: int
    time: int


@dataclass(frozen=True)
class IndexInfo:
    """The contents of ``info.json``."""

    files: list[TextFile]
    lines: list[int]
    """Lines of each file in the index."""
    fingerprint: str
    """Hash of the texts."""


class LineStore(Sequence[str]):
    """The lines of text files, in order, without their ends; opened by :func:`open_lines`.

    A store pickles as the path of its index and the number of lines. Each process opens the files when it first reads.

    Args:
        folder: folder of the index.
    """

    def __init__(self, folder: Path) -> None:
        info = read_document(folder / INFO_FILE, IndexInfo)
        self.folder, self.length = folder, sum(info.lines)
        self.fingerprint = info.fingerprint
        """Hash of the lines: equal texts have equal fingerprints, wherever they are."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """Return a line.

        Raises:
            IndexError: if there is no such line.
            UsageError: if the file has changed since it was indexed.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"line {index} is out of range for {len(self)} lines")
        return self._reader.line(index % len(self))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_reader"}

    @cached_property
    def _reader(self) -> "_Reader":
        return _Reader(self.folder, self.fingerprint)


class _Reader:
    """The open files of a store in one process."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        info = read_document(folder / INFO_FILE, IndexInfo)
        if info.fingerprint != fingerprint:
            raise UsageError(f"the text of {folder} changed during the run: run the command again")
        self.files, self.ends = info.files, np.array([*accumulate(info.lines)])
        self.starts: Starts = np.memmap(folder / STARTS_FILE, "<u8", "r")
        self.opened = lru_cache(OPEN_FILES)(_open)

    def line(self, number: int) -> str:
        which = int(np.searchsorted(self.ends, number, side="right"))
        file, is_last = self.files[which], number + 1 == self.ends[which]
        start, end = int(self.starts[number]), file.size if is_last else int(self.starts[number + 1])
        # Processes may share a file that was opened before they forked, and pread does not use its position. A memory
        # map of the text would crash the process if the file became shorter.
        text = os.pread(self.opened(file).fileno(), end - start, start)
        if len(text) != end - start:
            raise _changed(file)
        return text.partition(b"\n")[0].removesuffix(b"\r").decode()  # lines without text may follow


def _open(file: TextFile) -> FileIO:
    with reading(Path(file.path)):
        opened = FileIO(file.path)
    if _described(Path(file.path)) != file:
        raise _changed(file)
    return opened


def _changed(file: TextFile) -> UsageError:
    return UsageError(f"{file.path} changed after it was indexed: run the command again")


class _Index(Artifact):
    """The index of text files, which is rebuilt if a file has changed."""

    def __init__(self, path: Path, texts: list[TextFile]) -> None:
        super().__init__(path, KIND, (STARTS_FILE, INFO_FILE))
        self.texts = texts

    @property
    def is_whole(self) -> bool:
        return super().is_whole and read_document(self.path / INFO_FILE, IndexInfo).files == self.texts


def open_lines(paths: Sequence[Path], *, cache_dir: Path | None = None) -> LineStore:
    r"""Open text files as lines, and build an index of them unless there is one of the same files.

    Lines end with ``\n`` or ``\r\n``. Lines without text, which are empty or consist of spaces, are left out. One
    process builds the index while others wait for its lock.

    Args:
        paths: UTF-8 text files, or folders with ``.txt`` files.
        cache_dir: folder for the index; by default ``$RECTIFIED_FLOW_CACHE``, else the user's cache folder.

    Raises:
        UsageError: if a path has no text, a file is not UTF-8, or the index cannot be written.
    """
    texts = [_described(path) for path in find_files(paths)]
    key = sha256("\0".join(text.path for text in texts).encode()).hexdigest()[:16]
    index = _Index((cache_dir or default_cache_dir()) / f"{Path(texts[0].path).name[-40:]}-{key}.lines", texts)
    with index.claimed("make room, or set RECTIFIED_FLOW_CACHE to a folder that can be written") as is_missing:
        if is_missing:
            with index.building():
                _build(index)
    return LineStore(index.path)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Return the absolute paths of text files, and of the ``.txt`` files in folders, which are sorted."""
    found = list[Path]()
    for path in (usable_path("--text", path) for path in paths):
        if os.path.isfile(path):
            found.append(path.absolute())
        elif os.path.isdir(path):
            inside = sorted(each.absolute() for each in path.rglob("*.txt") if each.is_file())
            if not inside:
                raise UsageError(f"--text {path} is a folder without .txt files: pass text files")
            found += inside
        else:
            raise UsageError(f"--text {path} is not a file or a folder: pass text files")
    return [usable_path("--text", path) for path in found]


def _described(path: Path) -> TextFile:
    with reading(path):
        stat = path.stat()
    return TextFile(str(path), stat.st_size, stat.st_mtime_ns)


def _build(index: _Index) -> None:
    """Build the index in its stage."""
    lines, hashes = list[int](), list[str]()
    total, name = sum(text.size for text in index.texts), Path(index.texts[0].path).name
    bar = progress_bar(total=total, desc=f"indexing {name}", unit="B", unit_scale=True)
    with bar, (index.stage / STARTS_FILE).open("wb") as output:
        for text in index.texts:
            count, size, content = 0, 0, sha256()
            for block, starts in index_blocks(Path(text.path)):
                output.write((starts + np.uint64(size)).astype("<u8").tobytes())
                content.update(block)
                count, size = count + len(starts), size + len(block)
                bar.update(len(block))
            if _described(Path(text.path)) != text or size != text.size:
                raise UsageError(f"{text.path} changed while it was read: run the command again when it is complete")
            lines.append(count)
            hashes.append(content.hexdigest())
    if sum(lines) == 0:
        raise UsageError(f"--text {index.texts[0].path} contains no text: pass other files")
    info = IndexInfo(index.texts, lines, sha256("".join(hashes).encode()).hexdigest())
    (index.stage / INFO_FILE).write_text(json.dumps(asdict(info)))
    index.finish()


def index_blocks(path: Path) -> Iterator[tuple[bytes, Starts]]:
    """Yield blocks of whole lines of a text file, and the offsets in the block of the lines with text."""
    number, is_first = 1, True
    with reading(path), path.open("rb") as file:
        while block := file.read(BLOCK):
            block += b"" if block.endswith(b"\n") else file.readline()
            try:
                block.decode()
            except UnicodeDecodeError as error:
                line = number + block.count(b"\n", 0, error.start)
                remedy = "unpack or convert the file (gunzip -k, iconv -t UTF-8)"
                raise UsageError(f"line {line} of --text {path} is not UTF-8: {remedy}") from error
            starts, count = line_starts(block, len(BYTE_ORDER_MARK) * (is_first and block.startswith(BYTE_ORDER_MARK)))
            yield block, starts
            number, is_first = number + count, False


def line_starts(block: bytes, first: int = 0) -> tuple[Starts, int]:
    """Return the offsets of the lines with text in a block of whole lines, and the number of all lines.

    The first line starts at the offset ``first``.
    """
    values = np.frombuffer(block, np.uint8)
    starts = np.concatenate(([0], np.flatnonzero(values == ord("\n")) + 1))
    starts[0] = first
    starts = starts[starts < len(values)]
    if len(starts) == 0:
        return starts.astype(np.uint64), 0
    has_text = np.maximum.reduceat(values, starts) > SPACE
    return starts[has_text].astype(np.uint64), len(starts)
