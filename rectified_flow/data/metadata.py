"""Columns beside pictures: read from ``metadata.csv`` or ``metadata.jsonl``, as conditions of a network.

The files have the layout of datasets' ImageFolder: a column ``file_name``, relative to the folder of the file, and any
others. A value that is missing or empty is "none".
"""

import csv
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rectified_flow.condition import Condition, Labels, Number, WrittenCondition, as_number
from rectified_flow.errors import UsageError, first_line
from rectified_flow.networks.captions import BagOfWords, Caption, PretrainedTextEncoder
from rectified_flow.registry import describe
from rectified_flow.system.files import printable

METADATA_FILES = ("metadata.csv", "metadata.jsonl")
FILE_NAME = "file_name"
Kind = Literal["caption", "label", "number"]
RESERVED = {
    "x",
    "t",
    "r",
    "images",
    "latents",
    "noise",
    "noise_rows",
    "path",
    "source",
    "unknown",
    "labels",
    "time",
    "kind",
} | {"self", "steps", "count", "solver", "grid", "guidance", "start", "strength", "mask", "watch", "decode", "seed"}
"""Names of other entries of a batch, inputs of a network, arguments of ``sample``, and an entry of a description."""
MOST_LABELS, ROWS_PER_LABEL = 1000, 5
"""Largest number of labels, and smallest average number of rows per label, in a column of labels."""
NUMERIC = 0.9
"""Smallest share of numeric values in a column of numbers."""
LONGEST_CAPTION = 10_000
QUANTILES, EXAMPLES = 33, 16
"""Number of quantiles that are kept of numbers, and of captions that are kept as examples."""


@dataclass(frozen=True)
class Table:
    """The columns of a dataset.

    Args:
        columns: the values of each row by column, or a function that reads them; None, an empty text or an empty list
            where there is none.
        places: the place of each row, such as ``row 12 of metadata.csv``; empty for a picture without a row.
        notes: lines to print.
        rows: numbers of the rows that belong to the table; None for all.
    """

    columns: Mapping[str, Sequence[Any] | Callable[[], Sequence[Any]]]
    places: Sequence[str]
    notes: Sequence[str] = ()
    rows: Sequence[int] | None = None

    def read(self, column: str) -> list[tuple[Any, str]]:
        """Return the value of each row of a column, with the place of the row."""
        values = self.columns[column]
        values = values() if callable(values) else values
        return [(values[row], self.places[row]) for row in (range(len(values)) if self.rows is None else self.rows)]

    def subset(self, rows: Sequence[int]) -> "Table":
        """Return the table of some rows."""
        return replace(self, rows=rows)


def read_metadata(metadata: Sequence[Path], files: Sequence[Path]) -> Table:
    """Read metadata files.

    Args:
        metadata: the files to read, whose names are in :data:`METADATA_FILES`.
        files: the pictures, one for each row of the table.

    Raises:
        UsageError: if a file cannot be read, has no column ``file_name``, or names a picture twice.
    """
    number = {_normal(file): row for row, file in enumerate(files)}
    columns, places = dict[str, list[Any]](), [""] * len(files)
    absent, first_absent = 0, ""
    for path in metadata:
        for line, values in enumerate(_read(path), start=1):
            place = f"row {line} of {printable(path.name)}"
            name = values.pop(FILE_NAME, None)
            if not name:
                raise UsageError(f"{place} has no {FILE_NAME}: name the picture in a column {FILE_NAME} ({path})")
            row = number.get(_normal(path.parent / str(name).replace("\\", "/")))
            if row is None:
                absent, first_absent = absent + 1, first_absent or str(name)
                continue
            if places[row]:
                raise UsageError(f"{place} names {name} again, after {places[row]}: remove one of the two ({path})")
            places[row] = place
            for column, value in values.items():
                columns.setdefault(column, [None] * len(files))[row] = value
    if absent and not any(places):
        found = f"no row of {metadata[0]} names a picture in the folder, such as {first_absent}"
        raise UsageError(f"{found}: write paths relative to the metadata file")
    notes = [f"{absent} rows of the metadata name no picture in the folder, such as {first_absent}"] * (absent > 0)
    alone = [file for file, place in zip(files, places, strict=True) if not place]
    if columns and alone:
        notes.append(f"{len(alone)} pictures have no row in the metadata, such as {printable(alone[0].name)}")
    return Table(columns, places, notes)


def _normal(file: Path) -> str:
    """Return the path in a normal form, which is equal for all spellings and Unicode normalisations."""
    return unicodedata.normalize("NFC", os.path.normpath(os.path.abspath(file)))


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metadata file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            csv.field_size_limit(2**31 - 1)
            rows: list[Any] = list(csv.DictReader(io.StringIO(text)))
            extra = next((line for line, row in enumerate(rows, start=1) if None in row), None)
            if extra is not None:
                raise ValueError(f"row {extra} has more values than the header; put texts with commas in quotes")
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is not a JSON object")
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"{path} cannot be read ({first_line(error)}): mend it, or leave out --condition_on"
        ) from error
    return [{str(name): value for name, value in row.items()} for row in rows]


