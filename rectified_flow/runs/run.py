"""A training run on the disk: its folder, its log, and checkpoints that are written in the background."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from rectified_flow.data.stream import fingerprint_of
from rectified_flow.distributed import check_equal, check_shared, on_main
from rectified_flow.errors import BusyError, RunError, UsageError, first_line
from rectified_flow.flags import plain
from rectified_flow.registry import Document, describe
from rectified_flow.runs import checkpoint, folder
from rectified_flow.runs.checkpoint import (
    CONFIG_FILE,
    FLOW_FILE,
    OUTPUTS_FILE,
    STATE_FILE,
    RunIdentity,
    Tensors,
    TrainerFile,
)
from rectified_flow.runs.log import RunLog
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.files import writing
from rectified_flow.system.terminal import Silent, line, shown


class BackgroundSaver:
    """A thread that writes one checkpoint at a time, so that training waits for a copy in memory and not for the disk.

    Args:
        config: the run's flags.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self._thread = ThreadPoolExecutor(1, "saver")
        self._writing: Future[Path | None] | None = None
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._problem = ""
        """The reason why the last step was not saved; empty if it was saved."""

    def save(self, step: int, tensors: Tensors, write: Callable[[Tensors], Path]) -> None:
        """Copy the tensors, and call ``write`` with the copies in the background.

        If the disk is still busy with the previous checkpoint after half of the run's rank timeout, this one is left
        out, because the other ranks wait and would time out.
        """
        try:
            self.wait(self.config.rank_timeout / 2)
        except TimeoutError:
            tqdm.write(f"warning: step {step} is not saved: the previous checkpoint is still being written")
            self._problem = "the disk is too slow"
            return
        # A copy in any case: on a CPU, too, the next step changes the weights while these are written.
        copies = {
            file: {name: self._copy(file, name, value) for name, value in of.items()} for file, of in tensors.items()
        }
        self._problem = ""
        self._writing = self._thread.submit(self._write, step, copies, write)

    def _copy(self, file: str, name: str, value: Tensor) -> Tensor:
        """Copy a tensor into a buffer that is reused until the run ends, as allocation takes longer than copying.

        The copy has the order in which it is written. Else torch would reorder it in worker threads of this thread's
        own, and OpenMP slows down all of a process that has more of them than cores.
        """
        if (file, name) not in self._copies:
            self._copies[file, name] = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
        return self._copies[file, name].copy_(value)

    def wait(self, seconds: float | None = None) -> Path | None:
        """Wait for the checkpoint in writing, and return its path; None if there is none, or writing it failed."""
        return None if self._writing is None else self._writing.result(seconds)

    def is_behind(self) -> bool:
        """Wait for the checkpoint in writing, and return whether the last step is missing."""
        self.wait()
        return bool(self._problem)

    def finish(self) -> Path | None:
        """Wait for the last checkpoint, which must not be missing, and return its path."""
        path = self.wait()
        if self._problem:
            failure = f"could not save the last step to {self.config.checkpoints} ({self._problem})"
            raise RunError(f"{failure}: make room, and run the same command to resume")
        return path

    def _write(self, step: int, tensors: Tensors, write: Callable[[Tensors], Path]) -> Path | None:
        try:
            return write(tensors)
        except Exception as error:  # a full disk is an OSError in one library and a SafetensorError in another
            place = self.config.checkpoints
            failure = f"could not save step {step} to {place} ({error})"
            tqdm.write(shown(f"warning: {failure}; the previous checkpoint is kept"))
            self._problem = first_line(error)
            return None


