"""The numbers in a file of JSON lines as curves, while another process writes the file."""

import json
import os
import platform
import re
import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow.errors import UsageError
from rectified_flow.runs.folder import STATUS_FILE, Status
from rectified_flow.system.files import read_document

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


SAMPLES = "samples"
SAMPLE_FILE = re.compile(r"step_\d+\.png")
QUIET = 600
"""Seconds without a sign after which a run on another machine is reported as silent."""


class WatchedRun:
    """A run's folder, of which every file may be missing, half written or replaced at any time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves = {name: Curves(folder / f"{name}.jsonl") for name in ("metrics", "heldout", "evaluations")}

    def report(self) -> dict[str, Any]:
        """What a page shows of the run, as JSON can hold it.

        ``step`` and ``total_steps`` are optimizer steps, ``seconds_left`` and ``silent`` seconds; ``curves`` has lists
        of ``[step, value]`` by file and name, of at most :data:`rectified_flow.runs.watched.POINTS`.
        """
        for curves in self._curves.values():
            curves.read_on()
        status = self._status()
        metrics = self._curves["metrics"]
        bad_steps, loss = metrics.last("bad_steps"), metrics.last("loss")
        step = max(status.step if status else 0, loss[0] if loss else 0)
        return {
            "state": _state(status),
            "message": status.message if status else "",
            "step": step,
            "total_steps": status.total_steps if status else None,
            "silent": self._silence(status),
            "seconds_left": self._seconds_left(status, step),
            "bad_steps": int(bad_steps[1]) if bad_steps else 0,
            "samples": self.samples(),
            "curves": {name: curves.thinned() for name, curves in self._curves.items()},
        }

    def samples(self) -> list[str]:
        """The names of the grids of samples, in the order of their steps."""
        with suppress(OSError):
            return sorted(name for name in os.listdir(self.folder / SAMPLES) if SAMPLE_FILE.fullmatch(name))
        return []

    def sample(self, name: str) -> bytes | None:
        """The PNG file of a grid; None if there is none of that name, or it is a link that leads out of the folder."""
        path = self.folder / SAMPLES / name
        with suppress(OSError):
            inside = path.resolve().is_relative_to(self.folder.resolve())
            if SAMPLE_FILE.fullmatch(name) and inside and path.is_file():
                return path.read_bytes()
        return None

    def _status(self) -> Status | None:
        with suppress(UsageError, OSError):
            return read_document(self.folder / STATUS_FILE, Status)
        return None

    def _silence(self, status: Status | None) -> float | None:
        """Seconds since a run that says it is running has written anything, if these are too many."""
        if status is None or status.state != "running":
            return None
        signs = [0.0]
        with suppress(ValueError):
            signs.append(datetime.strptime(status.time, "%Y-%m-%dT%H:%M:%S%z").timestamp())
        for curves in self._curves.values():
            with suppress(OSError):
                signs.append(curves.path.stat().st_mtime)
        silence = time.time() - max(signs)
        return silence if silence > QUIET else None

    def _seconds_left(self, status: Status | None, step: int) -> float | None:
        rate, seen = (self._curves["metrics"].last(name) for name in ("images_per_second", "images_seen"))
        if status is None or _state(status) != "running" or not rate or not seen or rate[1] <= 0 or seen[0] <= 0:
            return None
        batch = seen[1] / seen[0]  # images per step
        return max(0, status.total_steps - step) * batch / rate[1]


def _state(status: Status | None) -> str:
    """That of ``status.json``, or ``died`` if the process of this machine that wrote it is gone."""
    if status is None:
        return "waiting"
    if status.state == "running" and status.host == platform.node() and not _is_alive(status.pid):
        return "died"
    return status.state


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return True


def is_run(folder: Path) -> bool:
    """Whether a run has begun in ``folder``; False where its rights forbid to look."""
    return os.path.isfile(folder / STATUS_FILE)


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is that of a run, else those of the runs in it, by name."""
    if is_run(folder):
        return [folder]
    with suppress(OSError):
        return sorted(filter(is_run, folder.iterdir()))
    return []


class WatchedRuns:
    """Runs by number, which stays as long as this lives; more may appear in a folder that holds runs.

    Args:
        folders: of runs, or folders that hold them.
    """

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = [Path(os.path.abspath(folder)) for folder in folders]  # a link keeps its name
        self._runs: dict[Path, WatchedRun] = {}

    def find(self) -> Mapping[int, WatchedRun]:
        """Those that have begun; each once, however often it was named."""
        for found in map(runs_in, self.folders):
            for folder in found:
                self._runs.setdefault(folder, WatchedRun(folder))
        return dict(enumerate(self._runs.values()))

    def report(self) -> list[dict[str, Any]]:
        """:meth:`WatchedRun.report` of each, with its number as ``id``, and a ``name`` that no other has."""
        found = self.find()
        names = short_names([run.folder for run in found.values()])
        return [{"id": number, "name": names[number], **run.report()} for number, run in found.items()]

    def empty(self) -> list[Path]:
        """The folders in which no run has begun."""
        return [folder for folder in self.folders if not runs_in(folder)]


def short_names(folders: list[Path]) -> list[str]:
    """The last parts of different paths, as many as it takes to tell all apart."""
    for count in range(1, max((len(folder.parts) for folder in folders), default=0) + 1):
        names = ["/".join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(folders):
            return names
    return [str(folder) for folder in folders]
