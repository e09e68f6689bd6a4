"""Callbacks that measure something at intervals."""

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.system.signals import Interrupted
from rectified_flow.training.trainer import Callback, Trainer


class Measurement(Callback):
    """A callback that measures something every few steps, and records it in ``NAME.jsonl`` in the run's folder.

    A subclass implements :meth:`measure` for a share of the items, and :meth:`summarize` for the rows of all. It may
    implement :meth:`conclude` and :meth:`plot`.

    If a stop is requested during a measurement, the run ends after this step, and the measurement is made when the run
    resumes. A full disk does not stop the run.

    Args:
        name: name of the file.
        total: number of items.
        every: steps between measurements.
        untrained: measure before the first step, too.
    """

    def __init__(self, name: str, total: int, every: int, *, untrained: bool = True) -> None:
        self.name, self.total, self.every, self.untrained = name, total, every, untrained

    @abstractmethod
    def measure(self, trainer: Trainer, numbers: list[int]) -> Tensor:
        """Measure some items; called on every rank.

        It must not contain collectives, as a stop may end it on one rank alone.

        Args:
            trainer: the trainer.
            numbers: the numbers of the items, from 0 to ``total - 1``.

        Returns:
            A row for each item, float32 ``[len(numbers), ...]``.
        """

    @abstractmethod
    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, Any]:
        """Return the entries of a line from the rows of all items, on the main process; it may print."""

    def conclude(self, trainer: Trainer, *, new: bool) -> None:
        """Act on the recorded lines, on every rank: at the start of a run, and at every interval.

        Args:
            trainer: the trainer.
            new: whether this step has just been measured.
        """

    def plot(self, trainer: Trainer) -> None:
        """Plot the recorded lines (``self.file``), on the main process."""

    def on_start(self, trainer: Trainer) -> None:
        """Open the file, and measure the step that the run starts at if that is due and not recorded yet."""
        is_due = trainer.is_due(self.every) and (trainer.state.step > 0 or self.untrained)
        is_recorded = on_main(trainer.accelerator, lambda: self._open(trainer))
        self.conclude(trainer, new=is_due and not is_recorded and self._measure_all(trainer))

    def on_step(self, trainer: Trainer) -> None:
        """Measure if it is due."""
        if trainer.is_due(self.every):
            trainer.stepper.finish_pending()
            self.conclude(trainer, new=self._measure_all(trainer))

    def _open(self, trainer: Trainer) -> bool:
        """Open the file, and return whether it has a line of this step."""
        self.file = trainer.run.log.open(self.name)
        return any(row["step"] == trainer.state.step for row in self.file.rows())

    def _measure_all(self, trainer: Trainer) -> bool:
        """Measure all items and record a line; return False if a stop was requested meanwhile."""
        try:
            with torch.no_grad(), trainer.accelerator.autocast():
                rows = map_over_ranks(trainer.accelerator, self.total, partial(self.measure, trainer))
        except Interrupted:
            return False
        on_main(trainer.accelerator, lambda: self._record(trainer, rows))
        return True

    def _record(self, trainer: Trainer, rows: Tensor) -> None:
        with trainer.run.log.tolerant(self.name, (OSError, RunError)):
            self.file.add({"step": trainer.state.step, **self.summarize(trainer, rows)})
        with trainer.run.log.tolerant(f"the plot of {self.name}", (OSError, RunError, UsageError)):
            self.plot(trainer)
