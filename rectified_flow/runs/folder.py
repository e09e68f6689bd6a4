"""A run's output folder: one run at a time writes in it, and ``status.json`` holds that run's state."""

import json
import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from rectified_flow.errors import UsageError, first_line
from rectified_flow.files import lock_of, prepare_folder, replace_file
from rectified_flow.runs.config import TrainingConfig

RunState = Literal["running", "finished", "interrupted", "failed"]
LOCK_FILE, STATUS_FILE = ".lock", "status.json"
LOCK_TIMEOUT = 10.0
"""Seconds to wait for a run that is ending; loader processes may outlive a killed run by five."""


class RunFolder:
    """The folders a run writes in, held from :meth:`claim` to :meth:`release`.

    The locks are the operating system's: they end with the process, however that ends.

    Args:
        config: whose ``output_dir`` and checkpoints.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.path = config.output_dir
        self._folders = {"output_dir": config.output_dir, "checkpoint_dir": config.checkpoints}
        self._locks: list[FileLock] = []

    def claim(self, report: Callable[[str], object]) -> None:
        """Make the folders, check that they can be written, and lock other runs out.

        Raises:
            UsageError: if they cannot be written, or another run holds them.
        """
        for flag, folder in self._folders.items():
            prepare_folder(flag, folder)
        for flag, folder in self._folders.items():
            if flag == "output_dir" or folder.resolve() != self.path.resolve():  # the two may be one
                self._locks.append(self._lock(flag, folder, report))

    def release(self) -> None:
        """Release the locks."""
        while self._locks:
            self._locks.pop().release()

    @property
    def run_id(self) -> str:
        """The run's name for trackers, the same after every restart."""
        return str(self._status().get("id") or uuid.uuid4().hex[:12])

    def write_status(self, state: RunState, step: int, total_steps: int, message: str = "") -> None:
        """Write ``status.json``; a full disk does not stop the run."""
        status = {
            "state": state,
            "step": step,
            "total_steps": total_steps,
            "message": message,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": platform.node(),
            "pid": os.getpid(),
            "id": self.run_id,
        }
        text = json.dumps(status, indent=1)
        try:
            replace_file(self.path / STATUS_FILE, text)
        except OSError:
            with suppress(OSError):  # over the old one, which needs no more room
                (self.path / STATUS_FILE).write_text(text)

    def write_failure(self, error: BaseException, step: int, total_steps: int) -> None:
        """Write why the run ended early, unless another rank has: the first failure causes those of the others."""
        if self._status().get("state") not in ("failed", "finished"):
            state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.write_status(state, step, total_steps, first_line(error))

    def _status(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads((self.path / STATUS_FILE).read_text()))
        return {}

    def _lock(self, flag: str, folder: Path, report: Callable[[str], object]) -> FileLock:
        lock = lock_of(folder / LOCK_FILE)
        try:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                report(f"waiting for another run to release {folder}")
                lock.acquire(timeout=LOCK_TIMEOUT)
        except Timeout:
            holder = self._status() if folder == self.path else {}
            who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
            raise UsageError(
                f"{who} is training in --{flag} {folder}: wait for its end, or choose another folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            report(f"warning: {folder} cannot be locked ({error}): make sure that no other run writes there")
        return lock
