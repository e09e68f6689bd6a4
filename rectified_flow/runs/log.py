"""A file of JSON lines, one for each step."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from rectified_flow.errors import DamageError, UsageError, first_line
from rectified_flow.runs.checkpoint import CONFIG_FILE, step_name
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.files import flush, parse_document, read_bytes, replace_file
from rectified_flow.system.pictures import Line, Panel, draw_panels, encode_picture, to_grid


class LineFile:
    """A file of JSON lines that has each step once and in order, also after kills and full disks.

    Args:
        path: the file.
        step: the step the run starts at; lines of later steps, left by a killed run, are dropped. At step 0 an older
            file is kept beside the new one.
        warn: called with a line if the file has damaged lines, which are dropped.

    Raises:
        OSError: if it cannot be written.
        UsageError: if it may not be read.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], object] = print) -> None:
        self.path = path
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".old.jsonl"))
        rows, damaged = self._read()
        if damaged:
            warn(f"warning: dropped {damaged} damaged line{'s' * (damaged > 1)} of {path}")
        kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
        if path.exists():
            replace_file(path, kept)
        self._good_size = len(kept.encode())
        self._unwritten = b""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line; if the disk is full, it is written with the next one.

        Raises:
            OSError: then.
        """
        self._unwritten += (json.dumps(row) + "\n").encode()
        self.write()

    def write(self) -> None:
        """Write the lines that are not on the disk yet.

        Raises:
            OSError: if that fails.
        """
        if not self._unwritten:
            return
        self.path.touch()
        with self.path.open("r+b") as file:
            file.truncate(self._good_size)  # a full disk may have taken half a line
            file.seek(self._good_size)
            file.write(self._unwritten)
        self._good_size += len(self._unwritten)
        self._unwritten = b""

    def rows(self) -> list[dict[str, Any]]:
        """The complete lines, but for damaged ones."""
        return self._read()[0]

    def numbers(self, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> dict[int, float]:
        """The numbers called ``name`` by step, in lines that have these ``settings``."""
        rows = [row for row in self.rows() if settings.items() <= row.items()]
        return {row["step"]: row[name] for row in rows if type(row.get(name)) in (int, float)}

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The lines, and how many are damaged, but for the last one of a run that was killed."""
        if not self.path.exists():
            return [], 0
        *complete, last = map(self._row, read_bytes(self.path).split(b"\n"))
        return [row for row in (*complete, last) if row is not None], complete.count(None)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = parse_document(line, dict[str, Any], self.path)
        except DamageError:
            return None
        return row if type(row.get("step")) is int else None


PROJECT = "rectified-flow"
_IMAGE_ARGUMENTS = {"tensorboard": {"dataformats": "NHWC"}}


