"""Tables and text files beside pictures: found by the names of the pictures that they contain.

``metadata.csv`` and ``metadata.jsonl`` have the layout of datasets' ImageFolder: a column ``file_name``, relative to
the folder of the file, and any others. Without them, any table with a column of picture names is read. ``NAME.txt``
beside a picture ``NAME.png`` is its value of the column ``text``. A value that is missing or empty is "none".
"""

import csv
import io
import json
import os
import re
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rectified_flow.condition import with_point
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import open_regular, printable, read_bytes

METADATA_FILES = ("metadata.csv", "metadata.jsonl")
TABLE_SUFFIXES, TEXT_SUFFIXES = (".csv", ".tsv", ".txt"), (".txt", ".caption", ".captions", ".cap")
"""Suffixes of tables and of texts beside pictures, in lower case; a picture takes the first of its texts."""
FILE_NAME, TEXT = "file_name", "text"
SEPARATORS = ",;\t"
HEAD, ROWS, NAMED = 65536, 50, 0.5
"""Length of the beginning of a file that shows whether it is a table [bytes], largest number of rows in it, and
smallest share of rows that name a picture."""
BOXES = re.compile(r"(\S+ )?(-?\d+(\.\d+)?([eE]-?\d+)?\s+){4,}.*")
"""A line of numbers, after the name or the number of a class, as in labels of YOLO, DOTA and KITTI."""

Value = Any  # a text, or any value of JSON
Row = dict[str, Value]
Columns = dict[str, list[Value]]


SUFFIX = re.compile(r"(?<=[^/])\.\w{1,5}$")


def _folded(path: str) -> str:
    return path.casefold()


def _stem(path: str) -> str:
    return SUFFIX.sub("", path).casefold()


def _base(path: str) -> str:
    return os.path.basename(path).casefold()


def _base_stem(path: str) -> str:
    return _stem(os.path.basename(path))


Key = Callable[[str], str]
RULES: tuple[tuple[Key, Key], ...] = ((str, str), (_folded, _folded), (_stem, _folded), (_stem, _stem))
BASE_RULES: tuple[tuple[Key, Key], ...] = ((_base, _base), (_base_stem, _base), (_base_stem, _base_stem))
"""Rules for comparing names, the strictest first: a key of the path of a picture, and a key of the name. The names of
the second list are without a folder."""


