"""Callbacks: code of your own at the events of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rectified_flow.distributed.collectives import any_rank, gather_interleaved, interleaved_share, on_main
from rectified_flow.errors import RunError
from rectified_flow.runs.log import LineFile
from rectified_flow.system.signals import Interrupted

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer


class Callback:
    """Methods that the trainer calls on **every** rank, each at the same step; override those you need.

    So each of them may contain collectives (``trainer.accelerator.gather`` and the like), if every rank reaches them:
    never inside ``if is_main_process``. What one rank does alone should be short, as the others wait for it at the next
    step. A step's own verdict (finite or not) is known one step later, so ``on_step`` that reads losses or weights
    should first call ``trainer.stepper.finish_pending()``.
    """

    def on_setup(self, trainer: "Trainer") -> None:
        """Before anything is loaded or written; a signal here ends the program at once."""

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step, with the checkpoint loaded and the run's files open."""

    def on_step(self, trainer: "Trainer") -> None:
        """After each step; ``trainer.state.step`` counts it. ``trainer.save_as_best()`` may be called here."""

    def on_log(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """After a line of metrics."""

    def on_evaluation(self, trainer: "Trainer", distances: Mapping[str, float]) -> None:
        """After an evaluation by the :class:`EvaluationHook`, with its distances by name."""

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """When a checkpoint has been copied; a thread of the main process writes it to ``path``."""

    def on_end(self, trainer: "Trainer") -> None:
        """After the last step, or the last before a requested stop, when everything is on the disk."""


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
