"""The rows of tables of other programs, one of whose columns has the names of pictures: texts, JSON and Parquet."""

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from rectified_flow.condition import with_points
from rectified_flow.data.picture_names import PictureNames
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import open_regular, read_text

Value = Any  # a text, or any value of JSON
Row = dict[str, Value]

FILE_NAME, TEXT = "file_name", "text"
SEPARATORS = ",;\t"
HEAD, ROWS, NAMED = 65536, 50, 0.5
"""Length of the beginning of a file that shows whether it is a table [bytes], largest number of rows in it, and
smallest share of rows that name a picture."""
MOST_BYTES, SHORT, STRINGS = 2**28, 2**20, 500
"""Size above which a JSON file is not read, size below which it is read whatever it begins with [bytes], and number of
texts in its beginning among which the name of a picture is looked for."""
SEPARATOR_LINE = re.compile(r"\Asep=.\r?\n", re.IGNORECASE)
"""The first line of a table for Excel, which names the separator."""
REMARKS = re.compile(r"\A(?:sep=.\r?\n)?(?:#.*\n)*", re.IGNORECASE)
"""Lines in front of a table: its separator, for Excel, and remarks, as in ``words.txt`` of the IAM dataset."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class Layout(NamedTuple):
    """The layout of a text with rows."""

    separator: str
    skipped: int
    """Number of lines before the first row, that of the titles among them."""
    column: int
    """Number of the column that names pictures."""
    titles: list[str]


def read_rows(path: Path, names: PictureNames) -> list[Row] | None:
    """Return the rows of a table that names pictures, under the name ``file_name``; None if it names none."""
    return READERS[path.suffix.lower()](path, names)


def _of_text(path: Path, names: PictureNames) -> list[Row] | None:
    """Return the rows of a text with separators."""
    layout = layout_of(REMARKS.sub("", _head_of(path)), names, path.parent)
    if layout is None:
        return None
    rows = rows_of(path, _separated_rows(REMARKS.sub("", read_text(path)), layout))
    return rows if layout.separator == "," else with_decimal_points(rows)


def _of_lines(path: Path, names: PictureNames) -> list[Row] | None:
    """Return the rows of a text with a JSON object in each line."""
    head = _head_of(path).split("\n")
    with suppress(ValueError, TypeError, RecursionError):
        first = [dict(json.loads(line)) for line in head[:ROWS] if line.strip()]
        column = _naming_column(first, names, path.parent)
        if column is not None:
            return rows_of(path, _renamed(json_rows(read_text(path)), column))
    return None


def _of_json(path: Path, names: PictureNames) -> list[Row] | None:
    """Return the rows of a JSON file in one of :data:`RECORDS`."""
    size = path.stat().st_size
    texts = (text[1:-1] for text in STRING.findall(_head_of(path))[:STRINGS])
    if size > MOST_BYTES or (size > SHORT and all(names.find(text, path.parent) is None for text in texts)):
        return None
    with suppress(ValueError, TypeError, KeyError, RecursionError, UsageError):
        text = read_text(path)
        try:
            document = json.loads(text)
        except ValueError:
            document = [*json_rows(text)]
        for records in RECORDS:
            rows = records(document)
            column = _naming_column(rows[:ROWS], names, path.parent)
            if column is not None:
                return [*_renamed(rows, column)]
    return None


def _of_parquet(path: Path, names: PictureNames) -> list[Row] | None:
    """Return the rows of a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    with suppress(pa.ArrowException, OSError):
        rows: list[Row] = parquet.read_table(path).to_pylist()
        column = _naming_column(rows[:ROWS], names, path.parent)
        return None if column is None else [*_renamed(rows, column)]
    return None


READERS: Mapping[str, Callable[[Path, PictureNames], list[Row] | None]] = {
    **dict.fromkeys((".csv", ".tsv", ".txt"), _of_text),
    ".jsonl": _of_lines,
    ".json": _of_json,
    ".parquet": _of_parquet,
}
"""The reader of each kind of table, by the suffix of its file."""


def _list(document: Value) -> list[Row]:
    """Return the objects of a list, or its pairs of a name and a text."""
    rows = document if isinstance(document, list) else []
    return [
        {FILE_NAME: row[0], TEXT: row[1]} if isinstance(row, list) and len(row) == 2 else dict(row)
        for row in rows
        if isinstance(row, list | dict)
    ]


def _by_name(document: Value) -> list[Row]:
    """Return the values of an object whose entries have the names of pictures."""
    entries = document.items() if isinstance(document, dict) else ()
    return [{FILE_NAME: name, **(of if isinstance(of, dict) else {TEXT: of})} for name, of in entries]


def _labels(document: Value) -> list[Row]:
    """Return the pairs of a name and a class of ``dataset.json``, which StyleGAN reads."""
    pairs = document.get("labels") if isinstance(document, dict) else None
    return [{FILE_NAME: name, "label": str(label)} for name, label in pairs or ()]


def _coco(document: Value) -> list[Row]:
    """Return the captions, or the names of the categories, of the images of COCO's annotations."""
    if not isinstance(document, dict) or not {"images", "annotations"} <= document.keys():
        return []
    categories = {each["id"]: each["name"] for each in document.get("categories", ())}
    found = defaultdict[str, dict[Value, dict[str, None]]](lambda: defaultdict(dict))  # in their order, each once
    for each in document["annotations"]:
        kind = "caption" if "caption" in each else "category"
        text = each["caption"] if kind == "caption" else categories[each["category_id"]]
        found[kind][each["image_id"]][text] = None
    return [
        {FILE_NAME: image["file_name"], **{kind: [*of.get(image["id"], ())] for kind, of in found.items()}}
        for image in document["images"]
    ]


