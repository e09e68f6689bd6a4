"""What a run writes and tells, from the claim of its folder to its last line; the main process alone does so."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow import averages
from rectified_flow.errors import RunError
from rectified_flow.processes.collectives import on_main
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.run_folder import RunFolder, Standing
from rectified_flow.training.saving import Saver, Tensors
from rectified_flow.training.stepper import BadStep
from rectified_flow.training.tracking import RunLog


class RunRecord:
    """Every process has one and calls it alike; those of the others are silent.

    Args:
        accelerator: of the run.
        config: the run's flags.
        progress: says how many steps are done, and of how many.
    """

    def __init__(self, accelerator: Accelerator, config: TrainingConfig, progress: Callable[[], tuple[int, int]]):
        self.accelerator, self.config, self.progress = accelerator, config, progress
        self.folder = RunFolder(config)
        # What only the main process has, and only while the run is open:
        self.log: RunLog | None = None
        self.saver: Saver | None = None

    def say(self, line: str) -> None:
        """Print a line beside the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(line)

    def tell(self, standing: Standing) -> None:
        """Write how the run stands into status.json."""
        if self.accelerator.is_main_process:
            self.folder.tell(standing, *self.progress())

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Keep other runs out, and if this one fails, write down why."""
        try:
            on_main(self.accelerator, lambda: self.folder.claim(self.say))
            try:
                yield
            except BaseException as error:
                self.folder.tell_end(error, *self.progress())
                raise
        finally:
            self.folder.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open all files and trackers, and whatever happens then, close them."""
        try:
            on_main(self.accelerator, self.open)
            yield
        finally:
            if self.saver is not None:
                self.saver.wait()
            if self.log is not None:
                self.log.close()

    def open(self) -> None:
        """Begin to write. Main process only."""
        self.tell("running")
        averages.drop_snapshots(self.config.checkpoints, after=self.progress()[0])
        self.log = RunLog(self.accelerator, self.config, self.progress()[0], warn=self.say)
        self.saver = Saver(self.config, draw=self.log.draw_loss, warn=self.say)
        self.log.start_trackers(self.folder.run_id)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line of metrics."""
        if self.log is not None:
            self.log.metrics(step, **values)

    def samples(self, step: int, images: Tensor | None) -> dict[str, Path]:
        """Write a grid, and say where."""
        return {} if self.log is None or images is None else {"samples": self.log.samples(step, images)}

    def bad_step(self, bad: BadStep) -> None:
        """Tell of a step that was skipped."""
        shown = ", ".join(map(str, bad.images[:8])) + ", ..." * (len(bad.images) > 8)
        self.say(
            f"warning: step {bad.step} was skipped, number {bad.in_a_row} in a row: loss or gradient is not finite on "
            f"images {shown} (all in bad_steps.jsonl)"
        )
        if self.log is not None:
            self.log.bad_step(bad.step, bad.images)

    def checkpoint(self, step: int, tensors: Tensors, documents: Mapping[str, Any], *, best: bool = False) -> None:
        """Have a checkpoint written; one that fails for want of space leaves the one before, and the run, alone."""
        if self.saver is not None and self.log is not None:
            self.tell("running")
            with suppress(OSError):
                self.log.write_lines()
            self.saver.save(step, tensors, documents, best=best)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last one is written, or has failed; but the other processes wait for this one meanwhile."""
        if self.saver is not None:
            with suppress(TimeoutError):
                self.saver.wait(self.config.rank_timeout / 2)

    def finish(self) -> dict[str, Path]:
        """See that everything is on the disk, and say how the run ended and what is where. Main process only.

        Raises:
            RunError: if the last checkpoint or the last lines could not be written.
        """
        assert self.saver is not None
        assert self.log is not None
        path = self.saver.finish()
        try:
            self.log.write_lines()
        except OSError as error:
            raise RunError(f"could not write the last lines of {self.folder.path}/metrics.jsonl ({error})") from error
        step, total_steps = self.progress()
        self.tell("finished" if step == total_steps else "interrupted")
        if step != total_steps:
            self.say(f"{'interrupted':<11} at step {step} of {total_steps}: the same command goes on")
        return {"loss plot": self.log.loss_plot} | ({} if path is None else {"checkpoint": path})
