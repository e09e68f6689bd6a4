"""Columns beside pictures: read from metadata files and text files, as conditions of a network.

``metadata.csv`` and ``metadata.jsonl`` have the layout of datasets' ImageFolder: a column ``file_name``, relative to
the folder of the file, and any others. ``NAME.txt`` beside a picture ``NAME.png`` is its column ``text``. A value that
is missing or empty is "none".
"""

import csv
import io
import json
import os
import re
import unicodedata
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectified_flow.condition import Condition, WrittenCondition, with_point
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flags import refuse
from rectified_flow.registry import describe, find, names
from rectified_flow.system.files import read_bytes

METADATA_FILES = ("metadata.csv", "metadata.jsonl")
FILE_NAME, TEXT = "file_name", "text"
SEPARATORS = ",;\t"
RESERVED = {
    *("x", "t", "r", "images", "latents", "noise", "noise_rows", "path", "source", "unknown", "labels", "time", "kind"),
    *("self", "steps", "count", "solver", "grid", "guidance", "start", "noise_level", "mask", "watch", "decode"),
    *("seed", "strength"),
}
"""Names of other entries of a batch, inputs of a network, arguments of ``sample``, and an entry of a description."""
FIRST_VALUES, SHORT = 3, 30  # number of the most frequent values that are printed, and their largest length


def read_metadata(metadata: Sequence[Path], files: Sequence[Path], notes: list[str]) -> dict[str, list[Any]]:
    """Return the columns of pictures by name, from metadata files and from text files beside the pictures.

    A sentence on rows of pictures that do not exist is added to ``notes`` unless it is there.
    """
    number = {_normal(file): row for row, file in enumerate(files)}
    columns = defaultdict[str, list[Any]](lambda: [None] * len(files))
    known, absent = set[int](), list[object]()
    for path in metadata:
        for values in _read(path):
            name = values.pop(FILE_NAME, None)
            row = number.get(_normal(path.parent / str(name).replace("\\", "/")))
            if row is None:
                absent.append(name)
                continue
            if row in known:
                raise UsageError(f"{path} names {name} again: remove one of its two rows")
            known.add(row)
            for column, value in values.items():
                columns[column][row] = value
    if absent:
        found = f"{len(absent)} of the {FILE_NAME}s in {metadata[0].name} do not exist, such as {absent[0]}"
        if not known:
            raise UsageError(f"{found}: write paths relative to it")
        notes += [found] * (found not in notes)
    if TEXT not in columns:
        beside = {row: path for row, file in enumerate(files) if (path := file.with_suffix(".txt")).exists()}
        for row, path in beside.items():
            columns[TEXT][row] = _text_of(path)
    return dict(columns)


def _normal(file: Path) -> str:
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


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metadata file."""
    text, rows = _text_of(path), list[dict[str, Any]]()
    lines = (dict(json.loads(line)) for line in text.split("\n") if line.strip())
    try:
        rows.extend(_csv_rows(text) if path.suffix == ".csv" else lines)
    except (ValueError, TypeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read (row {len(rows) + 1}: {first_line(error)}): correct it") from error
    return rows


def _csv_rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield the rows; the separator is the one that surrounds ``file_name`` in the header."""
    header = text.partition("\n")[0]
    found = [each for each in SEPARATORS if FILE_NAME in (name.strip(' "') for name in header.split(each))]
    if not found:
        raise ValueError(f"the first line has no column {FILE_NAME} between commas, semicolons or tabs")
    how: dict[str, Any] = {"delimiter": found[0], "restval": "", "skipinitialspace": True, "strict": True}
    for row in csv.DictReader(io.StringIO(text), **how):
        if any(row.pop(None, ())):  # csv.DictReader stores surplus values under None
            raise ValueError("it has more values than the header; put texts with commas in quotes")
        named = {name.strip(): value for name, value in row.items() if name.strip()}
        yield named if found[0] == "," else {name: with_point(value.strip()) for name, value in named.items()}


