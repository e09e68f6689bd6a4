"""Runs as a page shows them, read from their folders while other processes write there.

Any file may be missing, half written, replaced, or none of ours. A file that cannot be read makes its run's report a
sentence and leaves the other runs as they are.
"""

import json
import os
import platform
import re
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from rectified_flow.errors import UsageError, first_line
from rectified_flow.runs.folder import STATUS_FILE, Status
from rectified_flow.system.files import open_regular, parse_document

POINTS = 400
"""Points of a curve in a report, however long the run is."""
CURVES = 200
"""Curves of a file; further names are left out."""
CHUNK = 2**24
"""Bytes of a file that one report reads; the next report continues there."""
SETTINGS = {"image_size", "num_real", "num_samples", "seed", "steps"}
"""Numbers in a row that are settings, not measurements."""
LARGEST = 1e300
"""Bound of the values of a curve; NaN and infinity are not below it."""
SAMPLES = "samples"
SAMPLE_FILE = re.compile(r"step_\d+\.png")
SHOWN_SAMPLES = 1000
QUIET = 600
"""Seconds without a new line or status after which a running run is reported as silent."""

Point = tuple[int, float]


class Curve:
    """The points of a curve in compact arrays; a list of pairs would take a second to thin after 100,000 lines."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.values.append(value)

    def thinned(self, count: int = POINTS) -> list[Point]:
        """Return at most ``count`` points: means of as many neighbours, each at the last of their steps."""
        size = len(self.steps)
        if size <= count:
            return list(zip(self.steps, self.values, strict=True))
        bounds = np.arange(count + 1) * size // count  # [count + 1]
        means = np.add.reduceat(np.array(self.values), bounds[:-1]) / np.diff(bounds)
        return list(zip(np.array(self.steps)[bounds[1:] - 1].tolist(), means.tolist(), strict=True))


class Curves:
    """The numbers in a file of JSON lines, by name.

    Args:
        path: the file, which need not exist yet, and may be replaced by a shorter one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._file, self._offset = 0, 0
        self.curves: dict[str, Curve] = defaultdict(Curve)

    def read_on(self) -> None:
        """Read the new lines, except damaged ones and a last one that is half written.

        Raises:
            OSError: if the file is there and cannot be read.
        """
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._forget()
                    self._file = found.st_ino
                file.seek(self._offset)
                content = file.read(CHUNK)
        except FileNotFoundError:
            self._forget()
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
        if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) >= 2**63:
            return
        for name, value in row.items():
            wanted = name in self.curves or len(self.curves) < CURVES
            if wanted and type(value) in (int, float) and abs(value) < LARGEST and name not in {"step", *SETTINGS}:
                self.curves[name].add(row["step"], value)

    def last(self, name: str) -> Point | None:
        """Return the newest point of a curve, or None if the curve has none."""
        curve = self.curves.get(name)
        return None if curve is None else (curve.steps[-1], curve.values[-1])


class WatchedRun:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {name: Curves(folder / f"{name}.jsonl") for name in ("metrics", "heldout", "evaluations")}

    def report(self) -> dict[str, Any]:
        """Return the values that a page shows of the run, as JSON can hold them.

        ``step`` and ``total_steps`` are optimizer steps, ``seconds_left`` and ``silent`` seconds. ``curves`` has lists
        of ``[step, value]`` by file and name, of at most :data:`POINTS`. ``message`` is the run's own, and names the
        files that cannot be read.
        """
        messages: list[str] = []
        status = self._status(messages.append)
        for file in self._files.values():
            try:
                file.read_on()
            except OSError as error:
                messages.append(f"{file.path.name} cannot be read ({error.strerror or error})")
        metrics = self._files["metrics"]
        bad_steps, loss = metrics.last("bad_steps"), metrics.last("loss")
        step = max(status.step if status else 0, loss[0] if loss else 0)
        return {
            "state": _state(status),
            "message": "; ".join(filter(None, messages)),
            "step": step,
            "total_steps": status.total_steps if status else None,
            "silent": self._silence(status),
            "seconds_left": self._seconds_left(status, step),
            "bad_steps": int(bad_steps[1]) if bad_steps else 0,
            "samples": self.samples(),
            "curves": {
                name: {curve: points.thinned() for curve, points in file.curves.items()}
                for name, file in self._files.items()
            },
        }

    def samples(self) -> list[str]:
        """Return the names of the newest grids of samples, in the order of their steps."""
        with suppress(OSError), os.scandir(self.folder / SAMPLES) as found:
            return sorted(each.name for each in found if SAMPLE_FILE.fullmatch(each.name))[-SHOWN_SAMPLES:]
        return []

    def sample(self, name: str) -> bytes | None:
        """Return the PNG file of a grid; None if there is none, or it is a link that leads out of the folder."""
        path = self.folder / SAMPLES / name
        with suppress(OSError):
            if SAMPLE_FILE.fullmatch(name) and path.resolve().is_relative_to(self.folder.resolve()):
                return _read(path)
        return None

    def _status(self, report: Callable[[str], object]) -> Status | None:
        with suppress(FileNotFoundError):
            try:
                status = parse_document(_read(self.folder / STATUS_FILE), Status, STATUS_FILE)
            except (OSError, UsageError) as error:
                report(f"{STATUS_FILE} cannot be read ({error})")
            else:
                report(status.message)
                return status
        return None

    def _silence(self, status: Status | None) -> float | None:
        """Return the seconds since a running run wrote anything, if they exceed :data:`QUIET`."""
        if status is None or status.state != "running":
            return None
        signs = [0.0]
        with suppress(ValueError, OverflowError):
            signs.append(datetime.strptime(status.time, "%Y-%m-%dT%H:%M:%S%z").timestamp())
        for file in self._files.values():
            with suppress(OSError):
                signs.append(file.path.stat().st_mtime)
        silence = time.time() - max(signs)
        return silence if silence > QUIET else None

    def _seconds_left(self, status: Status | None, step: int) -> float | None:
        rate, seen = (self._files["metrics"].last(name) for name in ("images_per_second", "images_seen"))
        if status is None or _state(status) != "running" or not rate or not seen or rate[1] <= 0 or seen[0] <= 0:
            return None
        batch = seen[1] / seen[0]  # images per step
        seconds = float(max(0, status.total_steps - step)) * batch / rate[1]
        return seconds if isfinite(seconds) else None


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


def is_run(folder: Path) -> bool:
    """Return whether a run has begun in ``folder``; False if its rights forbid reading it."""
    return os.path.isfile(folder / STATUS_FILE)


def runs_in(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else the runs in it, by name."""
    if is_run(folder):
        return [folder]
    with suppress(OSError):
        return sorted(filter(is_run, folder.iterdir()))
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
        return f"[{','.join(_json(run, number, names[number]) for number, run in enumerate(found))}]"

    def empty(self) -> list[Path]:
        """Return the folders in which no run has begun."""
        return [folder for folder in self.folders if not runs_in(folder)]


def _json(run: WatchedRun, number: int, name: str) -> str:
    card = {"id": number, "name": name}
    try:
        return json.dumps(card | run.report(), allow_nan=False)
    except (ArithmeticError, OSError, ValueError) as error:
        sick = WatchedRun(run.folder / "nowhere").report() | {"state": "waiting"}
        return json.dumps(card | sick | {"message": f"{run.folder} cannot be shown ({first_line(error)})"})


def short_names(folders: list[Path]) -> list[str]:
    """Return the last parts of different paths, as many as it takes to distinguish them."""
    for count in range(1, max((len(folder.parts) for folder in folders), default=0) + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(folders):
            return names
    return [str(folder) for folder in folders]
