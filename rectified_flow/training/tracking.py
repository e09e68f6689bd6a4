"""What a run tells: metrics.jsonl, the loss plot, sample grids, and Accelerate's trackers. Main process only."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from PIL import Image
from torch import Tensor

from rectified_flow.errors import UsageError, first_line
from rectified_flow.files import replace_file
from rectified_flow.training.checkpoint import step_name
from rectified_flow.training.config import TrainingConfig


class RunLog:
    """The files in a run's output folder that are not checkpoints.

    What cannot be written once the run goes, for want of space say, is told by ``warn`` and left out.

    Args:
        accelerator: whose trackers to feed.
        config: the run's flags.
        step: where the run starts; lines of later steps, left by a run that was killed, are dropped.
        warn: hears what went wrong.
    """

    def __init__(
        self, accelerator: Accelerator, config: TrainingConfig, step: int, warn: Callable[[str], object] = print
    ) -> None:
        self.accelerator, self.config, self.warn = accelerator, config, warn
        self.folder = config.output_dir
        self.metrics_path = self.folder / "metrics.jsonl"
        replace_file(self.folder / "config.json", json.dumps(config.plain(), indent=1))
        kept = [json.dumps(row) + "\n" for row in self._rows() if row["step"] <= step]
        replace_file(self.metrics_path, "".join(kept))

    def start_trackers(self) -> None:
        """Start what ``--log_with`` names.

        Raises:
            UsageError: if it does not start, for want of an account or a network.
        """
        if self.config.log_with == "none":
            return
        flags = {name: value if _is_simple(value) else str(value) for name, value in self.config.plain().items()}
        try:
            self.accelerator.init_trackers("rectified-flow", config=flags)
        except Exception as error:  # each service has errors of its own
            raise UsageError(
                f"--log_with {self.config.log_with} does not start ({first_line(error)}); "
                "WANDB_MODE=offline needs no account"
            ) from error

    def close(self) -> None:
        """Let the trackers finish what they have to write."""
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def metrics(self, step: int, **values: float) -> None:
        """Add a line to metrics.jsonl and to the trackers."""
        with self._tolerant("metrics"):
            with self.metrics_path.open("ab+") as file:
                if file.tell() > 0:
                    file.seek(-1, 2)
                    file.write(b"" if file.read() == b"\n" else b"\n")  # a full disk may have cut the line before
                file.write((json.dumps({"step": step, **values}) + "\n").encode())
            self.accelerator.log(values, step=step)

    def samples(self, step: int, images: Tensor) -> Path:
        """Write uint8 ``images`` ``[n, c, h, w]`` as one grid and return its path."""
        from torchvision.utils import make_grid  # takes seconds to load

        columns = max(1, round(len(images) ** 0.5))
        grid = make_grid(images, nrow=columns, padding=2, pad_value=255).permute(1, 2, 0).cpu().numpy()
        path = self.folder / "samples" / f"{step_name(step)}.png"
        with self._tolerant("samples"):
            path.parent.mkdir(exist_ok=True)
            content = BytesIO()
            Image.fromarray(grid).save(content, format="PNG")
            replace_file(path, content.getvalue())
            for tracker in self.accelerator.trackers:
                tracker.log_images({"samples": grid[None]}, step=step, **_IMAGE_ARGUMENTS.get(tracker.name, {}))
        return path

    def loss_plot(self) -> Path:
        """Draw loss over step into loss.png and return its path."""
        from matplotlib.figure import Figure  # takes a second to load

        steps, losses = np.array([(row["step"], row["loss"]) for row in self._rows()]).reshape(-1, 2).T
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss", title="training loss, mean since the line before")
        axes.plot(steps, losses, color="C0", alpha=0.35, linewidth=1)
        window = max(1, len(losses) // 20)
        if len(losses) > window:
            smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
            axes.plot(steps[window - 1 :], smooth, color="C0", marker="." if len(smooth) < 20 else None)
            axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        path = self.folder / "loss.png"
        with self._tolerant("loss plot"):
            content = BytesIO()
            figure.savefig(content, format="png", dpi=120)
            replace_file(path, content.getvalue())
        return path

    def _rows(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl that are whole."""
        if not self.metrics_path.exists():
            return []
        rows = []
        for line in self.metrics_path.read_text().splitlines():
            with suppress(ValueError):  # a killed run, or a full disk, may leave half a line
                rows.append(json.loads(line))
        return rows

    @contextmanager
    def _tolerant(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.warn(f"warning: could not write {what} to {self.folder} ({error}); training goes on")


class Throughput:
    """Images per second of training proper; pauses do not count."""

    def __init__(self) -> None:
        self.images = 0
        self._started = time.perf_counter()

    def restart(self) -> float:
        """The rate since the last restart; then count anew."""
        now = time.perf_counter()
        rate = self.images / max(1e-9, now - self._started)
        self.images, self._started = 0, now
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