@dataclass(frozen=True)
class Column:
    """The values of a condition for the rows of a dataset; a row may have none, or several to draw from.

    Args:
        kind: the kind of the condition.
        first: number of the first value of each row, int64 ``[n + 1]``: row ``i`` has the values from ``first[i]`` to
            ``first[i + 1]``.
        texts: the values as written.
        values: the values ``[m, ...]``, or an object that returns the values of a list of numbers.
    """

    kind: WrittenCondition
    first: np.ndarray[Any, np.dtype[np.int64]]
    texts: Sequence[str]
    values: Any

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the kind and of the values."""
        digest = blake2b(repr(identity_of(self.kind)).encode(), digest_size=16)
        digest.update(self.first.tobytes() + "\0".join(self.texts).encode())
        return digest.hexdigest()

    def read(self, numbers: Sequence[int]) -> Tensor:
        """Return the values of the numbers ``[b, ...]``, and "none" for -1; see :meth:`numbers`."""
        none = self.kind.none(len(numbers), torch.device("cpu"))
        there = [number for number in numbers if number >= 0]
        if not there:
            return none
        values: Tensor = self.values[there]
        none = none.to(values.dtype)
        none[torch.tensor(numbers) >= 0] = values
        return none

    def numbers(self, rows: Sequence[int], draws: Sequence[int]) -> list[int]:
        """Return the number of the value of each row, or -1; a drawn number determines which of several it is."""
        spans = (self.first[row : row + 2].tolist() for row in rows)
        pairs = zip(spans, draws, strict=True)
        return [begin + draw % (end - begin) if end > begin else -1 for (begin, end), draw in pairs]


def identity_of(kind: Condition) -> dict[str, Any]:
    """Return a description of a kind that does not depend on the place of an encoder."""
    encoder = getattr(kind, "encoder", None)
    return describe(kind) | ({"encoder": encoder.fingerprint} if encoder else {})


@dataclass(frozen=True)
class ColumnSpec:
    """A column of a table, and the kind of condition that it is taken for."""

    name: str
    """Name of the condition."""
    column: str
    """Name in the table."""
    kind: type[WrittenCondition]
    first: np.ndarray[Any, np.dtype[np.int64]]
    texts: list[str]

    @property
    def has_identifiers(self) -> bool:
        """Whether the values are single words that all differ."""
        return self.kind.is_text and 1 < len(self.texts) == len({*self.texts}) and not any(" " in t for t in self.texts)

    @property
    def summary(self) -> str:
        """A summary of the column in one line."""
        missing, counts = int((np.diff(self.first) == 0).sum()), Counter(self.texts)
        gaps = f", missing in {missing} of {len(self.first) - 1} rows" * (missing > 0)
        first = counts.most_common(FIRST_VALUES)
        some = ", ".join(f"{shorten(text, SHORT, placeholder='...')} ({count})" for text, count in first)
        return f"{self.kind.column_type}, {len(counts)} different{gaps}: {some}{', ...' * (len(counts) > FIRST_VALUES)}"


def choose_columns(
    columns: Mapping[str, Sequence[Any]], rows: Mapping[str, int], wanted: Sequence[str], source: str
) -> list[ColumnSpec]:
    """Return the columns that are wanted, by ``NAME``, ``NAME=TYPE`` or ``all``, each with the kind of its values.

    A value is None, an empty text or an empty list where there is none. ``rows`` has the row of each picture by name.
    """
    has = ", ".join(columns) or f"none; write a metadata.csv with a column {FILE_NAME} beside the pictures"
    types = dict(each.partition("=")[::2] for each in wanted)
    every = types.pop("all", None) is not None
    registered = (find("condition_on", WrittenCondition, name) for name in names(WrittenCondition))
    kinds = {kind.column_type: kind for kind in registered}
    for column, named in types.items():
        refuse({f"condition_on {column}": column not in columns}, f"does not exist in {source}: its columns are {has}")
        refuse({f"condition_on {column}={named}": named not in ("", *kinds)}, f"is not a type: pass {', '.join(kinds)}")
    chosen = list[ColumnSpec]()
    for column in columns if every else types:
        values = list(columns[column])
        cells = {name: values[row] for name, row in rows.items()}
        spec = _spec(column, cells, [kinds[types[column]]] if types.get(column) else [*kinds.values()])
        if spec is None and not every:
            raise UsageError(f"`condition_on` {column} has no values (texts, numbers or lists of texts): leave it out")
        if spec is not None and not (every and spec.has_identifiers):
            chosen.append(spec)
    refuse({"condition_on all": not chosen}, f"finds no suitable column in {source}: its columns are {has}")
    return chosen


def _spec(column: str, values: Mapping[str, Any], kinds: Sequence[type[WrittenCondition]]) -> ColumnSpec | None:
    """Return a column as the first of the kinds that suits its values; None if it has no values, or nested ones."""
    cells = {name: cell for name, value in values.items() if (cell := _texts_of(value)) is not None}
    texts, several = [text for cell in cells.values() for text in cell], any(len(cell) > 1 for cell in cells.values())
    suitable = [kind for kind in kinds if len(kinds) == 1 or (kind.suits(texts) and not several)]
    suitable += [kind for kind in kinds if kind.is_text]
    if len(cells) < len(values) or not suitable:
        return None
    kind, normal = suitable[0], list[list[str]]()
    for name, cell in cells.items():
        try:
            normal.append([each for text in cell if (each := kind.normal(text))])
        except ValueError as error:
            found = f"`condition_on` {column} has {kind.column_type}s, but {str(error)!r} for the picture {name}"
            raise UsageError(f"{found}: correct this value, or pass {column}=label") from error
    first = np.cumsum([0, *map(len, normal)], dtype=np.int64)
    texts = [text for cell in normal for text in cell]
    return ColumnSpec(condition_name(column), column, kind, first, texts) if texts else None


def _texts_of(value: Any) -> list[str] | None:
    """Return the values of a cell as texts; None for an object, or a list of anything but texts."""
    several = isinstance(value, list | tuple)
    if isinstance(value, dict) or (several and not all(isinstance(each, str | None) for each in value)):
        return None
    known = (each for each in (value if several else [value]) if each is not None)
    texts = (str(each).encode("utf-8", "replace").decode().strip() for each in known)  # without halves of characters
    return [text for text in texts if text]


def condition_name(column: str) -> str:
    """Return the name of the condition of a column: letters, digits and underscores, unlike any other input."""
    name = re.sub(r"\W+", "_", column).strip("_") or "column"
    return f"{name}_column" if name in RESERVED or name[0].isdigit() else name