def _record(document: Value) -> list[Row]:
    """Return an object as the only row."""
    return [document] if isinstance(document, dict) else []


def _inside(document: Value) -> list[Row]:
    """Return the objects of the longest list in an object."""
    lists = [each for each in document.values() if isinstance(each, list)] if isinstance(document, dict) else []
    return _list(max(lists, key=len, default=[]))


RECORDS: tuple[Callable[[Value], list[Row]], ...] = (_list, _coco, _labels, _by_name, _inside, _record)
"""Kinds of JSON files; each function returns the rows of its kind, and none of others."""


def _naming_column(rows: Sequence[Mapping[str, Value]], names: PictureNames, folder: Path) -> str | None:
    """Return the column of some rows that names pictures."""
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    columns = [FILE_NAME] if FILE_NAME in columns else columns
    hits = dict[str, float]()
    for column in columns:
        values = [row.get(column, "") for row in rows]
        is_number = len(values) == 1 and not isinstance(values[0], str)  # any number may be that of a picture
        hits[column] = 0 if is_number else _named([*map(str, values)], names, folder)
    best = max(hits, key=hits.__getitem__, default=None)
    return best if best is not None and hits[best] > 0 else None


def _renamed(rows: Iterable[Row], column: str) -> Iterator[Row]:
    """Yield rows with the column of names under its usual name."""
    for row in rows:
        yield {FILE_NAME: row.get(column), **{name: value for name, value in row.items() if name != column}}


def _head_of(path: Path) -> str:
    """Return the first whole lines of a text file; an empty text if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        head = file.read(HEAD).decode("utf-8-sig", errors="replace")
        return head if len(head) < HEAD else head.rpartition("\n")[0] or head
    return ""


def layout_of(head: str, names: PictureNames, folder: Path) -> Layout | None:
    """Return the layout of a text by its first lines; None if it is not a table that names pictures."""
    for separator in f"{SEPARATORS}|: ":
        rows = list[list[str]]()
        with suppress(csv.Error):
            reader = csv.reader(io.StringIO(head), delimiter=separator, skipinitialspace=True)
            rows = [*islice(filter(None, reader), 2 + ROWS)]
        skipped = int(len(rows) > 2 and len(rows[0]) == 1 and rows[0][0].strip().isdecimal())  # the number of rows
        first, rows = (rows[skipped], rows[skipped + 1 :]) if len(rows) > skipped else ([], [])
        is_untitled = separator == " " and len(rows) > 0 and len(rows[0]) == len(first) + 1  # the column of names
        width = len(first) + is_untitled
        hits = [_named([row[at] for row in rows if len(row) > at], names, folder) for at in range(width)]
        if width < 2 or max(hits) == 0:
            continue
        column = hits.index(max(hits))
        if column >= len(first) or names.find(first[column], folder) is None:
            return Layout(separator, skipped + 1, column, [""] * is_untitled + first)
        # The text behind a name may have blanks and colons.
        has_text = separator == ":" or (separator == " " and len({*map(len, (first, *rows))}) > 1)
        width = 2 if has_text else len(first)
        titles = [TEXT if width == 2 else f"column_{number + 1}" for number in range(width)]
        return Layout(separator, skipped, column, titles)
    return None


def _named(values: Sequence[str], names: PictureNames, folder: Path) -> float:
    """Return how well values name pictures: 0 if fewer than half do, and more for those with a suffix.

    A value that recurs counts once: classes may be numbers, as the names of pictures are.
    """
    found = [value for value in values if names.find(value, folder) is not None]
    return sum(1 + ("." in value) for value in {*found}) if len(found) >= NAMED * len(values) else 0


def distinct(titles: Iterable[str]) -> list[str]:
    """Return the titles of columns; a repeated title gets the first free number, such as ``kind_2``."""
    given, found = [*titles], list[str]()
    for title in given:
        numbered = (f"{title}_{number}" for number in count(2))
        is_new = not title or title not in found
        found.append(title if is_new else next(each for each in numbered if each not in (*given, *found)))
    return found


def _separated_rows(text: str, layout: Layout) -> Iterator[Row]:
    """Yield the rows of a text."""
    others = [name.strip() or f"column_{at + 1}" for at, name in enumerate(layout.titles) if at != layout.column]
    _, *titles = distinct([FILE_NAME, *others])
    titles.insert(layout.column, FILE_NAME)
    reader = csv.reader(io.StringIO(text), delimiter=layout.separator, skipinitialspace=layout.separator == " ")
    last = len(titles) - 1
    for row in islice(filter(None, reader), layout.skipped, None):
        cells = [*row[:last], layout.separator.join(row[last:])]  # a caption without quotes may have the separator
        yield {name: cell.strip() for name, cell in zip(titles, cells, strict=False)}


def with_decimal_points(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a table that is not separated by commas, with decimal points in place of decimal commas."""
    titles = [*dict.fromkeys(title for row in rows for title in row)]
    columns = {title: with_points([row.get(title, "") for row in rows]) for title in titles}
    return [{title: columns[title][number] for title in row} for number, row in enumerate(rows)]


def json_rows(text: str) -> Iterator[Row]:
    """Yield the objects in the lines of a text."""
    return (dict(json.loads(line)) for line in text.split("\n") if line.strip())


def rows_of(path: Path, rows: Iterator[Row]) -> list[Row]:
    """Return the rows of a table; an error names the row that cannot be read."""
    read = list[Row]()
    try:
        read.extend(rows)
    except (ValueError, TypeError, csv.Error, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise UsageError(f"{path} cannot be read (row {len(read) + 1}: {why}): correct it") from error
    return read