@dataclass(frozen=True)
class Column:
    """The values of a condition for the rows of a dataset; a row may have none, or several to draw from.

    Args:
        kind: the kind of the condition.
        first: number of the first value of each row, int64 ``[n + 1]``: row ``i`` has the values from ``first[i]`` to
            ``first[i + 1]``.
        texts: the values as written.
        values: the values ``[m, ...]``, or a store whose entry ``captions`` has them; None to encode the texts when
            they are read.
    """

    kind: WrittenCondition
    first: np.ndarray[Any, np.dtype[np.int64]]
    texts: Sequence[str]
    values: Any = None

    @property
    def varies(self) -> bool:
        """Whether a row may have another value in each epoch."""
        return bool((np.diff(self.first) > 1).any())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the kind and of the values."""
        digest = blake2b(repr(identity_of(self.kind)).encode(), digest_size=16)
        digest.update(self.first.tobytes() + "\0".join(self.texts).encode())
        return digest.hexdigest()

    def read(self, rows: Sequence[int], draws: Sequence[int]) -> Tensor:
        """Return a value for each row, ``[b, ...]``.

        Args:
            rows: numbers of the rows.
            draws: a number for each row, which determines which of several values it gets.
        """
        numbers = self.numbers(rows, draws)
        there = [number for number in numbers if number >= 0]
        none = self.kind.none(len(rows), torch.device("cpu"))
        if not there:
            return none
        values = self._values(there)
        result = none.to(values.dtype)
        result[torch.tensor([number >= 0 for number in numbers])] = values
        return result

    def texts_of(self, rows: Sequence[int], draws: Sequence[int]) -> list[str]:
        """Return the written values of rows, empty where there is none; see :meth:`read`."""
        return ["" if number < 0 else self.texts[number] for number in self.numbers(rows, draws)]

    def numbers(self, rows: Sequence[int], draws: Sequence[int]) -> list[int]:
        """Return the number of the value of each row, or -1; see :meth:`read`."""
        numbers = []
        for row, draw in zip(rows, draws, strict=True):
            begin, end = self.first[row : row + 2].tolist()
            count = end - begin
            numbers.append(-1 if count == 0 else begin + draw % count)
        return numbers

    def _values(self, numbers: Sequence[int]) -> Tensor:
        if isinstance(self.kind, Caption) and self.values is None:
            return self.kind.encode([self.texts[number] for number in numbers])
        if isinstance(self.values, Tensor):
            return self.values[list(numbers)]
        entries: dict[str, Tensor] = self.values.read_entries(numbers)
        return entries["captions"]


def identity_of(kind: Condition) -> dict[str, Any]:
    """Return a description of a kind that does not depend on the place of a text encoder."""
    encoder = {"encoder": kind.encoder.fingerprint} if isinstance(kind, Caption) else {}
    return describe(kind) | encoder


@dataclass
class ColumnSpec:
    """A column of a table, and the kind of condition that it is taken for."""

    name: str
    """Name of the condition."""
    column: str
    """Name in the table."""
    kind: Kind
    first: np.ndarray[Any, np.dtype[np.int64]]
    texts: list[str]
    places: list[str] = field(repr=False)
    """Place of each text."""

    @property
    def missing(self) -> int:
        """Number of rows without a value."""
        return int((np.diff(self.first) == 0).sum())

    def numbers(self) -> list[float]:
        """Return the values as numbers.

        Raises:
            UsageError: if one is no finite number.
        """
        found = [as_number(text) for text in self.texts]
        for number, text, place in zip(found, self.texts, self.places, strict=True):
            if number is None:
                raise UsageError(
                    f"--condition_on {self.column} has numbers, but {place} has {text!r}: correct this value, or pass "
                    f"--condition_types {self.column}=label"
                )
        return [number for number in found if number is not None]

    def build_kind(self, text_encoder: str | None = None, tokens: int = 0) -> WrittenCondition:
        """Build the kind of condition, with the quantiles, labels or vocabulary of the values.

        Args:
            text_encoder: folder or hub id of the encoder of captions; a bag of words if not given.
            tokens: number of tokens of a caption that a network attends to.
        """
        if self.kind == "number":
            return Number(tuple(np.quantile(self.numbers(), np.linspace(0, 1, QUANTILES)).astype(np.float32).tolist()))
        if self.kind == "label":
            names = sorted(set(self.texts))
            return Labels(len(names), tuple(names))
        encoder = BagOfWords.of(self.texts) if text_encoder is None else PretrainedTextEncoder(text_encoder)
        examples = [self.texts[at] for at in np.linspace(0, len(self.texts) - 1, EXAMPLES).astype(int).tolist()]
        return Caption(encoder, encoder.size, tokens, tuple(dict.fromkeys(examples)))

    def summary(self, kind: Condition) -> str:
        """Return a summary of the column in one line."""
        gaps = f", missing in {self.missing} of {len(self.first) - 1} rows" if self.missing else ""
        if isinstance(kind, Number):
            return f"number, {kind.quantiles[0]:g} to {kind.quantiles[-1]:g}, {len(set(self.texts))} different{gaps}"
        if isinstance(kind, Labels):
            counts = Counter(self.texts).most_common()
            some = ", ".join(f"{name} {count}" for name, count in counts[:4]) + ", ..." * (len(counts) > 4)
            return f"{kind.num_classes} labels: {some}{gaps}"
        return f"captions, {len(set(self.texts))} different{gaps}"


def choose_columns(table: Table, wanted: Sequence[str], types: Mapping[str, str], source: str) -> list[ColumnSpec]:
    """Return the columns that are asked for, each with the kind that its values suit.

    Args:
        table: all columns.
        wanted: names of columns, or ``all``.
        types: kinds by column that a user asks for.
        source: name of the pictures, for errors.

    Raises:
        UsageError: if there is no such column, it has no values, or a value does not suit its kind.
    """
    if not table.columns:
        raise UsageError(
            f"--condition_on {' '.join(wanted)} needs columns, and {source} has none: write a metadata.csv with the "
            f"columns {FILE_NAME} and {wanted[0]} beside the pictures"
        )
    every = list(wanted) == ["all"]
    columns = list(table.columns) if every else list(dict.fromkeys(wanted))
    for column in (*columns, *types):
        if column not in table.columns:
            flag = "condition_on" if column in columns else "condition_types"
            raise UsageError(f"--{flag} {column} does not exist in {source}: pass {', '.join(table.columns)}")
    for column in types:
        if column not in columns:
            raise UsageError(f"--condition_types {column} is missing from --condition_on: add it there")
    chosen = [_choose(column, table, types.get(column)) for column in columns if not every or _suits(table, column)]
    if not chosen:
        raise UsageError(f"--condition_on all finds no suitable column in {source}: name one of {', '.join(columns)}")
    twice = [name for name, count in Counter(each.name for each in chosen).items() if count > 1]
    if twice:
        raise UsageError(f"--condition_on has two columns for the condition {twice[0]}: rename one")
    return chosen


def _suits(table: Table, column: str) -> bool:
    """Return whether ``all`` includes a column: one with values, neither nested nor of identifiers."""
    values = [value for value, _place in table.read(column)]
    nested = any(isinstance(value, dict) or _is_list_of_other(value) for value in values)
    texts = [text for value in values for text in _texts_of(value)]
    named = len({*texts}) == len(texts) > 1 and not any(" " in text for text in texts) and _guess(texts) == "caption"
    return bool(texts) and not nested and not named


def _is_list_of_other(value: Any) -> bool:
    """Return whether a value is a list of anything but texts."""
    return isinstance(value, list | tuple) and not all(isinstance(each, str) for each in value)


def _choose(column: str, table: Table, kind: str | None) -> ColumnSpec:
    cells = [(_texts_of(value), place) for value, place in table.read(column)]
    values = [texts for texts, _place in cells]
    texts = [text for each in values for text in each]
    places = [place for each, place in cells for _ in each]
    if not texts:
        raise UsageError(f"--condition_on {column} is empty in all rows: leave it out")
    for text, place in zip(texts, places, strict=True):
        if len(text) > LONGEST_CAPTION:
            raise UsageError(
                f"--condition_on {column} has a text of {len(text):,} characters in {place}: shorten it to "
                f"{LONGEST_CAPTION:,}"
            )
    if kind not in (None, *get_args(Kind)):
        raise UsageError(f"--condition_types {column}={kind} is no type: pass {', '.join(get_args(Kind))}")
    first = np.cumsum([0, *map(len, values)], dtype=np.int64)
    several = int((np.diff(first) > 1).sum())
    found: Any = kind or ("caption" if several else _guess(texts))
    if several and found != "caption":
        raise UsageError(f"--condition_on {column} has {several} rows with a list, which only captions may have")
    chosen = ColumnSpec(condition_name(column), column, found, first, texts, places)
    if found == "number":
        chosen.numbers()  # raises an error for a text
    return chosen


def _texts_of(value: Any) -> list[str]:
    """Return the values of a cell as texts."""
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts_of(each)]
    missing = value is None or (isinstance(value, float) and not isfinite(value))
    text = "" if missing else str(value).encode("utf-8", "replace").decode().strip()  # without halves of characters
    return [text] if text else []


def _guess(texts: Sequence[str]) -> Kind:
    different = set(texts)
    if sum(as_number(text) is not None for text in texts) >= NUMERIC * len(texts):
        return "number"
    few = len(different) <= min(MOST_LABELS, max(2, len(texts) // ROWS_PER_LABEL))
    return "label" if few else "caption"


def condition_name(column: str) -> str:
    """Return the name of the condition of a column: letters, digits and underscores, unlike any other input."""
    name = re.sub(r"\W+", "_", column).strip("_") or "column"
    return f"{name}_column" if name in RESERVED or name[0].isdigit() else name
