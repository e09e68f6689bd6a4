"""Evaluations on the way: how near the pictures are by now, and which checkpoint is the best."""

from contextlib import suppress
from math import inf
from typing import Any, cast

from accelerate import Accelerator
from torch import nn

from rectified_flow import checkpoint
from rectified_flow.checkpoint import step_name
from rectified_flow.evaluation.evaluator import Evaluator, Generated
from rectified_flow.flows import Flow
from rectified_flow.interruption import Interrupted
from rectified_flow.processes.collectives import on_main
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.record import RunRecord


class Evaluations:
    """What ``--evaluate_every`` asks for; every process calls the same methods.

    Args:
        accelerator: of the run.
        evaluator: what measures.
        config: the run's flags.
        record: of the run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        evaluator: Evaluator,
        config: TrainingConfig,
        record: RunRecord,
    ) -> None:
        self.accelerator, self.evaluator, self.config, self.record = accelerator, evaluator, config, record

    def evaluate(self, flow: nn.Module, step: int) -> bool:
        """Measure, tell and write down; returns whether no checkpoint before is better.

        False, and nothing written, if the end was requested meanwhile on any process.

        Args:
            flow: what to draw from.
            step: at which it is.
        """
        sampled = cast(Flow, flow)
        steps = self.config.sample_steps or sampled.default_steps
        try:
            with self.accelerator.autocast():
                generated = self.evaluator.generate(sampled, steps=steps)
        except Interrupted:
            return False
        return on_main(self.accelerator, lambda: self._judge(generated, step, {"steps": steps}))

    def make_up(self, flow: nn.Module, step: int) -> None:
        """Evaluate the step a run goes on from, if that was given up when the run was asked to end."""
        best = on_main(self.accelerator, lambda: step not in self._steps()) and self.evaluate(flow, step)
        if best and self.accelerator.is_main_process:
            with suppress(OSError):  # a full disk is no reason to stop
                checkpoint.call_best(self.config.checkpoints / step_name(step))

    def _steps(self) -> list[int]:
        assert self.record.log is not None
        return [row["step"] for row in self.record.log.evaluations.rows()]

    def _judge(self, generated: Generated, step: int, how: dict[str, Any]) -> bool:
        log, name, settings = self.record.log, self.evaluator.headline, self.evaluator.settings | how
        assert log is not None
        self.record.wait_for_checkpoint()  # which is the best so far is known when it is written
        distances = self.evaluator.distances(generated)
        alike = {row["step"]: row[name] for row in log.evaluations.rows() if settings.items() <= row.items()}
        known = checkpoint.best_of(self.config.checkpoints)
        least = min(alike.values(), default=inf)
        best = known is None or distances[name] < alike.get(checkpoint.step_of(known), least)
        log.evaluation(step, name, distances, settings)
        self.record.say(f"{'evaluation':<11} step {step}: {name} {distances[name]:.5g}" + ", the best so far" * best)
        return best
