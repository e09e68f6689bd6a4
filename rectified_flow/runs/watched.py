"""Runs as a page shows them, read from their folders while other processes write there.

Any file may be missing, half written, replaced, or none of ours. A file that cannot be read makes its run's report a
sentence and leaves the other runs as they are. Sizes are bounded: a report reads at most :data:`CHUNK` bytes of each
file, and shows at most :data:`MOST_CURVES` curves of it.
"""

import json
import os
import platform
import time
from array import array
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil

from rectified_flow.errors import first_line
from rectified_flow.runs.folder import STATUS_FILE, Status
from rectified_flow.system.files import open_regular, parse_document

POINTS = 400
"""Points of a curve in a report, however long the run is."""
CHUNK = 2**24
"""Bytes of a file that one report reads; the next report continues there."""
NO_MEASUREMENTS = {"step", "image_size", "num_real", "num_samples", "seed", "steps"}
"""Names of the numbers in a row that are settings, or the step, and not measurements."""
LARGEST, LAST_STEP = 1e300, 2**53
"""Exclusive upper bounds of the values and steps of a curve, which NaN and infinity exceed as well."""
MOST_CURVES = 100
"""Maximum number of curves of a file; further curves are left out."""
SAMPLES = "samples"
SHOWN_SAMPLES = 1000
QUIET = 600
"""Seconds without a new line or status after which a running run is reported as silent."""

Points: TypeAlias = "array[float]"
"""A curve as alternating steps and values. A list of pairs would take a second to thin after 100,000 lines."""


def thinned(curve: Points, count: int = POINTS) -> list[tuple[int, float]]:
    """Thin a curve to at most ``count`` points: means of neighbouring values, each at the last of their steps."""
    points = np.array(curve).reshape(-1, 2)  # [n, step and value]
    if len(points) > count:
        bounds = np.arange(count + 1) * len(points) // count  # [count + 1]
        means = np.add.reduceat(points[:, 1], bounds[:-1]) / np.diff(bounds)
        points = np.stack([points[bounds[1:] - 1, 0], means], axis=1)
    return [(int(step), value) for step, value in points.tolist()]


class Curves:
    """The numbers in a file of JSON lines, by name.

    Args:
        path: the file, which need not exist yet, and may be replaced by a shorter one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves: dict[str, Points] = {}
        self._file, self._offset = 0, 0

    def read_on(self) -> None:
        """Read the new lines, except damaged ones and a last one that is half written.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self.curves.clear()
                    self._file, self._offset = found.st_ino, 0
                file.seek(self._offset)
                content = file.read(CHUNK)
        except FileNotFoundError:
            self.curves.clear()
            self._file = 0
            return
        # A line that is longer than a chunk is damaged; its end is skipped as a line of its own.
        whole = CHUNK if len(content) == CHUNK and b"\n" not in content else content.rfind(b"\n") + 1
        self._offset += whole
        for line in content[:whole].splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        row: Any = None
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
        if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) >= LAST_STEP:
            return
        for name, value in row.items():
            is_number = type(value) in (int, float) and abs(value) < LARGEST and name not in NO_MEASUREMENTS
            if is_number and (name in self.curves or len(self.curves) < MOST_CURVES):
                self.curves.setdefault(name, array("d")).extend((row["step"], value))

    def last(self, name: str) -> tuple[int, float]:
        """Return the newest point of a curve, or 0 at step 0 if the curve has none."""
        step, value = self.curves.get(name, (0, 0.0))[-2:]
        return int(step), value


