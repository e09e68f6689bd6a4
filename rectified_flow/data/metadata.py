"""Columns beside pictures as conditions of a network: the kind of each, and its values for the rows of a store."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rectified_flow.condition import Condition, Number, WrittenCondition, without_unit
from rectified_flow.data.table_files import FILE_NAME
from rectified_flow.errors import UsageError
from rectified_flow.registry import describe, find, names

RESERVED = {
    *("x", "t", "r", "images", "latents", "noise", "noise_rows", "path", "source", "unknown", "labels", "time", "kind"),
    *("self", "steps", "count", "solver", "grid", "guidance", "start", "noise_level", "mask", "watch", "decode"),
    *("seed", "strength", "augmentation"),
}
"""Names of other entries of a batch, inputs and conditions of a network, arguments of ``sample``, and an entry of a
description."""
DATE = re.compile(r"\d{4}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{2,4}")
FIRST_VALUES, SHORT = 3, 30  # number of the most frequent values that are printed, and their largest length


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
    remark: str = ""
    """A sentence about how the values are read."""

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
        remark = f"; {self.remark}" * bool(self.remark)
        more = ", ..." * (len(counts) > FIRST_VALUES)
        return f"{self.kind.column_type}, {len(counts)} different{gaps}: {some}{more}{remark}"


def choose_columns(
    columns: Mapping[str, Sequence[Any]], rows: Mapping[str, int], wanted: Sequence[str], source: str
) -> list[ColumnSpec]:
    """Return the columns that are wanted, by ``NAME``, ``NAME=TYPE`` or ``all``, each with the kind of its values.

    A value is None, an empty text or an empty list where there is none. ``rows`` has the row of each picture by name.
    """
    has = ", ".join(columns) or f"none; write a metadata.csv with a column {FILE_NAME} beside the pictures"
    types = dict(each.partition("=")[::2] for each in wanted)
    every = "all" in types
    if of_all := types.pop("all", ""):
        raise UsageError(f"`condition_on` all takes no type: pass all, and NAME={of_all} for single columns")
    registered = (find("condition_on", WrittenCondition, name) for name in names(WrittenCondition))
    kinds = {kind.column_type: kind for kind in registered}
    for column, named in types.items():
        if column not in columns:
            raise UsageError(f"`condition_on` {column} does not exist in {source}: its columns are {has}")
        if named not in ("", *kinds):
            raise UsageError(f"`condition_on` {column}={named} is not a type: pass {', '.join(kinds)}")
    chosen = list[ColumnSpec]()
    for column in columns if every else types:
        values = list(columns[column])
        cells = {name: values[row] for name, row in rows.items()}
        spec = _spec(column, cells, [kinds[types[column]]] if types.get(column) else [*kinds.values()])
        if spec is None and not every:
            raise UsageError(f"`condition_on` {column} has no values (texts, numbers or lists of texts): leave it out")
        if spec is not None and not (every and spec.has_identifiers):
            chosen.append(spec)
    if not chosen:
        raise UsageError(f"`condition_on` all finds no suitable column in {source}: its columns are {has}")
    return chosen


def _spec(column: str, values: Mapping[str, Any], kinds: Sequence[type[WrittenCondition]]) -> ColumnSpec | None:
    """Return a column as the first of the kinds that suits its values; None if it has no values, or nested ones."""
    cells = {name: cell for name, value in values.items() if (cell := _texts_of(value)) is not None}
    texts, several = [text for cell in cells.values() for text in cell], any(len(cell) > 1 for cell in cells.values())
    remark = ""
    if texts and Number in kinds and not several:
        texts, unit = without_unit(texts)
        cells = {
            **cells,
            **dict(zip((name for name, cell in cells.items() if cell), ([text] for text in texts), strict=True)),
        }
        remark = f"read as numbers of {unit}; pass {column}=label for labels" * bool(unit)
        remark = remark or "dates are read as texts; write a number such as the year" * all(map(DATE.match, texts))
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
    return ColumnSpec(condition_name(column), column, kind, first, texts, remark) if texts else None


def _texts_of(value: Any) -> list[str] | None:
    """Return the values of a cell as texts; None for an object, or a list of anything but texts."""
    several = isinstance(value, list | tuple)
    if isinstance(value, dict) or (several and not all(isinstance(each, str | None) for each in value)):
        return None
    known = (each for each in (value if several else [value]) if each is not None)
    texts = (str(each).encode("utf-8", "replace").decode().strip() for each in known)  # without halves of characters
    return [text for text in texts if text]


def condition_among(known: Collection[str], name: str) -> str:
    """Return the name of the condition that a user names, by its own name or by that of its column."""
    return name if name in known else condition_name(name)


def condition_name(column: str) -> str:
    """Return the name of the condition of a column: letters, digits and underscores, unlike any other input."""
    name = re.sub(r"\W+", "_", column).strip("_") or "column"
    return f"{name}_column" if name in RESERVED or name[0].isdigit() else name
