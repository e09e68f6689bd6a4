"""Evaluations on the way: how near the pictures are by now, and which checkpoint is the best."""

from contextlib import suppress
from typing import cast

from accelerate import Accelerator
from torch import nn

from rectified_flow import checkpoint
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
        steps = {"steps": self.config.sample_steps} if self.config.sample_steps else {}
        with suppress(Interrupted), self.accelerator.autocast():
            generated = self.evaluator.generate(cast(Flow, flow), **steps)
            return on_main(self.accelerator, lambda: self._judge(generated, step))
        return False

    def _judge(self, generated: Generated, step: int) -> bool:
        log = self.record.log
        assert log is not None
        self.record.wait_for_checkpoint()  # which is the best so far is known when it is written
        name = self.evaluator.headline
        distances = self.evaluator.distances(generated)
        known = checkpoint.best_of(self.config.checkpoints)
        before = {row["step"]: row[name] for row in log.evaluations.rows() if name in row}
        best = known is None or distances[name] < before.get(checkpoint.step_of(known), float("inf"))
        log.evaluation(step, name, distances, self.evaluator.settings)
        self.record.say(f"{'evaluation':<11} step {step}: {name} {distances[name]:.5g}" + ", the best so far" * best)
        return best
