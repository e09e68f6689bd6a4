"""Cost of the parts of a training step: logging, a preview, a checkpoint, the optimizer and the weight average.

Measures wall time of the real Trainer in interleaved rounds, and reports medians relative to a plain step.
"""

import contextlib
import io
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import Row, Times, describe_machine, is_over, print_rows, ratio, wait_for_device

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.config import NetworkConfig, TrainConfig
from rectified_flow.data.config import DataConfig
from rectified_flow.data.open import open_dataset
from rectified_flow.runs.config import MixedPrecision, TrainingConfig
from rectified_flow.training.trainer import Trainer

PLAIN, UPDATE = "a plain step", "gradient clipping, optimizer and EMA update"
STEPS, STEPS_WITH_LINE = "three steps", "three steps that log once"


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    image_size: int = 32
    """Side of the images [px]."""
    dim: int = 64
    """Channels of the Unet at full resolution."""
    batch_size: int = 16
    """Images per step."""
    mixed_precision: MixedPrecision = "no"
    """Precision of the network."""
    compile: bool = False
    """Compile the loss."""
    rounds: int = 5
    """Number of timed rounds."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""


def open_trainer(flags: Flags, folder: Path) -> Trainer:
    """Return a Trainer whose run is open for writing, in the state between two steps."""
    run = TrainingConfig(
        batch_size=flags.batch_size,
        mixed_precision=flags.mixed_precision,
        compile=flags.compile,
        output_dir=folder,
        num_samples=16,
    )
    config = TrainConfig(DataConfig(image_size=flags.image_size), NetworkConfig(dim=flags.dim), run=run)
    pictures = open_dataset("synthetic-flowers", image_size=flags.image_size, cache_dir=folder)
    trainer = Trainer(build_flow(config, {}), pictures, run)
    path = trainer.run.choose_checkpoint()
    trainer.run._open()
    trainer._start(path)
    return trainer


def synchronized(action: Callable[[], object]) -> float:
    """Seconds until ``action`` and all the device work that it launches are finished."""
    wait_for_device()
    began = time.perf_counter()
    action()
    wait_for_device()
    return time.perf_counter() - began


class Parts:
    """The actions to be timed, on one trainer.

    Args:
        trainer: a Trainer in the middle of a run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.batches = trainer, trainer._batches()
        self.seconds: dict[str, list[float]] = {}

    def step(self) -> None:
        """Run one step and wait for its outcome."""
        self.trainer.stepper.take(self.batches)
        self.trainer.stepper.finish_pending()

    def take_some(self) -> None:
        """Run three steps like the training loop, which launches the next step before it reads a step's outcome."""
        for _ in range(3):
            self.trainer.stepper.take(self.batches)

    def take_some_and_log(self) -> None:
        """Run three steps, with a line of metrics after the first."""
        self.trainer.stepper.take(self.batches)
        self.trainer._log_metrics()
        for _ in range(2):
            self.trainer.stepper.take(self.batches)

    def and_then(self, action: Callable[[], object]) -> Callable[[], None]:
        """One step followed by ``action``."""

        def both() -> None:
            self.step()
            action()

        return both

    def measure(self, name: str, action: Callable[[], object]) -> None:
        """Time ``action`` once more."""
        self.seconds.setdefault(name, []).append(synchronized(action))

    def round(self) -> None:
        """Time each action once."""
        trainer, saver = self.trainer, self.trainer.run.saver

        def save_and_wait() -> None:
            trainer._save()
            saver.wait()

        self.measure(PLAIN, self.step)
        self.measure(STEPS, self.take_some)
        self.measure(STEPS_WITH_LINE, self.take_some_and_log)
        self.measure("a step with a preview of 16 images", self.and_then(trainer.preview))
        self.measure("a step that saves a checkpoint", self.and_then(trainer._save))
        self.measure("a step during the background write", self.step)
        saver.wait()
        self.measure("a step that saves and waits for the write", self.and_then(save_and_wait))
        self._measure_update()

    def _measure_update(self) -> None:
        """Time the part of a step that follows the backward pass."""
        accelerator, state = self.trainer.accelerator, self.trainer.state
        parameters = state.parameters.values()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)

        def update() -> None:
            accelerator.clip_grad_norm_(parameters, 1.0)
            state.optimizer.step()
            state.update_averages()

        self.measure(UPDATE, update)
        state.optimizer.zero_grad()


def count_waits(parts: Parts) -> int:
    """Count how often the CPU waits for the GPU in three steps whose outcome is not read."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts.take_some()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in caught)


def measure_rows(flags: Flags) -> list[Row]:
    """Return the rows of the table, with their aims."""
    with tempfile.TemporaryDirectory(dir=".") as folder, contextlib.redirect_stdout(io.StringIO()):
        torch.set_num_threads(1)
        parts = Parts(open_trainer(flags, Path(folder)))
        began = time.monotonic()
        for round_ in range(flags.rounds + 1):
            if is_over(began, flags.minutes) and round_ > 1:  # the first is the warm-up
                break
            parts.round()
        waits = count_waits(parts) if torch.cuda.is_available() else None
    times = {name: Times(seconds[1:], {}) for name, seconds in parts.seconds.items()}
    plain, update = times.pop(PLAIN), times.pop(UPDATE)
    parameters = sum(parameter.numel() for parameter in parts.trainer.flow.parameters())
    size = f"{parameters / 1e6:.0f} M parameters, {flags.image_size} px, batch {flags.batch_size}"
    aims = {"a step that saves a checkpoint": "<= 1.2"}
    logs = Row(STEPS_WITH_LINE, STEPS, "1.0", str(ratio(times.pop(STEPS_WITH_LINE), times.pop(STEPS))), size)
    rows = [Row(name, PLAIN, aims.get(name, ""), str(ratio(of, plain)), size) for name, of in times.items()]
    found = [logs, *rows, Row(UPDATE, PLAIN, "<= 0.03 on a GPU", str(ratio(update, plain)), size)]
    return found if waits is None else [*found, Row("waits for the GPU in three steps", "", "0", str(waits), size)]


if __name__ == "__main__":
    given = tyro.cli(Flags, description=__doc__, use_underscores=True)
    print(describe_machine())
    print(print_rows(measure_rows(given)))
