"""Checkpoints written in the background: a step that saves waits for a copy of the weights, not for the disk."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rectified_flow.errors import RunError, UsageError
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.snapshots import keep_snapshots

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