class Run:
    """A run on the disk. Every process calls the same methods in the same order, and the main process writes.

    Only the cause of a failure is written by the first process that fails.

    Args:
        accelerator: the run's Accelerator.
        config: the run's flags.
        flow: the module in training.
        dataset: the data.
        progress: returns the steps made, and those of the whole run.
        data: description of the data, for the block ``data`` of ``config.json``.
        flags: the flags of the program that built the parts, for the block ``training``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        flow: nn.Module,
        dataset: Dataset[object],
        progress: Callable[[], tuple[int, int]],
        data: Mapping[str, object] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> None:
        self.accelerator, self.config, self.progress = accelerator, config, progress
        self.length, self.fingerprint = len(dataset), fingerprint_of(dataset)  # type: ignore[arg-type]
        self.flow_description: Document | None = None
        try:
            self.flow_description = describe(flow)
        except UsageError as error:  # a part is not registered
            self.print(f"warning: sample.py cannot build this flow from its checkpoints: {error}")
        description = self.flow_description or {"description": type(flow).__name__}
        self.document = folder.describe_run(config, description, dataset, data, flags)
        self.log, self.saver = cast(RunLog, Silent()), cast(BackgroundSaver, Silent())
        self._held, self._lock = ExitStack(), folder.lock_of(config.output_dir)

    def print(self, text: str) -> None:
        """Print a line beside the progress bar, on the main process."""
        if self.accelerator.is_main_process:
            tqdm.write(shown(text))

    def check_equal(self) -> None:
        """Check that all processes train the same flow on the same data with the same flags, paths aside."""
        facts = {"the number of items": self.length, "the fingerprint of the dataset": self.fingerprint}
        flags = {f"`{name}`": value for name, value in plain(self.config, paths=False).items()}
        check_equal(self.accelerator, lambda: facts | flags | folder.flat(self.flow_description or {}))

    def choose_checkpoint(self) -> Path | None:
        """Return the checkpoint to load, if there is one, on every process; from then on the run has an identity."""
        batch = self.config.split_batch(self.accelerator.num_processes)
        precision = folder.precision_name(self.accelerator)
        self.identity = RunIdentity(self.fingerprint, self.config.seed, batch.total, precision)
        choose = partial(folder.choose_checkpoint, self.config, self.identity, self.flow_description)
        return on_main(self.accelerator, choose)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock other runs out of the folders inside the block."""
        with ExitStack() as held:
            on_main(self.accelerator, lambda: folder.lock_folder(self.config, held))
            self._held, self._lock = held, folder.lock_of(self.config.output_dir)
            check_shared(self.accelerator, self.config.output_dir)
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the log and the trackers, and close them however the block ends. Write an error to ``status.json``."""
        try:
            on_main(self.accelerator, self._open)
            yield
        except BusyError:  # the status there is that of another run
            raise
        except BaseException as error:
            folder.write_failure(self.config.output_dir, error, *self.progress())
            raise
        finally:
            self.saver.wait()
            self.log.close()

    def _open(self) -> None:
        step = self.progress()[0]
        run_id = self.write_status(running=True)
        checkpoint.set_aside(self.config.checkpoints)
        folder.write_config(self.config.output_dir, self.document)
        self.log = RunLog(self.accelerator, self.config.output_dir, step)
        self.saver = BackgroundSaver(self.config)
        self.log.start_trackers(self.document, run_id)

    def save(self, step: int, tensors: Tensors, counters: Document, *, best: bool) -> Path:
        """Write a checkpoint in the background, and return the path that it will have.

        If the disk is full, the run warns and keeps the previous checkpoint. :meth:`finish` raises an error if the last
        checkpoint was not written.
        """
        if self.accelerator.is_main_process:
            self._check_lock()
            self.write_status(running=True)
            with suppress(OSError):  # the lines are written with later ones
                self.log.flush()
            state = asdict(TrainerFile(**counters, run=self.identity, items=self.length))
            documents: dict[str, object] = {CONFIG_FILE: self.document, STATE_FILE: state}
            documents[OUTPUTS_FILE] = self.log.keep_manifest()
            if self.flow_description is not None:
                documents[FLOW_FILE] = self.flow_description
            place, keep, total_steps = self.config.checkpoints, self.config.keep_checkpoints, self.progress()[1]

            def write(copies: Tensors) -> Path:
                self.log.draw_loss()
                path = checkpoint.save(place, step, copies, documents, best=best)
                if counters["bad_in_a_row"] == 0:  # otherwise the weights may be faulty
                    checkpoint.prune(path, keep, total_steps)
                return path

            self.saver.save(step, tensors, write)
        return self.config.checkpoints / checkpoint.step_name(step)

    def _check_lock(self) -> None:
        """Keep other runs out of a folder that replaces one that was moved or deleted.

        Raises:
            BusyError: if another run has locked the new folder.
        """
        place = self.config.output_dir
        try:
            if folder.lock_of(place) == self._lock:
                return
        except OSError:  # a network disk that does not answer; the next checkpoint checks again
            return
        self.print(
            f"warning: {place} was moved or deleted during training; the run continues in a new folder of that name"
        )
        with self.log.tolerant("the lock and config.json", (OSError,)):
            folder.lock_again(place, self.document, self._held)
            self._lock = folder.lock_of(place)

    def finish(self) -> None:
        """Flush all files, and write the final status and the paths of the files. Main process only."""
        path = self.saver.finish()
        with writing(f"the last lines of {self.log.folder / 'metrics.jsonl'}"):
            self.log.flush()
        step, total_steps = self.progress()
        self.write_status()
        if step != total_steps:
            self.print(line("interrupted", f"at step {step} of {total_steps}: run the same command to resume"))
        for name, place in {"samples": self.log.preview, "loss plot": self.log.loss_plot, "checkpoint": path}.items():
            if place is not None:
                self.print(line(name, place))

    def write_status(self, *, running: bool = False, times: Document | None = None) -> str:
        """Write the state of the run, and return its name in trackers. Main process only.

        Args:
            running: whether the run goes on.
            times: see :func:`write_status <rectified_flow.runs.folder.write_status>`.
        """
        step, total_steps = self.progress()
        ended: folder.RunState = "finished" if step >= total_steps else "interrupted"
        state = "running" if running else ended
        return folder.write_status(self.config.output_dir, state, step, total_steps, times=times)
