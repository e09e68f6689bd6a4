"""Checkpoints written in the background: a step that saves waits for a copy of the weights, not for the disk."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from rectified_flow.data.stream import fingerprint_of
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_equal, check_shared
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flags import plain
from rectified_flow.registry import DescriptionError, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE, STATE_FILE, RunIdentity, SavedState, step_name
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.document import program_flags
from rectified_flow.runs.folder import RunFolder, RunState
from rectified_flow.runs.log import RunLog
from rectified_flow.runs.resume import choose_checkpoint, flat, identify_run, precision_name
from rectified_flow.runs.snapshots import drop_snapshots, keep_snapshots
from rectified_flow.system.terminal import Silent, line

Tensors = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """Writes one checkpoint at a time, in a thread. Main process only.

    Args:
        config: the run's flags.
        draw: called before each checkpoint is written, to draw the loss plot.
        warn: called with a line on each checkpoint that could not be written; those before it stay as they are.
    """

    def __init__(self, config: TrainingConfig, draw: Callable[[], object], warn: Callable[[str], object]) -> None:
        self.config, self.draw, self.warn = config, draw, warn
        self._thread = ThreadPoolExecutor(1, "saver")
        self._writing: Future[Path] | None = None
        self._skipped = False
        self._copies: dict[tuple[str, str], Tensor] = {}

    def save(
        self, step: int, tensors: Tensors, documents: Mapping[str, Any], *, best: bool = False, prune: bool = True
    ) -> None:
        """Copy ``tensors`` and write them in the background; arguments as in :func:`checkpoint.save`.

        Unless ``prune`` is false, older checkpoints are then removed, as the config says.

        If the disk is still busy with the checkpoint before after half of the run's rank timeout, this one is left out.
        """
        try:
            # The other ranks wait for this one meanwhile, and not for ever.
            self.wait(self.config.rank_timeout / 2)
        except TimeoutError:
            self.warn(f"warning: step {step} is not saved, the disk is still writing the checkpoint before")
            self._skipped = True
            return
        # A copy in any case: on a CPU, too, the next step changes the weights while these are written.
        copies = {
            file: {name: self._copy(file, name, value) for name, value in of.items()} for file, of in tensors.items()
        }
        self._skipped = False
        self._writing = self._thread.submit(self._write, step, copies, documents, best, prune)

    def wait(self, seconds: float | None = None) -> Path | None:
        """Wait for the checkpoint in writing and return it; None if there is none, or it could not be written.

        Raises:
            TimeoutError: if it takes longer than ``seconds``.
        """
        if self._writing is None or self._writing.exception(seconds) is not None:
            return None
        return self._writing.result()

    def finish(self) -> Path | None:
        """As :meth:`wait`, for a checkpoint that must not be missing.

        Raises:
            RunError: if it could not be written.
        """
        path = self.wait()
        if self._skipped or (path is None and self._writing is not None):
            reason = "the disk is too slow" if self._writing is None or path else self._writing.exception()
            raise RunError(
                f"could not save the last step to {self.config.checkpoints} ({reason}): make room, "
                "and run the same command to resume from the checkpoint before"
            )
        return path

    def _copy(self, file: str, name: str, value: Tensor) -> Tensor:
        """Copied into memory that is kept for it till the run ends, as new memory costs more than copying.

        In the order in which it is written: torch would bring it there with worker threads of the saver's own, and
        OpenMP slows down all of a process that has more of them than cores.
        """
        if (file, name) not in self._copies:
            self._copies[file, name] = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
        return self._copies[file, name].copy_(value)

    def _write(self, step: int, tensors: Tensors, documents: Mapping[str, Any], best: bool, prune: bool) -> Path:
        folder, config = self.config.checkpoints, self.config
        self.draw()
        try:
            path = checkpoint.save(folder, step, tensors, documents, best=best)
            try:
                keep_snapshots(folder)
            except (OSError, UsageError) as error:
                self.warn(f"warning: could not keep a snapshot of the averages of step {step} ({error})")
            try:
                if prune:
                    checkpoint.prune(path, config.keep_checkpoints, config.keep_every)
            except UsageError as error:  # which checkpoint is the best cannot be read now
                self.warn(f"warning: older checkpoints are kept for now ({error})")
            return path
        except Exception as error:  # a full disk is an OSError in one library and a SafetensorError in another
            self.warn(f"warning: could not save step {step} to {folder} ({error}); the checkpoint before stays")
            raise


class Run:
    """Every process has one and calls it alike; on all but the main one, methods of ``log`` and ``saver`` do nothing.

    Args:
        accelerator: of the run.
        config: the run's flags.
        flow: the module in training.
        dataset: the data.
        document: the contents of the run's ``config.json``.
        progress: returns the steps done, and those of the whole run.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        flow: nn.Module,
        dataset: Dataset[Any],
        document: Mapping[str, Any],
        progress: Callable[[], tuple[int, int]],
    ) -> None:
        self.accelerator, self.config, self.progress = accelerator, config, progress
        self.dataset, self.document = dataset, document
        self.flow_description, self._undescribed = _describe(flow)
        self.folder = RunFolder(config)
        self.log, self.saver = cast(RunLog, Silent()), cast(Saver, Silent())

    def check_equal(self) -> None:
        """Check that all processes are about to train the same flow on the same data with the same flags, paths aside.

        Raises:
            UsageError: if they are not.
        """
        check_equal(
            self.accelerator,
            lambda: {
                "the number of items": len(self.dataset),  # type: ignore[arg-type]
                "the fingerprint of the dataset": self._fingerprint,
                **{f"--{name}": value for name, value in plain(self.config, paths=False).items()},
                **flat(self.flow_description or {}),
            },
        )

    def choose_checkpoint(self) -> Path | None:
        """The checkpoint to load, if there is one, on every process; from then on the run has an identity.

        Raises:
            UsageError: if resuming would mix two runs.
        """
        path, self.identity = on_main(self.accelerator, self._choose_checkpoint)
        return path

    def _choose_checkpoint(self) -> tuple[Path | None, RunIdentity]:
        batch = self.config.split_batch(self.accelerator.num_processes)
        precision = precision_name(self.accelerator)
        run = identify_run(self.config, self._fingerprint, batch.total, precision)
        length = len(self.dataset)  # type: ignore[arg-type]
        return choose_checkpoint(self.config, run, length, self.flow_description, self.print)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_of(self.dataset)

    def print(self, text: str) -> None:
        """Print a line beside the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock other runs out of the folder, which all processes must share; write into its status why this fails.

        Raises:
            UsageError: if the folder cannot be written, is not shared, or another run holds it.
        """
        try:
            on_main(self.accelerator, lambda: self.folder.claim(self.print))
            check_shared(self.accelerator, self.folder.folders)
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

    def save(self, step: int, tensors: Tensors, counters: Mapping[str, Any], *, best: bool, prune: bool) -> Path:
        """Write a checkpoint in the background, and return where. If the disk is full, warn and keep the previous one.

        Args:
            step: optimizer steps made.
            tensors: by file and name.
            counters: the rest of the training state.
            best: point the name ``best`` to it.
            prune: remove older checkpoints, as the config says.
        """
        path = self.config.checkpoints / step_name(step)
        if not self.accelerator.is_main_process:
            return path
        self.write_status(running=True)
        with suppress(OSError):  # the lines are written with later ones
            self.log.write_lines()
        documents = {CONFIG_FILE: self.document, STATE_FILE: asdict(SavedState(**counters, run=self.identity))}
        if self.flow_description is not None:
            documents[FLOW_FILE] = self.flow_description
        self.saver.save(step, tensors, documents, best=best, prune=prune)
        return path

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
        ended: RunState = "finished" if step >= total_steps else "interrupted"
        self.folder.write_status("running" if running else ended, step, total_steps)

    def _open(self) -> None:
        step = self.progress()[0]
        self.write_status(running=True)
        drop_snapshots(self.config.checkpoints, after=step)
        self.log = RunLog(self.accelerator, self.config, self.document, step, warn=self.print)
        self.saver = Saver(self.config, draw=self.log.draw_loss, warn=self.print)
        self.log.start_trackers(self.folder.run_id, program_flags(self.document))
        if self.flow_description is None:
            self.print(f"warning: sample.py cannot build this flow from its checkpoints: {self._undescribed}")


def _describe(flow: nn.Module) -> tuple[dict[str, Any] | None, str]:
    """The contents of ``flow.json``; for a flow with parts that are not registered None, and the reason."""
    try:
        return describe(flow), ""
    except DescriptionError as error:
        return None, str(error)
