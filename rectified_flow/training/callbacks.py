"""Callbacks: code of your own at the events of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