class RunLog:
    """The files in a run's output folder that are not checkpoints.

    A file that cannot be written once the run has started, on a full disk for example, is reported by ``warn``, and the
    run continues.

    Args:
        accelerator: whose trackers are used.
        config: the run's flags.
        document: the contents of the run's ``config.json``.
        step: where the run starts.
        warn: called with a line on each failure.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        document: Mapping[str, Any],
        step: int,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.accelerator, self.config, self.warn = accelerator, config, warn
        self.folder, self.step = config.output_dir, step
        replace_file(self.folder / CONFIG_FILE, json.dumps(document, indent=1))
        self._metrics = LineFile(self.folder / "metrics.jsonl", step, warn)
        self._bad_steps = LineFile(self.folder / "bad_steps.jsonl", step, warn)
        self.evaluations = LineFile(self.folder / "evaluations.jsonl", step, warn)

    def start_trackers(self, run_id: str, flags: Mapping[str, Any]) -> None:
        """Start the trackers that ``--log_with`` names, resuming the run that they know by ``run_id``.

        Raises:
            UsageError: if one does not start, without an account or a network.
        """
        if self.config.log_with == "none":
            return
        simple = {name: value if _is_simple(value) else str(value) for name, value in flags.items()}
        settings = {
            "wandb": {"id": run_id, "resume": "allow"},
            "tensorboard": {"purge_step": self.step + 1},
        }
        try:
            # TensorBoard makes a run of its own of each set of flags.
            config = simple if self.step == 0 else None
            self.accelerator.init_trackers(PROJECT, config=config, init_kwargs=settings)
        except Exception as error:  # each service has errors of its own
            raise UsageError(
                f"--log_with {self.config.log_with} does not start ({first_line(error)}); "
                "WANDB_MODE=offline needs no account"
            ) from error

    def write_lines(self) -> None:
        """Put every line on the disk.

        Raises:
            OSError: if the disk is full.
        """
        for file in (self._metrics, self._bad_steps, self.evaluations):
            file.write()
            if file.path.exists():
                flush(file.path)

    def close(self) -> None:
        """Let the trackers write their rest."""
        for tracker in self.accelerator.trackers:
            with self._tolerant("the trackers"):
                tracker.finish()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to metrics.jsonl and to the trackers."""
        with self._tolerant("metrics"):
            self._metrics.add({"step": step, **values})
        with self._tolerant("the trackers"):
            self.accelerator.log(dict(values), step=step)

    def bad_step(self, step: int, images: list[int]) -> None:
        """Add a line to bad_steps.jsonl."""
        with self._tolerant("bad steps"):
            self._bad_steps.add({"step": step, "images": images})

    def evaluation(self, step: int, headline: str, distances: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        """Add a line to evaluations.jsonl and to the trackers, and plot ``headline`` over the steps."""
        with self._tolerant("evaluations"):
            self.evaluations.add({"step": step, **distances, **settings})
            title = "{num_samples} samples against {num_real} of {dataset}".format(**settings)
            distances_by_step = self.evaluations.numbers(headline)
            lines: dict[str, Line] = {headline: _columns(distances_by_step)}
            panels = [Panel(lines, title, "step", headline, log_y=len(distances_by_step) > 1)]
            names = {"copies": "samples", "copies_by_chance": "held-out pictures"}
            copies = {name: _columns(self.evaluations.numbers(key)) for key, name in names.items()}
            if any(len(steps) for steps, _ in copies.values()):
                panels.append(Panel(copies, "copies of training pictures", "step", "share"))
            draw_panels(self.folder / "evaluations.png", panels)
        with self._tolerant("the trackers"):
            self.accelerator.log(dict(distances), step=step)

    def samples(self, step: int, pictures: Tensor) -> Path:
        """Write uint8 ``pictures`` ``[n, 3, h, w]`` as one grid and return its path."""
        grid = to_grid(pictures)
        path = self.folder / "samples" / f"{step_name(step)}.png"
        with self._tolerant("samples"):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, encode_picture(grid))
        for tracker in self.accelerator.trackers:
            with self._tolerant("the trackers"):
                tracker.log_images({"samples": grid[None]}, step=step, **_IMAGE_ARGUMENTS.get(tracker.name, {}))
        return path

    @property
    def loss_plot(self) -> Path:
        """Where :meth:`draw_loss` draws."""
        return self.folder / "loss.png"

    def draw_loss(self) -> None:
        """Plot the loss over the steps, and below it that on held-out pictures if there are any."""
        with self._tolerant("loss plot"):
            steps, losses = _columns(self._metrics.numbers("loss"))
            lines: dict[str, Line] = {"mean since the line before": (steps, losses)}
            window = max(1, len(losses) // 20)
            if len(losses) > window:
                lines[f"mean of {window}"] = (
                    steps[window - 1 :],
                    np.convolve(losses, np.ones(window) / window, "valid"),
                )
            panels = [Panel(lines, "training loss", "step", "loss", log_y=len(lines) > 1)]
            names = {"heldout_loss": "held-out pictures", "seen_loss": "as many training pictures"}
            compared = {name: _columns(_changes(self._metrics.numbers(key))) for key, name in names.items()}
            if any(len(steps) for steps, _ in compared.values()):
                panels.append(Panel(compared, "the same loss on both", "step", "squared error of the velocity"))
            draw_panels(self.loss_plot, panels)

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each tracker has errors of its own
            self.warn(f"warning: could not write {what} of {self.folder} ({first_line(error)}); training continues")


def _columns(numbers: Mapping[int, float]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Steps and values, ``[n]`` each."""
    return np.array(list(numbers)), np.array(list(numbers.values()))


def _changes(numbers: Mapping[int, float]) -> dict[int, float]:
    """Without those that are equal to the one before: a line of metrics repeats what was measured last."""
    kept: dict[int, float] = {}
    last = None
    for step, value in numbers.items():
        if value != last:
            kept[step] = last = value
    return kept


def _is_simple(value: object) -> bool:
    return isinstance(value, bool | int | float | str)
