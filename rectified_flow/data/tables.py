"""Tables and text files beside pictures: found by the names of the pictures that they contain.

``metadata.csv`` and ``metadata.jsonl`` have the layout of datasets' ImageFolder: a column ``file_name``, relative to
the folder of the file, and any others. Without them, any table with a column of picture names is read. ``NAME.txt``
beside a picture ``NAME.png`` is its value of the column ``text``. A value that is missing or empty is "none".
"""

import csv
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rectified_flow.data.picture_names import PictureNames, normal
from rectified_flow.data.table_files import (
    FILE_NAME,
    READERS,
    SEPARATOR_LINE,
    SEPARATORS,
    TEXT,
    Row,
    Value,
    distinct,
    json_rows,
    read_rows,
    rows_of,
    with_decimal_points,
)
from rectified_flow.errors import UsageError
from rectified_flow.system.files import printable, read_text

METADATA_FILES = ("metadata.csv", "metadata.jsonl")
TEXT_SUFFIXES = (".txt", ".caption", ".captions", ".cap", ".gt.txt")
"""Suffixes of texts beside pictures, in lower case; a picture takes the first of its texts."""
OTHER_TABLES = (".xlsx", ".xls", ".ods")
TABLE_SUFFIXES = {*READERS, *TEXT_SUFFIXES, *OTHER_TABLES}
"""Suffixes of all files that are read for the columns of pictures, or mentioned if they are not."""
BOXES = re.compile(r"(\S+ )?(-?\d+(\.\d+)?([eE]-?\d+)?\s+){4,}.*")
"""A line of numbers, after the name or the number of a class, as in labels of YOLO, DOTA and KITTI."""

Columns = dict[str, list[Value]]


def read_metadata(
    everything: Sequence[Path], files: Sequence[Path], folder: Path, root: Path, notes: list[str]
) -> Columns:
    """Return the columns of pictures by name, from tables and from text files among ``everything``.

    A sentence on rows and texts that are left out is added to ``notes`` unless it is there.

    Args:
        everything: the files of the folder that may be tables or texts.
        files: the pictures.
        folder: the folder of the dataset.
        root: the folder whose subfolders are classes.
        notes: sentences for the user.
    """
    if not everything:
        return {}
    names, columns, said = PictureNames(files, (folder, root)), Columns(), list[str]()
    known = [file for file in everything if file.name in METADATA_FILES]
    known = [each for each in known if each.is_relative_to(root) or root.is_relative_to(each.parent)]
    found = {path: _read(path) for path in known} or _tables_among(everything, names, said)
    places = {normal(each.parent) for each in found if each.name in METADATA_FILES}
    for path, rows in found.items():
        others = places - {normal(path.parent)} if path.name in METADATA_FILES else set()
        is_only = len(found) == 1
        for column, values in _columns_of(path, rows, names, len(files), said, others, is_only=is_only).items():
            before = columns.get(column, [None] * len(files))
            both = zip(before, values, strict=True)
            differing = next((row for row, (old, new) in enumerate(both) if old and new and str(old) != str(new)), None)
            if differing is not None:
                what = f"left out the column {column} of {path.name}"
                said.append(f"{what}: another table has another value for {printable(files[differing].name)}")
                continue
            columns[column] = [old if new is None else new for old, new in zip(before, values, strict=True)]
    texts = {} if TEXT in columns else _texts_beside(everything, files, said)
    notes += [each for each in said if each not in notes]
    return columns | ({TEXT: [texts.get(row) for row in range(len(files))]} if texts else {})


def _columns_of(
    path: Path,
    rows: Sequence[Row],
    names: PictureNames,
    count: int,
    notes: list[str],
    others: Collection[str],
    *,
    is_only: bool,
) -> Columns:
    """Return the columns of a table, in which a picture may have several rows with one caption each.

    The ``others`` are the folders of other metadata files. A row never describes a picture that is in one of them and
    not in the folder of this table: such a row belongs to a missing picture of the same name.
    """
    cells = defaultdict[str, dict[int, list[Value]]](lambda: defaultdict(list))
    known, absent = set[int](), list[object]()
    for values in rows:
        name = values.pop(FILE_NAME, None)
        row = names.find(name, path.parent)
        if row is None or _is_anothers(Path(names.paths[row]), normal(path.parent), others):
            absent.append(name)
            continue
        known.add(row)
        for column, value in values.items():
            cells[column][row] += [value] * (value not in cells[column][row])
    if absent:
        found = f"{len(absent)} of the {FILE_NAME}s in {path.name} name no picture that is read, such as {absent[0]}"
        if not known and is_only:
            raise UsageError(f"{found}: write paths relative to it")
        notes.append(found)
    captions = {
        column for column, of in cells.items() if any(len(each) > 1 and _are_texts(each) for each in of.values())
    }
    differing = {column: row for column, of in cells.items() for row, each in of.items() if len(each) > 1}
    for column in differing.keys() - captions:
        picture = os.path.basename(names.paths[differing[column]])
        if not captions and path.name in METADATA_FILES:
            raise UsageError(f"{path} names {picture} again: remove one of its two rows")
        notes.append(f"left out the column {column} of {path.name}, which differs for {picture}")
        del cells[column]
    several = {
        column: {row: each if len(each) > 1 else each[0] for row, each in of.items()} for column, of in cells.items()
    }
    return {column: [of.get(row) for row in range(count)] for column, of in several.items()}


