"""The files of a run that are not checkpoints: metrics, samples, plots; and the trackers."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from tqdm.auto import tqdm

from rectified_flow.errors import DamageError, UsageError, first_line
from rectified_flow.registry import Document
from rectified_flow.runs.checkpoint import step_name
from rectified_flow.system.artifact import claim, claimed_names, write_output
from rectified_flow.system.files import flush, parse_document, read_bytes, replace_file
from rectified_flow.system.pictures import Grid, Line, Panel, draw_panels, encode_picture, read_pixels
from rectified_flow.system.terminal import shown

PROJECT = "rectified-flow"


class LineFile:
    """A file of JSON lines that has each step once and in order, also after kills and on a full disk.

    Damaged lines are dropped: a killed run leaves half a last line.

    Args:
        path: the file.
        step: first step of the run. Lines of later steps, left by a killed run, are dropped. At step 0, an older
            file is kept beside the new one.
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

    def add(self, row: Mapping[str, object]) -> None:
        """Add a line. If the disk is full, an OSError is raised, and the line is written together with the next one."""
        self._unwritten += (json.dumps(row) + "\n").encode()
        self._write()

    def flush(self) -> None:
        """Put all lines on the disk; an OSError if it is full."""
        if self._unwritten:
            self._write()
        if self.path.exists():
            flush(self.path)

    def rows(self) -> list[Document]:
        """Return the complete and undamaged lines."""
        rows = list[Document]()
        for line in read_bytes(self.path).split(b"\n") if self.path.exists() else ():
            with suppress(DamageError):
                row = parse_document(line, Document, self.path)
                rows += [row] if type(row.get("step")) is int else []
        return rows

    def numbers(self, name: str, /, **settings: object) -> dict[int, float]:
        """Return the numbers called ``name`` by step, of the lines that have these ``settings``."""
        rows = [row for row in self.rows() if settings.items() <= row.items()]
        return {row["step"]: row[name] for row in rows if type(row.get(name)) in (int, float)}

    def _write(self) -> None:
        self.path.touch()
        with self.path.open("r+b") as file:
            file.truncate(self._good_size)  # a full disk may have taken half a line
            file.seek(self._good_size)
            file.write(self._unwritten)
        self._good_size += len(self._unwritten)
        self._unwritten = b""