class PictureNames:
    """The numbers of pictures by their names as people write them: unique ones in any case, with any suffix or none."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.paths = [*map(normal, files)]
        self._tables = dict[Key, dict[str, int | None]]()

    def _table(self, key: Key) -> dict[str, int | None]:
        """Return the number of each picture by a key; None for a key that several pictures have."""
        if key not in self._tables:
            table = self._tables[key] = {}
            for number, path in enumerate(self.paths):
                name = key(path)
                table[name] = None if name in table else number
        return self._tables[key]

    def find(self, name: object, folder: Path) -> int | None:
        """Return the number of the picture with a name relative to a folder; None if there is none, or several."""
        text = "" if name is None else str(name).strip().replace("\\", "/")
        path = normal(folder / text)
        for of_picture, of_name in (*RULES, *(() if "/" in text else BASE_RULES)) if text else ():
            table, key = self._table(of_picture), of_name(path)
            if key in table:
                return table[key]
        before, _, number = text.rpartition("#")  # 1.jpg#0 is the first caption of 1.jpg
        return self.find(before, folder) if before and number.isdigit() else None


def read_metadata(everything: Sequence[Path], files: Sequence[Path], root: Path, notes: list[str]) -> Columns:
    """Return the columns of pictures by name, from tables and from text files among ``everything``.

    A sentence on rows and texts that are left out is added to ``notes`` unless it is there.

    Args:
        everything: all files of the folder.
        files: the pictures.
        root: the folder whose subfolders are classes.
        notes: sentences for the user.
    """
    names, columns, said = PictureNames(files), Columns(), list[str]()
    known = [file for file in everything if file.name in METADATA_FILES]
    known = [each for each in known if each.is_relative_to(root) or root.is_relative_to(each.parent)]
    found = {path: _read(path) for path in known} or _tables_among(everything, names)
    for path, rows in found.items():
        for column, values in _columns_of(path, rows, names, len(files), said, is_only=len(found) == 1).items():
            before = columns.get(column, [None] * len(files))
            columns[column] = [old if new is None else new for old, new in zip(before, values, strict=True)]
    texts = {} if TEXT in columns else _texts_beside(everything, files, said)
    notes += [each for each in said if each not in notes]
    return columns | ({TEXT: [texts.get(row) for row in range(len(files))]} if texts else {})


def _columns_of(
    path: Path, rows: Sequence[Row], names: PictureNames, count: int, notes: list[str], *, is_only: bool
) -> Columns:
    """Return the columns of a table, in which a picture may have several rows with one caption each."""
    cells = defaultdict[str, dict[int, list[Value]]](lambda: defaultdict(list))
    known, absent = set[int](), list[object]()
    for values in rows:
        name = values.pop(FILE_NAME, None)
        row = names.find(name, path.parent)
        if row is None:
            absent.append(name)
            continue
        known.add(row)
        for column, value in values.items():
            cells[column][row] += [value] * (value not in cells[column][row])
    if absent:
        found = f"{len(absent)} of the {FILE_NAME}s in {path.name} do not exist, such as {absent[0]}"
        if not known and is_only:
            raise UsageError(f"{found}: write paths relative to it")
        notes.append(found)
    captions = {
        column for column, of in cells.items() if any(len(each) > 1 and _are_texts(each) for each in of.values())
    }
    differing = {column: row for column, of in cells.items() for row, each in of.items() if len(each) > 1}
    for column in differing.keys() - captions:
        picture = os.path.basename(names.paths[differing[column]])
        if not captions:
            raise UsageError(f"{path} names {picture} again: remove one of its two rows")
        notes.append(f"left out the column {column} of {path.name}, which differs for {picture}")
        del cells[column]
    several = {
        column: {row: each if len(each) > 1 else each[0] for row, each in of.items()} for column, of in cells.items()
    }
    return {column: [of.get(row) for row in range(count)] for column, of in several.items()}


def _are_texts(values: Sequence[Value]) -> bool:
    """Return whether values are captions rather than numbers or labels."""
    return all(isinstance(value, str) for value in values) and any(" " in value.strip() for value in values)


def _tables_among(everything: Sequence[Path], names: PictureNames) -> dict[Path, list[Row]]:
    """Return the rows of tables with a column of picture names, under the name ``file_name``."""
    stems = {os.path.splitext(path)[0] for path in names.paths}
    tables = dict[Path, list[Row]]()
    for path in everything:
        if path.suffix.lower() not in TABLE_SUFFIXES or os.path.splitext(normal(path))[0] in stems:
            continue
        found = _layout_of(_head_of(path), names, path.parent)
        if found is not None:
            tables[path] = _rows_of(path, _foreign_rows(_text_of(path), *found))
    return tables


def _head_of(path: Path) -> str:
    """Return the first whole lines of a text file; an empty text if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        head = file.read(HEAD).decode(errors="replace")
        return head if len(head) < HEAD else head.rpartition("\n")[0]
    return ""


def _layout_of(head: str, names: PictureNames, folder: Path) -> tuple[str, int, list[str] | None] | None:
    """Return the separator of a table, the column that names pictures, and the names of columns if it has no header.

    Returns None if the text is not a table that names pictures.
    """
    for separator in f"{SEPARATORS}|":
        first, rows = list[str](), list[list[str]]()
        with suppress(csv.Error):
            reader = csv.reader(io.StringIO(head), delimiter=separator, skipinitialspace=True)
            first, *rows = [row for row, _ in zip(filter(None, reader), range(1 + ROWS), strict=False)] or [[]]
        hits = [_named([row[at] for row in rows if len(row) > at], names, folder) for at in range(len(first))]
        if len(first) > 1 and max(hits) > 0:
            column = hits.index(max(hits))
            is_headless = names.find(first[column], folder) is not None
            titles = [TEXT if len(first) == 2 else f"column_{number + 1}" for number in range(len(first))]
            return separator, column, titles if is_headless else None
    return None


def _named(values: Sequence[str], names: PictureNames, folder: Path) -> float:
    """Return how well values name pictures: 0 if fewer than half do, and more for those with a suffix."""
    found = [value for value in values if names.find(value, folder) is not None]
    return sum(1 + ("." in value) for value in found) if len(found) >= NAMED * len(values) else 0


