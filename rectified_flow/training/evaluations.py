"""Measurements during training: of anything at intervals, of distances, and of the held-out loss."""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.heldout import HeldOutLoss, HeldOutPictures, judge
from rectified_flow.flows.flow import Flow
from rectified_flow.runs import checkpoint
from rectified_flow.system.files import check_document
from rectified_flow.system.pictures import Panel, draw_panels
from rectified_flow.system.signals import Interrupted
from rectified_flow.system.terminal import line
from rectified_flow.training.preview import default_guidance
from rectified_flow.training.trainer import Callback, Trainer

MORE_HELP = "evaluate.py counts copies; more pictures, --augment or a smaller --dim let it train for longer"


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


class EvaluationHook(Measurement):
    """An evaluation of the averaged flow every few steps, which has the best checkpoint kept.

    Args:
        evaluator: computes the metrics.
        every: steps between evaluations.
        keeps_best: whether the name ``best`` follows the evaluator's headline metric.
    """

    def __init__(self, evaluator: Evaluator, every: int, *, keeps_best: bool = True) -> None:
        super().__init__("evaluations", evaluator.num_samples, every, untrained=False)
        self.evaluator, self.keeps_best = evaluator, keeps_best
        self._numbers: dict[str, float] = {}

    def on_setup(self, trainer: Trainer) -> None:
        """Extract the features of the training data: it may take long, and there is nothing to save yet."""
        self.steps = trainer.config.sample_steps or _averaged(trainer).default_steps
        self.settings = self.evaluator.settings | {"steps": self.steps}
        self.evaluator.prepare()

    def measure(self, trainer: Trainer, numbers: list[int]) -> Tensor:
        """Return the features of some samples, ``[n, d]``."""
        flow = _averaged(trainer)
        return self.evaluator.sample_features(flow, numbers, steps=self.steps, **default_guidance(flow))

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, Any]:
        """Compute the metrics, and return them with the settings."""
        self._numbers = self.evaluator.compute(rows)
        return self._numbers | self.settings

    def conclude(self, trainer: Trainer, *, new: bool) -> None:
        """Report a new evaluation, and keep the best checkpoint."""
        if not new:
            return
        numbers, is_best = on_main(trainer.accelerator, lambda: self._judge(trainer))
        for callback in trainer.callbacks:
            callback.on_evaluation(trainer, numbers)
        if is_best and self.keeps_best:
            trainer.save_as_best()

    def plot(self, trainer: Trainer) -> None:
        """Plot the headline metric and the share of copies over the steps."""
        name = self.evaluator.headline
        numbers = self.file.numbers(name)
        title = "{num_samples} samples against {num_real} of {dataset}".format(**self.settings)
        panels = [Panel({name: numbers}, title, "step", name, log_y=len(numbers) > 1)]
        names = {"copies": "samples", "copies_by_chance": "held-out pictures"}
        copies = {label: self.file.numbers(key) for key, label in names.items()}
        if any(copies.values()):
            panels.append(Panel(copies, "copies of training pictures", "step", "share"))
        draw_panels(trainer.config.output_dir / "evaluations.png", panels)

    def _judge(self, trainer: Trainer) -> tuple[Mapping[str, float], bool]:
        """Report the new numbers, and compare them with those of the best checkpoint."""
        run, step, name = trainer.run, trainer.state.step, self.evaluator.headline
        _wait_for_disk(trainer)  # the best so far is known when its checkpoint is written
        before = self.file.numbers(name, **self.settings)
        before.pop(step, None)
        least = min(before.values(), default=inf)
        with suppress(UsageError):  # the disk does not respond now
            if self.keeps_best:  # the checkpoint of the least number may not have been written
                known = checkpoint.best_of(trainer.config.checkpoints)
                least = inf if known is None else before.get(checkpoint.step_of(known), least)
        is_best = self._numbers[name] < least
        run.log.track(step, self._numbers)
        run.print(line("evaluation", f"step {step}: {name} {self._numbers[name]:.5g}" + ", the best so far" * is_best))
        return self._numbers, is_best


