"""The state of runs, read from their folders without torch: the studio keeps no state of its own about them."""

import os
import platform
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rectified_flow.errors import UsageError
from rectified_flow.registry import Document
from rectified_flow.runs.training_config import CHECKPOINTS
from rectified_flow.studio.jobs import BEGUN, is_alive, jobs, newest
from rectified_flow.system.artifact import MANIFEST
from rectified_flow.system.files import read_document

CONFIG, STATUS, LOSS, SAMPLES = "config.json", "status.json", "loss.png", "samples"
"""Names of the files of a run. The modules that define them import torch; tests/studio compares the names."""
NEIGHBOURS = "neighbours.png"
"""Name of a picture among the samples of a run, also compared by tests/studio."""
STEP = f"step_{'[0-9]' * 8}"
"""Names of samples and checkpoints, as a pattern of file names."""
STATES = ("running", "finished", "interrupted", "failed")
"""States in the status of a run."""
ONE_STEP = "one-step"
SET_BY = {"num_classes", "quantiles", "encoder"}
"""Keys in the descriptions of conditions that the page has fields for: labels, numbers and captions."""
PICTURES = ("Pixels", "Latents", "LatentsInStep")
"""Kinds of spaces of pictures."""


class Run:
    """A run in the folder of the runs, as it is now. A part of its files that is missing or damaged counts as empty."""

    def __init__(self, runs: Path, name: str) -> None:
        self.name, self.folder = name, runs / name
        self.config, self.status = document(self.folder / CONFIG), document(self.folder / STATUS)
        job = newest(runs, "train", name)
        is_old = job and job.pid != self.status.get("pid") and _is_newer(self.folder / STATUS, job.folder / BEGUN)
        self.job = None if is_old else job
        """The newest job that trains the run; None without one, or if the run was trained in a terminal since then."""
        self.flags, self.flow = _part(self.config, "training"), _part(self.config, "flow")
        """The flags that start the run again, and the description of the flow."""
        self.conditions = _part(_part(self.flow, "network"), "conditions")
        self.controls = {name: kind for name, kind in self.conditions.items() if SET_BY & kind.keys()}
        """The descriptions of the conditions that a person can set, by name."""
        self.is_one_step = self.flow.get("kind") != "RectifiedFlow"
        """Whether the flow needs one call of its network by default."""
        self.takes_pictures = bool(self.flow.get("from_source")) or "source" in self.conditions
        """Whether the flow translates pictures."""
        makes_pictures = _part(self.flow, "space").get("kind") in PICTURES
        self.can_vary = makes_pictures and not self.takes_pictures and not self.is_one_step
        """Whether a generated picture can be varied: noise is added to it, and the flow removes the noise."""
        self.can_fill = self.can_vary or str(self.flags.get("degrade")).startswith("mask")
        """Whether the flow can generate a part of a picture."""
        self.ends = _time(self.status.get("ends"))
        """When a run that trains is expected to end [s since 1970]; None before the first estimate."""
        self.is_elsewhere = self.status.get("state") == "running" and self.status.get("host") != platform.node()
        """Whether another machine trains the run."""
        self.state = self._state()

    def _state(self) -> str:
        """Return waiting, preparing, running, stopping, finished, failed, or interrupted (which a killed run is)."""
        state, job = self.status.get("state"), self.job
        state = state if state in STATES else "interrupted"
        if state == "running" and not self.is_elsewhere:
            state = "running" if is_alive(self.status.get("pid", -1), self.folder / STATUS) else "interrupted"
        if job is None:
            return state
        if job.is_busy and job.is_stopping:
            return "stopping"
        if job.is_busy and not job.has_begun:
            return "waiting"
        # A job that also makes a one-step generator goes on after the run is finished.
        is_done = state == "finished" and self.status.get("pid") == job.pid
        if job.is_busy and state != "running" and not is_done:
            return "preparing"
        has_failed = job.code != 0 and not job.is_busy and not job.is_stopping
        return "failed" if has_failed and state == "interrupted" else state

    def stop(self) -> None:
        """Ask the process that trains the run here to save and to end."""
        if self.job is not None and self.job.is_busy:
            self.job.stop()
        elif self.state == "running" and not self.is_elsewhere:
            os.kill(self.status["pid"], signal.SIGTERM)

    @property
    def samples(self) -> dict[int, Path]:
        """The grids of samples by step."""
        grids = sorted((self.folder / SAMPLES).glob(f"{STEP}.png"))
        return {int(grid.stem.removeprefix("step_")): grid for grid in grids}

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint, by which the run is sampled; 0 without one."""
        folder = Path(self.flags.get("checkpoint_dir") or self.folder / CHECKPOINTS)
        manifests = folder.glob(f"{STEP}/{MANIFEST}")
        return max((int(path.parent.name.removeprefix("step_")) for path in manifests), default=0)


def run_names(runs: Path) -> list[str]:
    """Return the names of the runs: runs without a folder, which wait or failed, then the others; each newest first.

    A one-step generator lies in the folder of its run.
    """
    asked = [job.run for job in reversed(jobs(runs, "train"))]
    configs = [*runs.glob(f"*/{CONFIG}"), *runs.glob(f"*/{ONE_STEP}/{CONFIG}")]
    newest_first = sorted(configs, key=os.path.getmtime, reverse=True)
    found = [str(path.parent.relative_to(runs)) for path in newest_first if _part(document(path), "training")]
    return [*(name for name in dict.fromkeys(asked) if name not in found), *found]


def _is_newer(path: Path, other: Path) -> bool:
    """Return whether a file was written after another one; False if either is missing."""
    with suppress(OSError):
        return path.stat().st_mtime > other.stat().st_mtime
    return False


def document(path: Path) -> Document:
    """Return the document in a file, which is empty if it is missing or damaged."""
    with suppress(UsageError):
        return read_document(path, Document)
    return {}


def _part(document: Document, name: str) -> Document:
    """Return a part of a document, which is empty if it is missing or damaged."""
    part = document.get(name)
    return part if isinstance(part, dict) else {}


def _time(text: object) -> float | None:
    """Return a time by ISO 8601 [s since 1970]; None for something else."""
    with suppress(ValueError):
        return datetime.fromisoformat(str(text)).timestamp()
    return None