class RunLog:
    """The files in a run's output folder that are not checkpoints, and the trackers.

    Once the run has started, a file that cannot be written, for example on a full disk, is reported, and the run
    continues.

    Args:
        accelerator: the holder of the trackers.
        folder: the run's output folder.
        step: the step that the run starts at.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, step: int) -> None:
        self.accelerator, self.folder, self.step = accelerator, folder, step
        self.loss_plot = self.folder / "loss.png"
        self.preview: Path | None = None
        """The last grid of samples."""
        self._files: list[LineFile] = []
        self._names = set[str]()
        self._metrics, self._bad_steps = self.open("metrics"), self.open("bad_steps")

    def open(self, name: str) -> LineFile:
        """Open ``NAME.jsonl``, which is flushed with every checkpoint from now on."""
        if name in (file.path.stem for file in self._files):
            raise UsageError(f"two measurements would write {name}.jsonl: give one of them another name")
        claim(self.folder, [f"{name}.jsonl", f"{name}.old.jsonl"])
        self._names |= claimed_names(self.folder)
        self._files.append(LineFile(self.folder / f"{name}.jsonl", self.step))
        return self._files[-1]

    def keep_manifest(self) -> list[str]:
        """Write the manifest of the folder again if it was removed while the run trains, and return its names."""
        with self.tolerant("the manifest"):
            self._names |= claimed_names(self.folder)
            claim(self.folder, self._names, proven=True)  # this run wrote them, and no other run may write here
        return sorted(self._names)

    def flush(self) -> None:
        """Put all lines of all files on the disk; an OSError if it is full."""
        for file in self._files:
            file.flush()

    def start_trackers(self, document: Mapping[str, Document], run_id: str) -> None:
        """Start the tracker that the flag ``log_with`` names, if any; a resumed run continues there as ``run_id``."""
        flags = document["training"]
        simple = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in flags.items()}
        settings: dict[str, dict[str, object]] = {
            "tensorboard": {"purge_step": self.step + 1},
            "trackio": {"name": run_id, "resume": "allow", "config": simple},
            "wandb": {"id": run_id, "resume": "allow"},
        }
        name, of_trackio = flags["log_with"], flags["log_with"] == "trackio"
        # Trackio needs the flags at every start. TensorBoard creates a further run for each set of flags.
        first = None if self.step or of_trackio else simple
        try:
            if of_trackio:
                # Trackio drops a value that it gets while a thread, such as that of loss.png, imports this module.
                import matplotlib.figure  # noqa: F401
            self.accelerator.init_trackers(PROJECT, first, settings)
        except Exception as error:  # each service has errors of its own
            self.accelerator.trackers = []  # one that did not start cannot be closed
            remedy = "WANDB_MODE=offline needs no account" if name == "wandb" else "leave out this flag"
            raise UsageError(f"`log_with` {name} could not be started ({first_line(error)}); {remedy}") from error

    def close(self) -> None:
        """Let the trackers write everything."""
        for tracker in self.accelerator.trackers:
            with self.tolerant("the trackers"):
                tracker.finish()

    def track(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers to the trackers."""
        with self.tolerant("the trackers"):
            self.accelerator.log(dict(values), step=step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line to ``metrics.jsonl``, and send it to the trackers."""
        with self.tolerant("metrics"):
            self._metrics.add({"step": step, **values})
        self.track(step, values)

    def bad_step(self, step: int, images: list[int]) -> None:
        """Add a line to ``bad_steps.jsonl``."""
        with self.tolerant("bad steps"):
            self._bad_steps.add({"step": step, "images": images})

    def samples(self, step: int, grid: Grid) -> None:
        """Write a grid ``[h, w, 3]`` of samples."""
        self.preview = path = self.folder / "samples" / f"{step_name(step)}.png"
        with self.tolerant("samples"):
            path.parent.mkdir(exist_ok=True)
            write_output(path, encode_picture(grid))
        self._track_picture("samples", grid, step)

    def picture(self, name: str, path: Path, content: bytes, step: int) -> None:
        """Write the file of a picture that is no sample, and send it to the trackers."""
        write_output(path, content)
        self._track_picture(name, read_pixels(content), step)

    def _track_picture(self, name: str, pixels: Grid, step: int) -> None:
        """Send a picture ``[h, w, 3]`` to the trackers."""
        for tracker in self.accelerator.trackers:
            with self.tolerant("the trackers"):
                if tracker.name == "trackio":  # for which Accelerate has no log_images
                    from trackio import Image

                    tracker.log({name: Image(pixels)}, step=step)
                else:
                    layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                    tracker.log_images({name: pixels[None]}, step=step, **layout)

    def draw_loss(self) -> None:
        """Plot the training loss over the steps, and below it the held-out loss if it is measured."""
        with self.tolerant("loss plot"):
            losses = self._metrics.numbers("loss")
            lines: dict[str, Line] = {"mean since the line before": losses}
            window = max(1, len(losses) // 20)
            if window > 1:
                means = np.convolve([*losses.values()], np.ones(window) / window, "valid")
                lines[f"mean of {window}"] = dict(zip([*losses][window - 1 :], means.tolist(), strict=True))
            panels = [Panel(lines, "training loss", "step", "loss", log_y=len(lines) > 1)]
            names = {"heldout_loss": "held-out pictures", "seen_loss": "as many training pictures"}
            compared = {name: _changes(self._metrics.numbers(key)) for key, name in names.items()}
            if any(compared.values()):
                panels.append(Panel(compared, "the same loss on both", "step", "squared error of the velocity"))
            draw_panels(self.loss_plot, panels)

    @contextmanager
    def tolerant(self, what: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
        """Replace an exception of these kinds inside the block by a warning that ``what`` was not written."""
        try:
            yield
        except kinds as error:  # any by default, since each tracker has its own exceptions
            failure = f"could not write {what} of {self.folder} ({first_line(error)})"
            tqdm.write(shown(f"warning: {failure}; training continues"))


def _changes(numbers: Mapping[int, float]) -> dict[int, float]:
    """Drop numbers that equal the one before, as a line of metrics repeats the last measurement."""
    values = [None, *numbers.values()]
    return {step: now for (step, now), before in zip(numbers.items(), values, strict=False) if now != before}
