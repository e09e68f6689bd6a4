"""A run while it is open: its folder, its log and its saver."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from tqdm.auto import tqdm

from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import RunError
from rectified_flow.flags import plain
from rectified_flow.report import Silent, line
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import RunFolder, RunState
from rectified_flow.runs.log import RunLog
from rectified_flow.runs.saver import Saver, Tensors
from rectified_flow.runs.snapshots import drop_snapshots


class Run:
    """Every process has one and uses it alike; on the others than the main one, ``log`` and ``saver`` do nothing.

    Args:
        accelerator: of the run.
        config: the run's flags.
        document: the contents of the run's ``config.json``.
        flags: of the program that was started, for trackers; the run's flags if there was none.
        progress: returns the steps done, and those of the whole run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        document: Mapping[str, Any],
        flags: Mapping[str, Any] | None,
        progress: Callable[[], tuple[int, int]],
    ) -> None:
        self.accelerator, self.config, self.document, self.progress = accelerator, config, document, progress
        self.flags = plain(config) if flags is None else flags
        self.folder = RunFolder(config)
        self.log, self.saver = cast(RunLog, Silent()), cast(Saver, Silent())

    def print(self, text: str) -> None:
        """Print a line beside the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock other runs out of the folder; if this one fails, write why into its status."""
        try:
            on_main(self.accelerator, lambda: self.folder.claim(self.print))
            try:
                yield
            except BaseException as error:
                self.folder.write_failure(error, *self.progress())
                raise
        finally:
            self.folder.release()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open all files and trackers, and close them however the block ends."""
        try:
            on_main(self.accelerator, self._open)
            yield
        finally:
            self.saver.wait()
            self.log.close()

    def save(self, step: int, tensors: Tensors, documents: Mapping[str, Any], *, best: bool = False) -> None:
        """Write a checkpoint in the background. If the disk is full, warn and keep the previous one."""
        if not self.accelerator.is_main_process:
            return
        self.write_status(running=True)
        with suppress(OSError):  # the lines are written with later ones
            self.log.write_lines()
        self.saver.save(step, tensors, documents, best=best)

    def finish(self) -> dict[str, Path]:
        """Put everything on the disk and write how the run ended; returns what is where. Main process only.

        Raises:
            RunError: if the last checkpoint or the last lines could not be written.
        """
        path = self.saver.finish()
        try:
            self.log.write_lines()
        except OSError as error:
            raise RunError(f"could not write the last lines of {self.folder.path}/metrics.jsonl ({error})") from error
        step, total_steps = self.progress()
        self.write_status()
        if step != total_steps:
            self.print(line("interrupted", f"at step {step} of {total_steps}: run the same command to resume"))
        return {"loss plot": self.log.loss_plot} | ({} if path is None else {"checkpoint": path})

    def write_status(self, *, running: bool = False) -> None:
        """Write ``status.json``: running, or else finished or interrupted. Main process only."""
        step, total_steps = self.progress()
        ended: RunState = "finished" if step == total_steps else "interrupted"
        self.folder.write_status("running" if running else ended, step, total_steps)

    def _open(self) -> None:
        step = self.progress()[0]
        self.write_status(running=True)
        drop_snapshots(self.config.checkpoints, after=step)
        self.log = RunLog(self.accelerator, self.config, self.document, step, warn=self.print)
        self.saver = Saver(self.config, draw=self.log.draw_loss, warn=self.print)
        self.log.start_trackers(self.folder.run_id, self.flags)
