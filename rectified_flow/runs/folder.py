"""A run's output folder: one run at a time writes in it, and ``status.json`` holds that run's state."""

import json
import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from filelock import Timeout
from pydantic import Field

from rectified_flow.errors import UsageError, first_line
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.files import locked, prepare_folder, read_document, replace_file

RunState = Literal["running", "finished", "interrupted", "failed"]
LOCK_FILE, STATUS_FILE = ".lock", "status.json"
LOCK_TIMEOUT = 10.0
"""Seconds to wait for a run that is ending; loader processes may outlive a killed run by five."""


@dataclass(frozen=True)
class Status:
    """``status.json``."""

    state: RunState
    step: int
    total_steps: int
    message: str
    time: str
    host: str
    pid: int
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    """The run's name for trackers."""


class RunFolder:
    """The folders a run writes in, held from :meth:`claim` to :meth:`release`.

    The locks are the operating system's: they end with the process, however that ends.

    Args:
        config: whose ``output_dir`` and checkpoints.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.path = config.output_dir
        self.folders = {"output_dir": config.output_dir, "checkpoint_dir": config.checkpoints}
        self._locks = ExitStack()

    def prepare(self) -> None:
        """Make the folders, and check that they can be written.

        Raises:
            UsageError: if they cannot.
        """
        for flag, folder in self.folders.items():
            prepare_folder(flag, folder)

    def claim(self, report: Callable[[str], object]) -> None:
        """Prepare the folders, and lock other runs out.

        Raises:
            UsageError: if they cannot be written, or another run holds them.
        """
        self.prepare()
        for flag, folder in self.folders.items():
            if flag == "output_dir" or folder.resolve() != self.path.resolve():  # the two may be one
                self._lock(flag, folder, report)

    def release(self) -> None:
        """Release the locks."""
        self._locks.close()

    @property
    def run_id(self) -> str:
        """The run's name for trackers, the same after every restart."""
        known = self._status()
        return known.id if known is not None else uuid.uuid4().hex[:12]

    def write_status(self, state: RunState, step: int, total_steps: int, message: str = "") -> None:
        """Write ``status.json``; a full disk does not stop the run."""
        now, host, pid = time.strftime("%Y-%m-%dT%H:%M:%S%z"), platform.node(), os.getpid()
        status = Status(state, step, total_steps, message, now, host, pid, self.run_id)
        text = json.dumps(asdict(status), indent=1)
        try:
            replace_file(self.path / STATUS_FILE, text)
        except OSError:
            with suppress(OSError):  # over the old one, which needs no more room
                (self.path / STATUS_FILE).write_text(text)

    def write_failure(self, error: BaseException, step: int, total_steps: int) -> None:
        """Write why the run ended early, unless another rank has: the first failure causes those of the others."""
        known = self._status()
        if known is None or known.state not in ("failed", "finished"):
            state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.write_status(state, step, total_steps, first_line(error))

    def _status(self) -> Status | None:
        with suppress(UsageError):  # it is written anew
            return read_document(self.path / STATUS_FILE, Status)
        return None

    def _lock(self, flag: str, folder: Path, report: Callable[[str], object]) -> None:
        try:
            try:
                self._locks.enter_context(locked(folder / LOCK_FILE, 0, report))
            except Timeout:
                report(f"waiting for another run to release {folder}")
                self._locks.enter_context(locked(folder / LOCK_FILE, LOCK_TIMEOUT, report))
        except Timeout:
            holder = self._status() if folder == self.path else None
            who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
            raise UsageError(
                f"{who} is training in --{flag} {folder}: wait for its end, or choose another folder"
            ) from None