class HeldOutHook(Measurement):
    """A measurement of the loss on held-out pictures every few steps, which warns when the network memorises.

    A row of ``heldout.jsonl`` has the loss on held-out pictures, the loss on as many training pictures, their
    difference ``gap``, and the loss of each held-out picture. Lines of metrics repeat the last measurement.

    Args:
        pictures: the pictures to measure on.
        every: steps between measurements.
        stops: end the run when the network memorises, and let ``best`` be the checkpoint of the least held-out loss;
            if not, warn once.
    """

    def __init__(self, pictures: HeldOutPictures, every: int, *, stops: bool = False) -> None:
        super().__init__("heldout", 2 * pictures.count, every, untrained=False)
        self.pictures, self.stops = pictures, stops
        self._has_warned = False

    def measure(self, trainer: Trainer, numbers: list[int]) -> Tensor:
        """Return the loss of some pictures, ``[n]``."""
        return self.pictures.losses(_averaged(trainer), numbers)

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, Any]:
        """Return the mean losses, and the loss of each held-out picture."""
        losses = [float(f"{loss:.6g}") for loss in rows[: self.pictures.count].tolist()]
        return {**self.pictures.means(rows), "losses": losses}

    def conclude(self, trainer: Trainer, *, new: bool) -> None:
        """Log the measurement, keep the best checkpoint, and warn or stop."""
        measured = on_main(trainer.accelerator, self._measured)
        if not measured:
            return
        now, verdict = measured[-1], judge(measured)
        trainer.measured |= {"heldout_loss": now.heldout_loss, "seen_loss": now.seen_loss, "gap": now.gap}
        if self.stops and verdict.best.step == trainer.state.step:
            trainer.save_as_best()
        if not verdict.memorises:
            return
        best = verdict.best
        what = (
            f"the network memorises its training pictures: its loss on held-out pictures was {best.heldout_loss:.4g} "
            f"at step {best.step} and is {now.heldout_loss:.4g} at step {now.step}, while that on training pictures "
            f"fell from {best.seen_loss:.4g} to {now.seen_loss:.4g}"
        )
        if self.stops:
            trainer.end_here()
            kept = on_main(trainer.accelerator, lambda: _mark_best(trainer, best.step))
            trainer.run.print(f"stopped at step {now.step}: {what}. {kept}; {MORE_HELP}")
        elif not self._has_warned:
            self._has_warned = True
            trainer.run.print(f"warning: {what}; {MORE_HELP}, and --stop_when_memorising ends a run here")

    def _measured(self) -> list[HeldOutLoss]:
        """Return the undamaged measurements of these pictures; on the main process."""
        measured = []
        for row in self.file.rows():
            with suppress(UsageError):
                measured.append(check_document(row, HeldOutLoss, self.file.path))
        return [each for each in measured if len(each.losses) == self.pictures.count]


def _averaged(trainer: Trainer) -> Flow:
    return cast(Flow, trainer.averaged_flow)


def _wait_for_disk(trainer: Trainer) -> None:
    """Wait at most half of the rank timeout for the checkpoint that is being written, since other ranks wait here."""
    with suppress(TimeoutError):
        trainer.run.saver.wait(trainer.config.rank_timeout / 2)


def _mark_best(trainer: Trainer, step: int) -> str:
    """Let ``best`` name the checkpoint of a step, which a run that started without the flag may have pruned."""
    folder = trainer.config.checkpoints
    path = folder / checkpoint.step_name(step)
    _wait_for_disk(trainer)
    if path not in checkpoint.list_checkpoints(folder):
        return f"The checkpoint of step {step} was not kept"
    with suppress(OSError):  # a full disk does not stop the run
        checkpoint.mark_best(path)
    return f"{folder / checkpoint.BEST} is the checkpoint of step {step}, but the last one may generate better samples"
