"""The loss on held-out pictures during training, and what follows from it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from rectified_flow.distributed.collectives import on_main
from rectified_flow.documents import check_document
from rectified_flow.errors import DamageError
from rectified_flow.evaluation.heldout_loss import HeldOutPictures, Measured, Verdict, judge
from rectified_flow.flows.flow import Flow
from rectified_flow.progress import progress_bar
from rectified_flow.runs import checkpoint
from rectified_flow.training.measurement import Measurement

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer

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
