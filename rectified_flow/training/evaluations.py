"""Monitoring of a run in training: callbacks, measurements at intervals, evaluations, and previews."""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.evaluation.evaluator import Comparison, Evaluator, conditions_of, render_sources
from rectified_flow.evaluation.heldout import HeldOutLoss, HeldOutPictures, judge
from rectified_flow.flows.flow import SOURCE, Flow, sample_batches
from rectified_flow.flows.solvers import Guidance
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.files import check_document
from rectified_flow.system.pictures import Legend, Panel, draw_panels
from rectified_flow.system.signals import Interrupted, raise_if_stop_requested
from rectified_flow.system.terminal import line

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer

MAX_BATCH = 64  # largest number of samples generated at once by a process, or its training batch if that is smaller
PAIRS = 4  # number of pairs of a source and a sample in each row of a preview
Preview = tuple[Tensor, int | None, list[str] | None, Legend | None]
"""Samples, the columns of their grid, the text below each, and the meaning of their colours."""
MORE_HELP = "evaluate.py counts copies; more pictures, `augment` or a smaller `dim` let it train for longer"


class Callback:
    """A set of methods that the trainer calls on **every** rank, each at the same step; override some of them.

    As every rank calls them, they may contain collectives (``trainer.accelerator.gather`` and the like), but never
    inside ``if is_main_process``. Work that one rank does alone should be short, because the others wait for it at the
    next step. Whether a step was finite is known one step later, so an ``on_step`` that reads losses or weights should
    first call ``trainer.stepper.finish_pending()``.
    """

    def on_setup(self, trainer: "Trainer") -> None:
        """Run before anything is loaded or written; a signal here ends the program at once."""

    def on_start(self, trainer: "Trainer") -> None:
        """Run before the first step, with the checkpoint loaded and the run's files open."""

    def on_step(self, trainer: "Trainer") -> None:
        """Run after each step; ``trainer.state.step`` counts it. ``trainer.save_as_best()`` may be called here."""

    def on_log(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Run after a line of metrics."""

    def on_evaluation(self, trainer: "Trainer", numbers: Mapping[str, float]) -> None:
        """Run after an evaluation by the :class:`EvaluationHook`, with its numbers by name."""

    def on_preview(self, trainer: "Trainer", samples: Tensor) -> None:
        """Run after a preview, with its samples, uint8 ``[n, 3, h, w]``; sources stand before theirs."""

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """Run when a checkpoint has been copied; a thread of the main process writes it to ``path``, or fails to."""

    def on_end(self, trainer: "Trainer") -> None:
        """Run after the last step, or the last one before a requested stop, when everything is on the disk."""


class Measurement(Callback):
    """A callback that measures something every few steps, and records it in ``NAME.jsonl`` in the run's folder.

    A subclass implements :meth:`measure` for a share of the items, and :meth:`summarize` for the rows of all. It may
    implement :meth:`measure_together`, :meth:`conclude` and :meth:`plot`.

    If a stop is requested during a measurement, the run ends after this step, and the measurement is made when the run
    resumes. A measurement at the last step is left out instead, with a warning. A full disk does not stop the run.

    Args:
        name: name of the file.
        total: number of items.
        every: steps between measurements.
        untrained: measure before the first step, too.
    """

    def __init__(self, name: str, total: int, every: int, *, untrained: bool = True) -> None:
        self.name, self.total, self.every, self.untrained = name, total, every, untrained

    @abstractmethod
    def measure(self, trainer: "Trainer", numbers: list[int]) -> Tensor:
        """Measure some items; called on every rank.

        It must not contain collectives, as a stop may end it on one rank alone.

        Args:
            trainer: the trainer.
            numbers: the numbers of the items, from 0 to ``total - 1``.

        Returns:
            A row for each item, float32 ``[len(numbers), ...]``.
        """

    def measure_together(self, trainer: "Trainer", rows: Tensor) -> None:
        """Measure what needs the rows of all items, on every rank; it may contain collectives."""

    @abstractmethod
    def summarize(self, trainer: "Trainer", rows: Tensor) -> Mapping[str, object]:
        """Return the entries of a line from the rows of all items, on the main process; it may print."""

    def conclude(self, trainer: "Trainer", *, new: bool) -> None:
        """Act on the recorded lines, on every rank: at the start of a run, and at every interval.

        Args:
            trainer: the trainer.
            new: whether this step has just been measured.
        """

    def plot(self, trainer: "Trainer") -> None:
        """Plot the recorded lines (``self.file``), on the main process."""

    @override
    def on_start(self, trainer: "Trainer") -> None:
        is_due = trainer.is_due(self.every) and (trainer.state.step > 0 or self.untrained)
        is_recorded = on_main(trainer.accelerator, lambda: self._open(trainer))
        self.conclude(trainer, new=is_due and not is_recorded and self._measure_all(trainer))

    @override
    def on_step(self, trainer: "Trainer") -> None:
        if trainer.is_due(self.every):
            trainer.stepper.finish_pending()
            self.conclude(trainer, new=self._measure_all(trainer))

    def _open(self, trainer: "Trainer") -> bool:
        """Open the file, and return whether it has a line of this step."""
        self.file = trainer.run.log.open(self.name)
        return any(row["step"] == trainer.state.step for row in self.file.rows())

    def _measure_all(self, trainer: "Trainer") -> bool:
        """Measure all items and record a line; return False if a stop was requested meanwhile."""
        try:
            with torch.no_grad(), trainer.accelerator.autocast():
                rows = map_over_ranks(trainer.accelerator, self.total, partial(self.measure, trainer))
                self.measure_together(trainer, rows)
        except Interrupted:
            if trainer.state.step == trainer.total_steps:
                trainer.run.print(f"warning: {self.name} left out at the last step, as a stop was requested")
            return False
        on_main(trainer.accelerator, lambda: self._record(trainer, rows))
        return True

    def _record(self, trainer: "Trainer", rows: Tensor) -> None:
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
        if not any(metric.__name__ == "frechet" for metric in evaluator.metrics):
            raise UsageError("`metrics` of an EvaluationHook need frechet, which ranks the checkpoints: add frechet")
        super().__init__("evaluations", evaluator.num_samples, every, untrained=False)
        self.evaluator, self.keeps_best = evaluator, keeps_best
        self._numbers: dict[str, float] = {}
        self._scores: dict[str, float] = {}

    @override
    def on_setup(self, trainer: "Trainer") -> None:
        self.steps = trainer.config.sample_steps or _averaged(trainer).default_steps
        self.settings = self.evaluator.settings | {"steps": self.steps}
        self.evaluator.prepare()  # now, as it may take long, and there is nothing to save yet

    @override
    def measure(self, trainer: "Trainer", numbers: list[int]) -> Tensor:
        flow = _averaged(trainer)
        return self.evaluator.sample_features(flow, numbers, steps=self.steps, **default_guidance(flow))

    @override
    def measure_together(self, trainer: "Trainer", rows: Tensor) -> None:
        flow = _averaged(trainer)
        comparison = Comparison(self.evaluator, flow, {"steps": self.steps, **default_guidance(flow)}, rows)
        self._scores = {name: number for score in self.evaluator.scores for name, number in score(comparison).items()}

    @override
    def summarize(self, trainer: "Trainer", rows: Tensor) -> Mapping[str, object]:
        self._numbers = self.evaluator.compute(rows) | self._scores
        return self._numbers | self.settings

    @override
    def conclude(self, trainer: "Trainer", *, new: bool) -> None:
        if not new:
            return
        numbers, is_best = on_main(trainer.accelerator, lambda: self._judge(trainer))
        for callback in trainer.callbacks:
            callback.on_evaluation(trainer, numbers)
        if is_best and self.keeps_best:
            trainer.save_as_best()

    @override
    def plot(self, trainer: "Trainer") -> None:
        name = self.evaluator.headline
        numbers = self.file.numbers(name)
        title = "{num_samples} samples against {num_real} of {dataset}".format(**self.settings)
        panels = [Panel({name: numbers}, title, "step", name, log_y=len(numbers) > 1)]
        names = {"copies": "samples", "copies_by_chance": "held-out pictures"}
        copies = {label: self.file.numbers(key) for key, label in names.items()}
        if any(copies.values()):
            panels.append(Panel(copies, "copies of training pictures", "step", "share"))
        draw_panels(trainer.config.output_dir / "evaluations.png", panels)

    def _judge(self, trainer: "Trainer") -> tuple[Mapping[str, float], bool]:
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

    @override
    def measure(self, trainer: "Trainer", numbers: list[int]) -> Tensor:
        return self.pictures.losses(_averaged(trainer), numbers)

    @override
    def summarize(self, trainer: "Trainer", rows: Tensor) -> Mapping[str, object]:
        losses = [float(f"{loss:.6g}") for loss in rows[: self.pictures.count].tolist()]
        return {**self.pictures.means(rows), "losses": losses, "seed": self.pictures.seed}

    @override
    def conclude(self, trainer: "Trainer", *, new: bool) -> None:
        measured = on_main(trainer.accelerator, self._measured)
        if not measured:
            return
        now, (best, memorises) = measured[-1], judge(measured)
        trainer.measured |= {"heldout_loss": now.heldout_loss, "seen_loss": now.seen_loss, "gap": now.gap}
        if self.stops and best.step == trainer.state.step:
            trainer.save_as_best()
        if not memorises:
            return
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
            trainer.run.print(f"warning: {what}; {MORE_HELP}, and `stop_when_memorising` ends a run here")

    def _measured(self) -> list[HeldOutLoss]:
        """Return the undamaged measurements of these pictures; on the main process."""
        measured = []
        for row in self.file.rows():
            with suppress(UsageError):
                measured.append(check_document(row, HeldOutLoss, self.file.path))
        of_these = self.pictures.count, self.pictures.seed
        return [each for each in measured if (len(each.losses), each.seed) == of_these]


def _averaged(trainer: "Trainer") -> Flow:
    return cast(Flow, trainer.averaged_flow)


def _wait_for_disk(trainer: "Trainer") -> None:
    """Wait at most half of the rank timeout for the checkpoint that is being written, since other ranks wait here."""
    with suppress(TimeoutError):
        trainer.run.saver.wait(trainer.config.rank_timeout / 2)


def _mark_best(trainer: "Trainer", step: int) -> str:
    """Let ``best`` name the checkpoint of a step, which a run that started without the flag may have pruned."""
    folder = trainer.config.checkpoints
    path = folder / checkpoint.step_name(step)
    _wait_for_disk(trainer)
    if path not in checkpoint.list_checkpoints(folder):
        return f"The checkpoint of step {step} was not kept"
    with suppress(OSError):  # a full disk does not stop the run
        checkpoint.mark_best(path)
    return f"{folder / checkpoint.BEST} is the checkpoint of step {step}, but the last one may generate better samples"


def draw_preview(
    flow: Any, data: Any, config: TrainingConfig, accelerator: Accelerator, per_process: int
) -> Preview | None:
    """Generate the samples that sample.py generates with the same seed, on any number of processes. Collective.

    A flow from pictures to pictures starts from the first items of ``data``, which are shown beside the samples. A flow
    that takes columns gets those of the first items, which are written below the samples. None is returned if the flow
    cannot sample, no samples are asked for, or a stop was requested meanwhile on any rank.
    """
    if config.num_samples == 0 or not hasattr(flow, "sample"):
        return None
    how: dict[str, Any] = {"seed": config.seed, "batch_size": min(MAX_BATCH, per_process), **default_guidance(flow)}
    if config.sample_steps:  # otherwise the flow uses its default number
        how["steps"] = config.sample_steps
    count, columns, conditions, texts = config.num_samples, None, dict[str, Tensor](), None
    has_columns = bool(getattr(data, "columns", None)) and hasattr(data, "condition_texts")
    if getattr(flow, "takes_source", False) or has_columns:
        count = min(count, len(data))
        conditions = how["conditions"] = conditions_of(flow, data, range(count))
        if SOURCE in conditions:
            columns = PAIRS * 2
        else:
            written = data.condition_texts(range(count)).values()
            texts = [", ".join(filter(None, row)) for row in zip(*written, strict=True)]

    def sample(numbers: list[int]) -> Tensor:
        parts = []
        for _, images in sample_batches(flow, numbers, **how):
            parts.append(images)
            raise_if_stop_requested()
        return torch.cat(parts)

    space = getattr(flow, "space", None)  # other modules than flows can be sampled, too
    with torch.no_grad(), accelerator.autocast(), suppress(Interrupted):
        images = map_over_ranks(accelerator, count, sample)
        if SOURCE in conditions:
            images = torch.stack((render_sources(flow, conditions[SOURCE]), images), dim=1).flatten(0, 1)
        return images, columns, texts, None if space is None else space.medium.legend
    return None


def default_guidance(flow: nn.Module) -> dict[str, Guidance]:
    """Return the guidance with which sample.py samples a flow, as an argument of ``flow.sample``; none for scale 1."""
    scale = getattr(flow, "default_guidance", 1.0)
    return {} if scale == 1 else {"guidance": Guidance(scale)}