def _foreign_rows(text: str, separator: str, column: int, header: list[str] | None) -> Iterator[Row]:
    """Yield the rows of a table with a column of picture names."""
    reader = csv.reader(io.StringIO(text), delimiter=separator)
    names = next(reader) if header is None else header
    titles = [FILE_NAME if at == column else name.strip() or f"column_{at + 1}" for at, name in enumerate(names)]
    last = len(titles) - 1
    for row in filter(None, reader):
        cells = [*row[:last], separator.join(row[last:])]  # a caption without quotes may have the separator
        yield {name: with_point(cell.strip()) for name, cell in zip(titles, cells, strict=False)}


def _texts_beside(everything: Sequence[Path], files: Sequence[Path], notes: list[str]) -> dict[int, str]:
    """Return the text beside each picture that has one: a caption, or none if most are boxes of objects."""
    beside = {normal(path).casefold(): path for path in everything if path.suffix.lower() in TEXT_SUFFIXES}
    texts = dict[int, str]()
    for row, file in enumerate(files) if beside else ():
        path = normal(file).casefold()
        names = (stem + suffix for stem in (os.path.splitext(path)[0], path) for suffix in TEXT_SUFFIXES)
        if (found := next((beside[name] for name in names if name in beside), None)) is not None:
            texts[row] = _text_of(found)
    boxes = [row for row, text in texts.items() if text.strip() and all(map(BOXES.fullmatch, _lines(text)))]
    if 2 * len(boxes) > sum(bool(text.strip()) for text in texts.values()):
        such = printable(files[boxes[0]].name)
        notes.append(f"{len(boxes)} texts are boxes of objects, no captions, such as of {such}")
        return {}
    return texts


def _lines(text: str) -> list[str]:
    """Return the lines of a text that are not empty, each with a space at its end."""
    return [f"{line.strip()} " for line in text.split("\n") if line.strip()]


def normal(file: Path) -> str:
    """Return the path in a normal form, which is equal for all spellings and Unicode normalisations."""
    return unicodedata.normalize("NFC", os.path.normpath(os.path.abspath(file)))


def _text_of(path: Path) -> str:
    """Return the contents of a text file in UTF-8, or in UTF-16 with a byte order mark."""
    content = read_bytes(path)
    encoding = "utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"
    with suppress(UnicodeDecodeError):
        text = content.decode(encoding)
        if "\0" not in text:  # every second byte of UTF-16 without a mark is 0
            return text.replace("\r\n", "\n").replace("\r", "\n")
    raise UsageError(f"{path} is not encoded as UTF-8, but perhaps as Windows-1252: save it as UTF-8")


def _read(path: Path) -> list[Row]:
    """Return the rows of a metadata file."""
    text = _text_of(path)
    lines = (dict(json.loads(line)) for line in text.split("\n") if line.strip())
    return _rows_of(path, _csv_rows(text) if path.suffix == ".csv" else lines)


def _rows_of(path: Path, rows: Iterator[Row]) -> list[Row]:
    """Return the rows of a table; an error names the row that cannot be read."""
    read = list[Row]()
    try:
        read.extend(rows)
    except (ValueError, TypeError, csv.Error, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise UsageError(f"{path} cannot be read (row {len(read) + 1}: {why}): correct it") from error
    return read


def _csv_rows(text: str) -> Iterator[Row]:
    """Yield the rows; the separator is the one that surrounds ``file_name`` in the header."""
    header = text.partition("\n")[0]
    found = [each for each in SEPARATORS if FILE_NAME in (name.strip(' "') for name in header.split(each))]
    if not found:
        raise ValueError(f"the first line has no column {FILE_NAME} between commas, semicolons or tabs")
    how: Row = {"delimiter": found[0], "restval": "", "skipinitialspace": True, "strict": True}
    for row in csv.DictReader(io.StringIO(text), **how):
        if any(row.pop(None, ())):  # csv.DictReader stores surplus values under None
            raise ValueError("it has more values than the header; put texts with commas in quotes")
        named = {name.strip(): value for name, value in row.items() if name.strip()}
        yield named if found[0] == "," else {name: with_point(value.strip()) for name, value in named.items()}