class WatchedRun:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: Curves(folder / f"{name}.jsonl") for name in ("metrics", "heldout", "evaluations")}

    def report(self) -> dict[str, Any]:
        """Return the values that a page shows of the run, as JSON can hold them.

        ``step`` and ``total_steps`` are optimizer steps, ``seconds_left`` and ``silent`` seconds. ``curves`` has lists
        of ``[step, value]`` by file and name, of at most :data:`POINTS`. ``message`` is that of ``status.json``.

        Raises:
            OSError: if an existing file cannot be read.
            UsageError: if ``status.json`` is damaged.
        """
        status, last = self._status(), self._files["metrics"].last
        for file in self._files.values():
            file.read_on()
        state, step = _state(status), max(status.step if status else 0, last("loss")[0])
        return {
            "state": state,
            "message": status.message if status else "",
            "step": step,
            "total_steps": status.total_steps if status else None,
            "silent": self._silence() if state == "running" else None,
            "seconds_left": self._seconds_left(status.total_steps - step) if status and state == "running" else None,
            "bad_steps": int(last("bad_steps")[1]),
            "samples": self.samples(),
            "curves": {
                name: {curve: thinned(points) for curve, points in file.curves.items()}
                for name, file in self._files.items()
            },
        }

    def samples(self) -> list[str]:
        """Return the names of the newest grids of samples, in the order of their steps."""
        return sorted(each.name for each in (self.folder / SAMPLES).glob("step_*.png"))[-SHOWN_SAMPLES:]

    def sample(self, name: str) -> bytes | None:
        """Return the PNG file of a grid; None if there is none, or it is a link that leads out of the folder."""
        with suppress(OSError):
            if name in self.samples():  # first, as a request may contain a null byte, which no path may
                path = self._grid(name)
                return _read(path) if path else None
        return None

    def grids(self) -> list[Path]:
        """Return the files of the newest grids of samples, in the order of their steps."""
        return [path for name in self.samples() if (path := self._grid(name)) is not None]

    def _grid(self, name: str) -> Path | None:
        path, folder = (Path(os.path.realpath(each)) for each in (self.folder / SAMPLES / name, self.folder))
        return path if path.is_relative_to(folder) and path.is_file() else None

    def _status(self) -> Status | None:
        with suppress(FileNotFoundError):
            return parse_document(_read(self.folder / STATUS_FILE), Status, STATUS_FILE)
        return None

    def _silence(self) -> float | None:
        """Return the seconds since the run wrote a file, if they exceed :data:`QUIET`."""
        files = [self.folder / STATUS_FILE, *(file.path for file in self._files.values())]
        silence = time.time() - max(file.stat().st_mtime for file in files if file.exists())
        return silence if silence > QUIET else None

    def _seconds_left(self, steps: int) -> float | None:
        """Return the time of the steps that are left, at the newest rate, or None before the first line of metrics."""
        last = self._files["metrics"].last
        (_, rate), (step, images) = last("images_per_second"), last("images_seen")
        return max(0, steps) * images / step / rate if rate > 0 and step > 0 else None


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(CHUNK)


def _state(status: Status | None) -> str:
    """Return the state in ``status.json``, or ``died`` if its process, on this machine, is gone."""
    if status is None:
        return "waiting"
    if status.state == "running" and status.host == platform.node() and not psutil.pid_exists(status.pid):
        return "died"
    return status.state


def runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else the runs in it, by name, except unreadable ones."""
    with suppress(OSError):
        folders = [folder, *sorted(folder.iterdir())]
        runs = [each for each in folders if os.path.isfile(each / STATUS_FILE)]
        return [folder] if folder in runs else runs
    return []


class WatchedRuns:
    """Runs, each under a number that it keeps; more may appear in a folder that holds runs.

    Args:
        folders: folders of runs, or folders that hold them.
    """

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]  # a link keeps its name
        self._runs: dict[Path, WatchedRun] = {}

    def find(self) -> list[WatchedRun]:
        """Return the runs that have begun, by number."""
        for found in map(runs_in, self.folders):
            for folder in found:
                self._runs.setdefault(folder, WatchedRun(folder))
        return list(self._runs.values())

    def report(self) -> str:
        """Return JSON: :meth:`WatchedRun.report` of each run, with its number as ``id`` and a unique ``name``."""
        found = self.find()
        names = short_names([run.folder for run in found])
        return f"[{','.join(map(_json, found, count(), names))}]"


def _json(run: WatchedRun, number: int, name: str) -> str:
    card = {"id": number, "name": name}
    try:
        return json.dumps(card | run.report(), allow_nan=False)
    except (ArithmeticError, OSError, ValueError) as error:  # also an overflow, a division by 0 or a damaged status
        empty = WatchedRun(Path(__file__).with_name("nowhere")).report()  # not below a folder that cannot be read
        return json.dumps(card | empty | {"message": f"{run.folder} cannot be shown ({first_line(error)})"})


def short_names(folders: list[Path]) -> list[str]:
    """Return the last parts of different paths, as many as it takes to distinguish them."""
    parts, names = 1, [folder.name for folder in folders]
    while len(set(names)) < len(folders):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names
