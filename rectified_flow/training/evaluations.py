"""Sample grids during training: the samples that sample.py draws of the same seed, an equal share on each rank."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rectified_flow.distributed.collectives import any_rank, gather_interleaved, interleaved_share, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator, Generated
from rectified_flow.flows.flow import Flow
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import step_name
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.signals import Interrupted, interruptible
from rectified_flow.system.terminal import line
from rectified_flow.training.callbacks import Callback

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer
from typing import TYPE_CHECKING

from rectified_flow.errors import DamageError
from rectified_flow.evaluation.heldout import HeldOutPictures, Measured, Verdict, judge
from rectified_flow.system.files import check_document
from rectified_flow.system.terminal import progress_bar
from rectified_flow.training.callbacks import Measurement

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer


MOST_AT_ONCE = 64
"""Pictures that a process draws at once; fewer where it trains on fewer."""


def draw_preview(accelerator: Accelerator, flow: nn.Module, config: TrainingConfig) -> Tensor | None:
    """Draw ``config.num_samples`` pictures, uint8 ``[n, 3, h, w]``, the same on any number of processes.

    None on every rank if the flow cannot sample, none are asked for, or a stop was requested meanwhile on any rank.
    """
    sample: Callable[..., Tensor] | None = getattr(flow, "sample", None)
    space: Space = getattr(flow, "space", None) or Pixels()
    total, world_size = config.num_samples, accelerator.num_processes
    if total == 0 or sample is None:
        return None
    mine = interleaved_share(total, accelerator.process_index, world_size)
    steps = {"steps": config.sample_steps} if config.sample_steps else {}  # else the flow's own
    pictures = None
    at_once = min(MOST_AT_ONCE, config.split_batch(world_size).per_process)
    parts = [mine[start : start + at_once] for start in range(0, max(1, len(mine)), at_once)]

    def drawn(part: Sequence[int]) -> Tensor:
        with deterministic(Samples(config.seed, part), accelerator.device):
            return space.render(sample(len(part), **steps)).to(accelerator.device)

    with torch.no_grad(), accelerator.autocast(), suppress(Interrupted), interruptible(flow):
        pictures = torch.cat([drawn(part) for part in parts])
    if any_rank(accelerator, pictures is None) or pictures is None:
        return None
    return gather_interleaved(pictures, total)


class EvaluationHook(Callback):
    """Evaluates the averaged flow every ``every`` steps, and has the best checkpoint kept.

    Args:
        evaluator: measures the distances.
        every: steps between evaluations.
        keeps_best: whether the name ``best`` is given by these distances.
    """

    def __init__(self, evaluator: Evaluator, every: int, *, keeps_best: bool = True) -> None:
        self.evaluator, self.every, self.keeps_best = evaluator, every, keeps_best

    def on_setup(self, trainer: "Trainer") -> None:
        """Extract the features of the training pictures: it may take long, and there is nothing to save yet."""
        self.evaluator.prepare()

    def on_start(self, trainer: "Trainer") -> None:
        """Evaluate the step that the run resumes from, if a stop cut its evaluation short."""
        step = trainer.state.step
        if step == 0 or not trainer.is_due(self.every):
            return
        missed = on_main(trainer.accelerator, lambda: step not in self._steps(trainer))
        if missed and self.evaluate(trainer) and self.keeps_best and trainer.accelerator.is_main_process:
            with suppress(OSError):  # a full disk does not stop the run
                checkpoint.mark_best(trainer.config.checkpoints / step_name(step))

    def on_step(self, trainer: "Trainer") -> None:
        """Evaluate if it is time."""
        if trainer.is_due(self.every):
            trainer.stepper.finish_pending()
            if self.evaluate(trainer) and self.keeps_best:
                trainer.save_as_best()

    def evaluate(self, trainer: "Trainer") -> bool:
        """Measure, report and write down; returns whether no checkpoint before is better.

        False, and nothing written, if a stop was requested meanwhile on any process.
        """
        flow = cast(Flow, trainer.averaged_flow)
        steps = trainer.config.sample_steps or flow.default_steps
        try:
            with trainer.accelerator.autocast():
                generated = self.evaluator.generate(flow, steps=steps)
        except Interrupted:
            return False
        best, distances = on_main(trainer.accelerator, lambda: self._judge(trainer, generated, {"steps": steps}))
        for callback in trainer.callbacks:
            callback.on_evaluation(trainer, distances)
        return best

    def _steps(self, trainer: "Trainer") -> list[int]:
        return [row["step"] for row in trainer.run.log.evaluations.rows()]

    def _judge(self, trainer: "Trainer", generated: Generated, how: dict[str, Any]) -> tuple[bool, dict[str, float]]:
        run, step = trainer.run, trainer.state.step
        name, settings = self.evaluator.headline, self.evaluator.settings | how
        with suppress(TimeoutError):  # the best so far is known when its checkpoint is written; the others wait here
            run.saver.wait(trainer.config.rank_timeout / 2)
        distances = self.evaluator.distances(generated)
        alike = run.log.evaluations.numbers(name, settings)
        least = min(alike.values(), default=inf)
        with suppress(UsageError):  # a disk that does not answer now
            if self.keeps_best:  # which may have lost its checkpoint
                known = checkpoint.best_of(trainer.config.checkpoints)
                least = inf if known is None else alike.get(checkpoint.step_of(known), least)
        best = distances[name] < least
        run.log.evaluation(step, name, distances, settings)
        run.print(line("evaluation", f"step {step}: {name} {distances[name]:.5g}" + ", the best so far" * best))
        return best, distances


MORE_HELP = "evaluate.py counts copies; more pictures, --augment or a smaller --dim let it train for longer"


class HeldOutHook(Measurement):
    """Measures the averaged flow on held-out pictures, and says when it memorises.

    A row of ``heldout.jsonl`` has the loss on held-out pictures, that on as many training pictures, their difference
    ``gap``, and the loss of each held-out picture. Lines of metrics have the last ones.

    Args:
        pictures: to measure on.
        every: steps between measurements.
        stops: end the run when it memorises, and let ``best`` be the checkpoint of the least held-out loss; if not,
            warn once.
    """

    def __init__(self, pictures: HeldOutPictures, every: int, *, stops: bool = False) -> None:
        super().__init__("heldout", 2 * pictures.count, every, untrained=False)
        self.pictures, self.stops = pictures, stops
        self._has_warned = False

    def measure(self, trainer: "Trainer", numbers: Sequence[int]) -> Tensor:
        disable = not trainer.accelerator.is_main_process
        with progress_bar(total=len(numbers), desc="held-out loss", unit="img", leave=None, disable=disable) as bar:
            return self.pictures.losses(cast(Flow, trainer.averaged_flow), numbers, progress=bar.update)

    def summarize(self, trainer: "Trainer", rows: Tensor) -> dict[str, Any]:
        losses = [float(f"{loss:.6g}") for loss in rows[: self.pictures.count].tolist()]
        return {**self.pictures.means(rows), "losses": losses}

    def conclude(self, trainer: "Trainer") -> None:
        """Log, keep the best, warn or stop."""
        measured = on_main(trainer.accelerator, self._measured)
        if not measured:
            return
        now, verdict = measured[-1], judge(measured)
        trainer.measured |= {"heldout_loss": now.heldout_loss, "seen_loss": now.seen_loss, "gap": now.gap}
        if self.stops and verdict.best.step == trainer.state.step:
            self._keep(trainer)
        if not verdict.memorises:
            return
        what = _describe(verdict, now)
        if self.stops:
            trainer.end_here()
            kept = on_main(trainer.accelerator, lambda: _kept_best(trainer, verdict.best.step))
            trainer.run.print(f"stopped at step {now.step}: {what}. {kept}; {MORE_HELP}")
        elif not self._has_warned:
            self._has_warned = True
            trainer.run.print(f"warning: {what}; {MORE_HELP}, and --stop_when_memorising ends a run here")

    def _measured(self) -> list[Measured]:
        """The measurements of these pictures, without damaged ones; on the main process."""
        measured = []
        for row in self.file.rows():
            with suppress(DamageError):
                measured.append(check_document(row, Measured, self.file.path))
        return [each for each in measured if len(each.losses) == self.pictures.count]

    def _keep(self, trainer: "Trainer") -> None:
        """Have ``best`` name the checkpoint of this step, which is there already where the run resumes from it."""
        path = trainer.config.checkpoints / checkpoint.step_name(trainer.state.step)
        if not on_main(trainer.accelerator, lambda: path in checkpoint.list_checkpoints(path.parent)):
            trainer.save_as_best()
        elif trainer.accelerator.is_main_process:
            with suppress(OSError):  # a full disk does not stop the run
                checkpoint.mark_best(path)


def _kept_best(trainer: "Trainer", step: int) -> str:
    """Have ``best`` name the checkpoint of a step, and say so; a run that went on beyond it may lack it."""
    folder = trainer.config.checkpoints
    with suppress(TimeoutError):  # the others wait here
        trainer.run.saver.wait(trainer.config.rank_timeout / 2)
    if folder / checkpoint.step_name(step) not in checkpoint.list_checkpoints(folder):
        return f"The checkpoint of step {step} was not kept"
    with suppress(OSError):  # a full disk does not stop the run
        checkpoint.mark_best(folder / checkpoint.step_name(step))
    return f"{folder / checkpoint.BEST} is the checkpoint of step {step}, and the last one may draw better pictures"


def _describe(verdict: Verdict, now: Measured) -> str:
    best = verdict.best
    return (
        f"the network memorises its training pictures: its loss on held-out pictures was {best.heldout_loss:.4g} at "
        f"step {best.step} and is {now.heldout_loss:.4g} at step {now.step}, while that on training pictures fell from "
        f"{best.seen_loss:.4g} to {now.seen_loss:.4g}"
    )
