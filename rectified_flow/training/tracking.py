"""What a run tells: metrics.jsonl, the loss plot, sample grids, and Accelerate's trackers. Main process only."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from rectified_flow.checkpoint import step_name
from rectified_flow.errors import UsageError, first_line
from rectified_flow.files import flush, replace_file
from rectified_flow.flows.images import to_grid
from rectified_flow.plots import Line, draw_lines
from rectified_flow.training.config import TrainingConfig


class LineFile:
    """A file of JSON lines that has each step once, in order, whatever happened.

    Args:
        path: the file.
        step: where the run starts; lines of later steps, left by a run that was killed, are dropped. At step 0 an
            older file is kept beside the new one.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".old.jsonl"))
        kept = "".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step)
        if path.exists():
            replace_file(path, kept)
        self._good_size = len(kept.encode())
        self._unwritten = b""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line; one that does not go onto the disk is written with the next.

        Raises:
            OSError: then.
        """
        self._unwritten += (json.dumps(row) + "\n").encode()
        self.write()

    def write(self) -> None:
        """Put what was added onto the disk.

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
        """The lines that are whole."""
        rows = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with suppress(ValueError):  # the last line of a run that was killed
                    rows.append(json.loads(line))
        return rows


class RunLog:
    """The files in a run's output folder that are not checkpoints.

    What cannot be written once the run goes, for want of space say, is told by ``warn``; the run goes on.

    Args:
        accelerator: whose trackers to feed.
        config: the run's flags.
        step: where the run starts.
        warn: hears what went wrong.
    """

    def __init__(
        self, accelerator: Accelerator, config: TrainingConfig, step: int, warn: Callable[[str], object] = print
    ) -> None:
        self.accelerator, self.config, self.warn = accelerator, config, warn
        self.folder, self.step = config.output_dir, step
        replace_file(self.folder / "config.json", json.dumps(config.plain(), indent=1))
        self._metrics = LineFile(self.folder / "metrics.jsonl", step)
        self._bad_steps = LineFile(self.folder / "bad_steps.jsonl", step)
        self.evaluations = LineFile(self.folder / "evaluations.jsonl", step)

    def start_trackers(self, run_id: str) -> None:
        """Start what ``--log_with`` names, or go on with the run that it knows by ``run_id``.

        Raises:
            UsageError: if it does not start, for want of an account or a network.
        """
        if self.config.log_with == "none":
            return
        flags = {name: value if _is_simple(value) else str(value) for name, value in self.config.plain().items()}
        settings = {
            "wandb": {"id": run_id, "resume": "allow"},
            "tensorboard": {"purge_step": self.step + 1},
        }
        try:
            # TensorBoard makes a run of its own of each set of flags it is told.
            told = flags if self.step == 0 else None
            self.accelerator.init_trackers("rectified-flow", config=told, init_kwargs=settings)
        except Exception as error:  # each service has errors of its own
            raise UsageError(
                f"--log_with {self.config.log_with} does not start ({first_line(error)}); "
                "WANDB_MODE=offline needs no account"
            ) from error

    def write_lines(self) -> None:
        """See that every line is on the disk.

        Raises:
            OSError: if that is full.
        """
        for file in (self._metrics, self._bad_steps, self.evaluations):
            file.write()
            if file.path.exists():
                flush(file.path)

    def close(self) -> None:
        """Let the trackers finish what they have to write."""
        for tracker in self.accelerator.trackers:
            with self._tolerant("the trackers"):
                tracker.finish()

    def metrics(self, step: int, **values: float) -> None:
        """Add a line to metrics.jsonl and to the trackers."""
        with self._tolerant("metrics"):
            self._metrics.add({"step": step, **values})
        with self._tolerant("the trackers"):
            self.accelerator.log(values, step=step)

    def bad_step(self, step: int, images: list[int]) -> None:
        """Add a line to bad_steps.jsonl."""
        with self._tolerant("bad steps"):
            self._bad_steps.add({"step": step, "images": images})

    def evaluation(self, step: int, headline: str, distances: Mapping[str, float], settings: Mapping[str, Any]) -> None:
        """Add a line to evaluations.jsonl and to the trackers, and draw ``headline`` over the steps."""
        with self._tolerant("evaluations"):
            self.evaluations.add({"step": step, **distances, **settings})
            rows = [(row["step"], row[headline]) for row in self.evaluations.rows() if headline in row]
            steps, values = np.array(rows).T
            title = "{num_samples} samples against {num_real} of {dataset}".format(**settings)
            line: dict[str, Line] = {headline: (steps, values)}
            draw_lines(self.folder / "evaluations.png", line, title, "step", headline, log_y=len(rows) > 1)
        with self._tolerant("the trackers"):
            self.accelerator.log(dict(distances), step=step)

    def samples(self, step: int, images: Tensor) -> Path:
        """Write uint8 ``images`` ``[n, c, h, w]`` as one grid and return its path."""
        grid = to_grid(images)
        path = self.folder / "samples" / f"{step_name(step)}.png"
        with self._tolerant("samples"):
            path.parent.mkdir(exist_ok=True)
            content = BytesIO()
            Image.fromarray(grid).save(content, format="PNG")
            replace_file(path, content.getvalue())
        for tracker in self.accelerator.trackers:
            with self._tolerant("the trackers"):
                tracker.log_images({"samples": grid[None]}, step=step, **_IMAGE_ARGUMENTS.get(tracker.name, {}))
        return path

    @property
    def loss_plot(self) -> Path:
        """Where :meth:`draw_loss` draws."""
        return self.folder / "loss.png"

    def draw_loss(self) -> None:
        """Draw loss over step."""
        with self._tolerant("loss plot"):
            rows = [(row["step"], row["loss"]) for row in self._metrics.rows() if "loss" in row]
            steps, losses = np.array(rows).reshape(-1, 2).T
            lines: dict[str, Line] = {"mean since the line before": (steps, losses)}
            window = max(1, len(losses) // 20)
            if len(losses) > window:
                lines[f"mean of {window}"] = (
                    steps[window - 1 :],
                    np.convolve(losses, np.ones(window) / window, "valid"),
                )
            draw_lines(self.loss_plot, lines, "training loss", "step", "loss", log_y=len(lines) > 1)

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each tracker has errors of its own
            self.warn(f"warning: could not write {what} of {self.folder} ({first_line(error)}); training goes on")


class Throughput:
    """Images per second of training proper; pauses do not count."""

    def __init__(self) -> None:
        self._images_seen = 0
        self._started = time.perf_counter()

    def restart(self, images_seen: int) -> float:
        """The rate since the last restart, now that so many images have been seen; then count anew."""
        now = time.perf_counter()
        rate = (images_seen - self._images_seen) / max(1e-9, now - self._started)
        self._images_seen, self._started = images_seen, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        entered = time.perf_counter()
        yield
        self._started += time.perf_counter() - entered


_IMAGE_ARGUMENTS = {"tensorboard": {"dataformats": "NHWC"}}


def _is_simple(value: object) -> bool:
    return isinstance(value, bool | int | float | str)
