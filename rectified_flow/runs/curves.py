"""The numbers in a file of JSON lines as curves, while another process writes the file."""

import json
import os
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 400
"""Of a curve that is sent, however long the run is."""
SETTINGS = {"image_size", "num_real", "num_samples", "seed", "steps"}
"""Numbers in the files of lines that are no curves."""
LARGEST = 1e300
"""Above every number that a curve has; NaN and infinity are not below it."""

Point = tuple[int, float]


class Curve:
    """A curve in compact arrays: a list of pairs would take a second to thin after 100,000 lines."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """Add a point."""
        self.steps.append(step)
        self.values.append(value)

    def last(self) -> Point:
        """The newest point."""
        return self.steps[-1], self.values[-1]

    def thinned(self, count: int = POINTS) -> list[Point]:
        """At most ``count`` points: the mean value of as many neighbours, at the step of the last of them."""
        size = len(self.steps)
        if size <= count:
            return list(zip(self.steps, self.values, strict=True))
        bounds = np.arange(count + 1) * size // count  # [count + 1]
        means = np.add.reduceat(np.array(self.values), bounds[:-1]) / np.diff(bounds)
        return list(zip(np.array(self.steps)[bounds[1:] - 1].tolist(), means.tolist(), strict=True))


class Curves:
    """The numbers in a file of JSON lines, by name. Each call of :meth:`read_on` reads the new lines only.

    Args:
        path: the file, which need not exist yet, and may be replaced by a shorter one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._file, self._offset = 0, 0
        self._curves: dict[str, Curve] = {}
        self._thinned: dict[str, list[Point]] | None = None

    def read_on(self) -> None:
        """Read the new lines. Damaged lines, and the last one while it is half written, are left out."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._forget()
                    self._file = found.st_ino
                file.seek(self._offset)
                content = file.read()
        except OSError:
            self._forget()
            return
        whole = content.rfind(b"\n") + 1
        if whole:
            self._offset += whole
            self._thinned = None
        for line in content[:whole].splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        row: Any = None
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
        if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) >= 2**63:
            return
        for name, value in row.items():
            if type(value) in (int, float) and abs(value) < LARGEST and name not in {"step", *SETTINGS}:
                self._curves.setdefault(name, Curve()).add(row["step"], value)

    def thinned(self) -> dict[str, list[Point]]:
        """Curves by name, of at most :data:`POINTS`."""
        if self._thinned is None:
            self._thinned = {name: curve.thinned() for name, curve in self._curves.items()}
        return self._thinned

    def last(self, name: str) -> Point | None:
        """The newest point of a curve, or None if it has none."""
        curve = self._curves.get(name)
        return None if curve is None else curve.last()
