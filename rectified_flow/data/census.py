"""The faults of pictures that a user should know before training: empty, dark, grey, or nearly equal to another."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.uint8]
Fields = NDArray[np.float32]
NOISE = 2  # largest difference of values that count as equal, as JPEG rounds them [levels of 256]
DARK = 16  # all values of a dark picture are below it, as those of 12 bits in a file of 16 bits [levels of 256]
FIELDS = 8  # fields of each side, by whose mean colours pictures are compared
TOLERANCE = 3.0  # largest root mean square difference between the fields of nearly equal pictures [levels of 256]
BANDS, BAND_BITS = 4, 14
"""Parts of the hash of a picture and bits of a part: nearly equal pictures share one part at least."""
BIT_VALUES = 1 << np.arange(BAND_BITS)
MOST_COMPARED = 8  # number of the last pictures with the same part of a hash that a picture is compared with


def is_flat(row: Row) -> bool:
    """Return whether all pixels of a picture, uint8 ``[c, h, w]``, have one colour and transparency."""
    some = row[0, ::4, ::4]  # these few values of most pictures differ
    return int(some.max()) - int(some.min()) <= NOISE and bool((np.ptp(row, axis=(1, 2)) <= NOISE).all())


def _is_grey(row: Row) -> bool:
    some = row[:3, ::8, ::8]  # these few pixels of most pictures have colours
    return len(row) > 1 and all((np.ptp(each, axis=0) <= NOISE).all() for each in (some, row[:3]))


FAULTS: Mapping[str, Callable[[Row], bool]] = {
    "wholly transparent": lambda row: len(row) > 3 and not row[3].any(),
    "of one colour": is_flat,
    f"dark, with no value above {DARK - 1} of 255": lambda row: int(row[:3].max()) < DARK,
    "grey": _is_grey,
}
"""Faults of a picture, uint8 ``[c, h, w]``, by their name in a sentence. Only the first fault of a picture counts."""


class Census:
    """Counts the faults of pictures as they are stored, at a cost that does not depend on their number."""

    def __init__(self) -> None:
        self.count = 0
        self._found = defaultdict[str, list[int]](list)
        self._fields = list[Fields]()
        self._by_part = defaultdict[tuple[int, int], list[int]](list)

    def add(self, row: Row, *, is_repeated: bool = False) -> None:
        """Count a picture, uint8 ``[c, h, w]``, RGB or RGBA, which may be equal to an earlier one."""
        fault = next((name for name, has in FAULTS.items() if has(row)), None)
        if fault is not None:
            self._found[fault].append(self.count)
        if fault in (None, "grey") and not is_repeated and self._resembles_another(row):
            self._found["nearly equal to an earlier one"].append(self.count)
        self.count += 1

    def notes(self, names: Sequence[str]) -> list[str]:
        """Return a sentence for each fault, with the name of the first picture that has it.

        Args:
            names: the names of all pictures, in the order in which they were added.
        """
        return [counted_sentence(len(found), fault, names[found[0]]) for fault, found in self._found.items()]

    def _resembles_another(self, row: Row) -> bool:
        """Return whether an earlier picture is nearly, but not exactly, like a picture, and keep its fields."""
        fields = fields_of(row[:3])
        parts = _parts_of(fields)
        others = [*{number for part in parts for number in self._by_part[part]}]
        for part in parts:
            self._by_part[part] = [*self._by_part[part][1 - MOST_COMPARED :], len(self._fields)]
        self._fields.append(fields)
        if not others:
            return False
        differences = np.stack([self._fields[number] for number in others]) - fields
        return bool(0 < np.square(differences).mean(axis=(1, 2, 3)).min() <= TOLERANCE**2)


def counted_sentence(count: int, what: str, name: str) -> str:
    """Return a sentence that pictures have a property, with the name of one of them."""
    return f"{count:,} {'picture is' if count == 1 else 'pictures are'} {what}, such as {name}"


def fields_of(row: Row) -> Fields:
    """Return the mean colours of the fields of a picture ``[c, h, w]``, float32 ``[c, 8, 8]``."""
    down, across = (_means(size) for size in row.shape[1:])
    fields: Fields = down @ row.astype(np.float32) @ across.T
    return fields


@cache
def _means(size: int) -> Fields:
    """Return the matrix ``[8, size]`` that computes the means of 8 parts, each of at least one pixel."""
    edges = np.linspace(0, size, FIELDS + 1).astype(int)
    places = np.arange(size)
    starts = np.minimum(edges[:-1], size - 1)[:, None]
    chosen = (places >= starts) & (places < np.maximum(edges[1:, None], starts + 1))
    return (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)


def _parts_of(fields: Fields) -> list[tuple[int, int]]:
    """Return the parts of the difference hash of a picture: whether each field is brighter than its right neighbour."""
    grey = fields.mean(axis=0)
    bits = (grey[:, :-1] - grey[:, 1:] > NOISE).reshape(BANDS, BAND_BITS)
    return list(enumerate((bits @ BIT_VALUES).tolist()))
