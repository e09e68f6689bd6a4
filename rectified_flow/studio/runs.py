"""The state of runs, read from their folders without torch: the studio keeps no state of its own about them."""

import json
import os
import platform
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from rectified_flow.errors import UsageError
from rectified_flow.runs.training_config import CHECKPOINTS
from rectified_flow.studio.jobs import Process
from rectified_flow.system.artifact import MANIFEST
from rectified_flow.system.files import read_document

CONFIG, STATUS, METRICS, SAMPLES = "config.json", "status.json", "metrics.jsonl", "samples"
"""Names of the files of a run. The modules that define them import torch; tests/studio compares the names."""
NEIGHBOURS = "neighbours.png"
"""Name of a picture among the samples of a run, also compared by tests/studio."""
ONE_STEP = "one-step"
PICTURES = ("Pixels", "Latents", "LatentsInStep")
"""Kinds of spaces of pictures."""
CURVES = {"loss": "training", "seen_loss": "some training pictures", "heldout_loss": "held-out pictures"}
"""Names of losses in a line of metrics, and in words."""
Document = Mapping[str, object]


@dataclass(frozen=True)
class Control:
    """A condition of a trained flow, as a person sets it."""

    name: str
    choices: tuple[str, ...] = ()
    """The values of a menu."""
    span: tuple[float, float] | None = None
    """The smallest and the largest number in the training data."""
    examples: tuple[str, ...] = ()
    """Captions to start from."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run; each property reads its files when it is first used."""

    folder: Path

    @cached_property
    def config(self) -> Document:
        """The contents of ``config.json``."""
        return _document(self.folder / CONFIG)

    @cached_property
    def status(self) -> Document:
        """The contents of ``status.json``; empty before the first step."""
        return _document(self.folder / STATUS)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another machine trains the run."""
        return self.status.get("state") == "running" and self.status.get("host") != platform.node()

    @cached_property
    def state(self) -> str:
        """The state of the run: running, finished, interrupted or failed. A killed run is interrupted."""
        state = str(self.status.get("state", "interrupted"))
        if state != "running" or self.is_elsewhere:
            return state
        return "running" if self._trains() else "interrupted"

    def _trains(self) -> bool:
        """Return whether the process in the status runs, and is older than the status."""
        import psutil

        with suppress(psutil.Error, ValueError):
            process = Process.of(int(_number(self.status, "pid")))
            return process.is_alive and process.created < (_time(self.status, "time") or 0.0) + 2
        return False

    @property
    def step(self) -> int:
        """Number of steps that were done when the status was written."""
        return int(_number(self.status, "step"))

    @property
    def total(self) -> int:
        """Number of steps of the whole run."""
        return int(_number(self.status, "total_steps"))

    @property
    def ends(self) -> float | None:
        """When the run is expected to end [s since 1970]; None if it does not train, or before the first estimate."""
        return _time(self.status, "ends") if self.state == "running" else None

    @property
    def step_time(self) -> float:
        """Time of a step [s]; 0 before the first measurement."""
        return _number(self.status, "step_time")

    @property
    def samples(self) -> dict[int, Path]:
        """The grids of samples by step."""
        grids = sorted((self.folder / SAMPLES).glob("step_*.png"))
        return {int(grid.stem.removeprefix("step_")): grid for grid in grids if grid.stem[5:].isdecimal()}

    @property
    def neighbours(self) -> Path | None:
        """File of the likeliest copies beside their nearest training pictures; None if it does not exist."""
        path = self.folder / SAMPLES / NEIGHBOURS
        return path if path.exists() else None

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run can be sampled."""
        place = self.flags.get("checkpoint_dir")
        folder = Path(place) if isinstance(place, str) else self.folder / CHECKPOINTS
        return any(folder.glob(f"step_*/{MANIFEST}"))

    @property
    def losses(self) -> list[dict[str, object]]:
        """Rows of the curves, with ``step``, ``loss`` and ``of``, the name of the curve."""
        rows = list[dict[str, object]]()
        before = dict[str, object]()
        with suppress(OSError):
            for line in (self.folder / METRICS).read_text(errors="replace").splitlines():
                with suppress(ValueError):
                    values = _mapping(json.loads(line))
                    for name, words in CURVES.items():
                        if values.get(name) != before.get(name):  # lines repeat the last measurement
                            rows.append({"step": values.get("step"), "loss": values[name], "of": words})
                    before = dict(values)
        return rows

    @property
    def flags(self) -> Document:
        """The flags that start the run again."""
        return _mapping(self.config.get("training"))

    @property
    def flow(self) -> Document:
        """The description of the flow."""
        return _mapping(self.config.get("flow"))

    @property
    def takes_pictures(self) -> bool:
        """Whether the flow translates pictures."""
        return bool(self.flow.get("from_source")) or "source" in self._conditions

    @property
    def is_one_step(self) -> bool:
        """Whether the flow needs one call of its network by default."""
        return self.flow.get("kind") != "RectifiedFlow"

    @property
    def makes_pictures(self) -> bool:
        """Whether the flow generates pictures, and not measurements."""
        return _mapping(self.flow.get("space")).get("kind") in PICTURES

    @property
    def can_vary(self) -> bool:
        """Whether a generated picture can be varied: noise is added to it, and the flow removes the noise."""
        return self.makes_pictures and not self.takes_pictures and not self.is_one_step

    @property
    def can_fill(self) -> bool:
        """Whether the flow can generate a part of a picture."""
        return self.can_vary or str(self.flags.get("degrade")).startswith("mask")

    @property
    def default_steps(self) -> int:
        """Number of steps of sampling by default."""
        return 1 if self.is_one_step else 16

    def stop(self) -> None:
        """Ask the process that trains the run here to save and to end."""
        if self._trains():
            os.kill(int(_number(self.status, "pid")), signal.SIGTERM)

    @property
    def controls(self) -> list[Control]:
        """The conditions that a person can set."""
        controls = list[Control]()
        for name, described in self._conditions.items():
            kind = _mapping(described)
            names, quantiles = _list(kind, "names"), _list(kind, "quantiles")
            if kind.get("kind") == "Labels":
                numbered = [str(number) for number in range(int(_number(kind, "num_classes")))]
                controls.append(Control(name, choices=tuple(map(str, names)) or tuple(numbered)))
            elif quantiles:
                controls.append(Control(name, span=(float(str(quantiles[0])), float(str(quantiles[-1])))))
            elif "encoder" in kind:
                controls.append(Control(name, examples=tuple(map(str, _list(kind, "examples")))))
        return controls

    @property
    def _conditions(self) -> Document:
        return _mapping(_mapping(self.flow.get("network")).get("conditions"))


def run_folders(runs: Path) -> list[Path]:
    """Return the folders of runs in a folder, newest first; a one-step generator lies in the folder of its run."""
    found = [path.parent for pattern in (f"*/{CONFIG}", f"*/{ONE_STEP}/{CONFIG}") for path in runs.glob(pattern)]
    return sorted((folder for folder in found if RunFolder(folder).flags), key=_changed, reverse=True)


def _changed(folder: Path) -> float:
    with suppress(OSError):
        return (folder / STATUS).stat().st_mtime
    return 0.0


def _document(path: Path) -> Document:
    with suppress(UsageError):
        return read_document(path, dict[str, object])
    return {}


def _mapping(value: object) -> Document:
    return value if isinstance(value, Mapping) else {}


def _list(document: Document, name: str) -> list[object]:
    value = document.get(name)
    return [*value] if isinstance(value, list | tuple) else []


def _time(document: Document, name: str) -> float | None:
    """Return a time in a document [s since 1970]; None without one."""
    with suppress(ValueError):
        return datetime.fromisoformat(str(document.get(name))).timestamp()
    return None


def _number(document: Document, name: str) -> float:
    value = document.get(name)
    return value if isinstance(value, int | float) else 0.0
