"""Evaluations during training: how near the generated pictures are to the data, and which checkpoint is the best."""

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, cast

from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator, Generated
from rectified_flow.flows.flow import Flow
from rectified_flow.interruption import Interrupted
from rectified_flow.report import line
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import step_name
from rectified_flow.training.callbacks import Callback

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer


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
