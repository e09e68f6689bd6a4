"""A run's folders: one run at a time writes in them, and ``status.json`` has the state of that run."""

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from filelock import Timeout
from pydantic import Field

from rectified_flow.errors import UsageError, first_line
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.files import LOCK_TIMEOUT, locked, prepare_folder, read_document, replace_file

RunState = Literal["running", "finished", "interrupted", "failed"]
LOCK_FILE, STATUS_FILE = ".lock", "status.json"


@dataclass(frozen=True)
class Status:
    """The contents of ``status.json``."""

    state: RunState
    step: int
    total_steps: int
    message: str
    time: str
    host: str
    pid: int
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    """The run's name in trackers."""


class StatusFile:
    """The ``status.json`` in a run's output folder.

    Args:
        folder: the output folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / STATUS_FILE

    def read(self) -> Status | None:
        """Return the status, or None if it is missing or damaged."""
        with suppress(UsageError):
            return read_document(self.path, Status)
        return None

    @property
    def run_id(self) -> str:
        """The run's name in trackers, which is the same after every restart."""
        known = self.read()
        return known.id if known is not None else uuid.uuid4().hex[:12]

    def write(self, state: RunState, step: int, total_steps: int, message: str = "") -> None:
        """Write the status; a full disk does not stop the run."""
        now, host, pid = time.strftime("%Y-%m-%dT%H:%M:%S%z"), platform.node(), os.getpid()
        text = json.dumps(asdict(Status(state, step, total_steps, message, now, host, pid, self.run_id)), indent=1)
        try:
            replace_file(self.path, text)
        except OSError:
            with suppress(OSError):  # over the old one, which needs no more room
                self.path.write_text(text)

    def write_failure(self, error: BaseException, step: int, total_steps: int) -> None:
        """Write why the run ended early, unless another rank has: the first failure causes those of the others."""
        known = self.read()
        if known is None or known.state not in ("failed", "finished"):
            state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.write(state, step, total_steps, first_line(error))


@contextmanager
def locked_folders(config: TrainingConfig, report: Callable[[str], object]) -> Iterator[None]:
    """Make the folders of a run, and lock other runs out of them inside the block.

    The locks are the operating system's, so they end with the process, however it ends.

    Args:
        config: the run's flags.
        report: called with a sentence while another run is waited for.

    Raises:
        UsageError: if the folders cannot be written, or another run holds them.
    """
    with ExitStack() as locks:
        for flag, folder in config.folders.items():
            prepare_folder(flag, folder)
            if flag == "checkpoint_dir" and folder.resolve() == config.output_dir.resolve():
                continue
            try:
                _lock(locks, folder, report)
            except Timeout:
                holder = StatusFile(folder).read() if flag == "output_dir" else None
                who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
                raise UsageError(
                    f"{who} is training in --{flag} {folder}: wait for its end, or choose another folder"
                ) from None
        yield


def _lock(locks: ExitStack, folder: Path, report: Callable[[str], object]) -> None:
    try:
        locks.enter_context(locked(folder / LOCK_FILE, 0, report))
    except Timeout:
        report(f"waiting for another run to release {folder}")
        locks.enter_context(locked(folder / LOCK_FILE, LOCK_TIMEOUT, report))
