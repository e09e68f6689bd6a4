"""Measurements of one's own during training: each rank measures a share, the main process sums up."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectified_flow.distributed.collectives import any_rank, gather_interleaved, interleaved_share, on_main
from rectified_flow.errors import RunError
from rectified_flow.interruption import Interrupted
from rectified_flow.runs.line_file import LineFile
from rectified_flow.training.callbacks import Callback

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer


class Measurement(Callback):
    """Measures something every few steps, and writes it into ``NAME.jsonl``.

    A subclass has :meth:`measure` for a share of the items, and :meth:`summarize` for the rows of all. A stop that is
    requested meanwhile ends the run after this step, and the measurement is made up for on resuming. A full disk does
    not stop the run.

    Args:
        name: of the file.
        total: number of items.
        every: steps between measurements.
        untrained: measure before the first step, too.
    """

    def __init__(self, name: str, total: int, every: int, *, untrained: bool = True) -> None:
        self.name, self.total, self.every, self.untrained = name, total, every, untrained

    @abstractmethod
    def measure(self, trainer: "Trainer", numbers: Sequence[int]) -> Tensor:
        """A row for each item of these numbers, float32 ``[len(numbers), ...]``; called on every rank.

        It must not contain collectives, as a stop may end it on one rank alone.
        """

    @abstractmethod
    def summarize(self, trainer: "Trainer", rows: Tensor) -> dict[str, Any]:
        """What to write down of the rows of all items, on the main process; it may print and plot."""

    def on_start(self, trainer: "Trainer") -> None:
        step = trainer.state.step
        on_main(trainer.accelerator, lambda: self._open(trainer))
        missed = trainer.is_due(self.every) and (step > 0 or self.untrained)
        if missed and on_main(trainer.accelerator, lambda: step not in self.steps):
            self._measure_all(trainer)
        self.conclude(trainer)

    def on_step(self, trainer: "Trainer") -> None:
        if trainer.is_due(self.every):
            trainer.stepper.finish_pending()
            self._measure_all(trainer)
            self.conclude(trainer)

    def _open(self, trainer: "Trainer") -> None:
        path = trainer.config.output_dir / f"{self.name}.jsonl"
        self.file = LineFile(path, trainer.state.step, trainer.run.print)

    @property
    def steps(self) -> list[int]:
        """The steps that are measured; on the main process."""
        return [row["step"] for row in self.file.rows()]

    def _measure_all(self, trainer: "Trainer") -> None:
        state = trainer.accelerator
        share = None
        with suppress(Interrupted), torch.no_grad(), state.autocast():
            share = self.measure(trainer, interleaved_share(self.total, state.process_index, state.num_processes))
        if any_rank(state, share is None) or share is None:
            return
        rows = gather_interleaved(share.to(state.device), self.total)
        if state.is_main_process:
            with suppress(OSError, RunError):
                self.file.add({"step": trainer.state.step, **self.summarize(trainer, rows.cpu())})
                self.plot(trainer)

    def conclude(self, trainer: "Trainer") -> None:
        """Act on what is written down, on every rank: at the start of a run, and after each measurement."""

    def plot(self, trainer: "Trainer") -> None:
        """Draw what is written down, on the main process."""