def _is_anothers(picture: Path, here: str, others: Collection[str]) -> bool:
    """Return whether a picture is in one of the folders ``others``, and not in the folder ``here``."""
    return not picture.is_relative_to(here) and any(picture.is_relative_to(each) for each in others)


def _are_texts(values: Sequence[Value]) -> bool:
    """Return whether values are captions rather than numbers or labels."""
    return all(isinstance(value, str) for value in values) and any(" " in value.strip() for value in values)


def _tables_among(everything: Sequence[Path], names: PictureNames, notes: list[str]) -> dict[Path, list[Row]]:
    """Return the rows of tables with a column of picture names, under the name ``file_name``.

    A sentence on each kind of table that is not read is added to ``notes``.
    """
    stems = {os.path.splitext(path)[0] for path in names.paths} | {*names.paths}
    tables, unread, beside = dict[Path, list[Row]](), list[Path](), list[Path]()
    for path in everything:
        suffix = path.suffix.lower()
        stem = os.path.splitext(normal(path))[0]
        if stem in stems or os.path.splitext(stem)[0] in stems:
            beside += [path] * (suffix not in TEXT_SUFFIXES)
            continue
        rows = read_rows(path, names) if suffix in READERS else None
        if rows is not None:
            tables[path] = rows
        elif suffix not in TEXT_SUFFIXES:
            unread.append(path)
    remedy = f"columns for conditions are read from a metadata.csv with a column {FILE_NAME}"
    for what, files in {"tables that name none of the pictures": unread, "files beside pictures": beside}.items():
        counts = Counter(file.suffix.lower() for file in files)
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in counts.items())
        notes += [f"left out {what} ({kinds}), such as {printable(file.name)}: {remedy}" for file in files[:1]]
    return tables


def _texts_beside(everything: Sequence[Path], files: Sequence[Path], notes: list[str]) -> dict[int, str | list[str]]:
    """Return the captions in the text beside each picture, one per line; none if most texts are bounding boxes."""
    beside = {normal(path).casefold(): path for path in everything if path.suffix.lower() in TEXT_SUFFIXES}
    texts = dict[int, str]()
    for row, file in enumerate(files) if beside else ():
        path = normal(file).casefold()
        names = (stem + suffix for stem in (os.path.splitext(path)[0], path) for suffix in TEXT_SUFFIXES)
        if (found := next((beside[name] for name in names if name in beside), None)) is not None:
            texts[row] = read_text(found)
    boxes = [row for row, text in texts.items() if text.strip() and all(map(BOXES.fullmatch, _lines(text)))]
    if 2 * len(boxes) > sum(bool(text.strip()) for text in texts.values()):
        such = printable(files[boxes[0]].name)
        notes.append(f"{len(boxes)} texts are boxes of objects, no captions, such as of {such}")
        return {}
    captions = {row: [line.strip() for line in _lines(text)] for row, text in texts.items()}
    if several := [row for row, lines in captions.items() if len(lines) > 1]:
        such = printable(files[several[0]].name)
        notes.append(f"the texts of {len(several)} pictures, such as {such}, have several lines: each is a caption")
    return {row: lines if len(lines) > 1 else texts[row] for row, lines in captions.items()}


def _lines(text: str) -> list[str]:
    """Return the lines of a text that are not empty, each with a space at its end."""
    return [f"{line.strip()} " for line in text.split("\n") if line.strip()]


def _read(path: Path) -> list[Row]:
    """Return the rows of a metadata file."""
    text = read_text(path)
    if path.suffix != ".csv":
        return rows_of(path, json_rows(text))
    text = SEPARATOR_LINE.sub("", text)
    while text.startswith("#") and not _separator_of(text):  # a remark in front of the titles
        text = text.partition("\n")[2]
    rows = rows_of(path, _csv_rows(text))
    return rows if _separator_of(text) == "," else with_decimal_points(rows)


def _separator_of(text: str) -> str:
    """Return the separator that surrounds ``file_name`` in the header; an empty text if there is none."""
    header = text.partition("\n")[0]
    surrounding = (each for each in SEPARATORS if FILE_NAME in (name.strip(' "') for name in header.split(each)))
    return next(surrounding, "")


def _csv_rows(text: str) -> Iterator[Row]:
    """Yield the rows of a metadata file."""
    separator = _separator_of(text)
    if not separator:
        raise ValueError(f"the first line has no column {FILE_NAME} between commas, semicolons or tabs")
    how: Row = {"delimiter": separator, "restval": "", "skipinitialspace": True, "strict": True}
    reader = csv.DictReader(io.StringIO(text), **how)
    reader.fieldnames = distinct(name.strip() for name in reader.fieldnames or ())
    for row in reader:
        if any(row.pop(None, ())):  # csv.DictReader stores surplus values under None
            raise ValueError("it has more values than the header; put texts with commas in quotes")
        # Spaces around values are kept in captions, and would hide numbers in a table with other separators.
        yield {name: value if separator == "," else value.strip() for name, value in row.items() if name}
