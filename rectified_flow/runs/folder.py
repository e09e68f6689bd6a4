"""A run's folder: its ``config.json`` and ``status.json``, and the locks by which one run at a time writes in it.

``config.json`` has the parts that a run was made of, and the flags that start it again.
"""

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tqdm.auto import tqdm

from rectified_flow.errors import BusyError, DamageError, UsageError, first_line
from rectified_flow.flags import recorded
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.artifact import CHECKPOINT, MANIFEST, Natural, is_artifact, owned_files
from rectified_flow.system.files import (
    LOCK_TIMEOUT,
    locked,
    prepare_folder,
    read_document,
    replace_file,
    writing,
)
from rectified_flow.system.outputs import claim

if TYPE_CHECKING:  # the command line reads these files before torch is imported
    from torch.utils.data import Dataset

RunState = Literal["running", "finished", "interrupted", "failed"]
LOCK_FILE, STATUS_FILE, BEST = ".lock", "status.json", "best"
RUN_FILES = ("config.json", STATUS_FILE, "loss.png", "samples")
"""Files and folders that every run writes into its output folder, in addition to its logs."""


def describe_run(
    config: TrainingConfig,
    flow: Mapping[str, Any],
    dataset: "Dataset[Any]",
    data: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of the ``config.json`` of a run.

    Args:
        config: the run's flags.
        flow: the description of the flow with its network.
        dataset: the data. Its attribute ``arguments`` has the arguments of :func:`rectified_flow.open_dataset`, and
            ``description`` a line for the user.
        data: the description of the data, if a program opened them.
        flags: further flags of that program.
    """
    return {
        "data": dict(data or getattr(dataset, "arguments", None) or {"description": data_description(dataset)}),
        "flow": dict(flow),
        "training": recorded(config) | dict(flags or {}),
        "items": {"training": len(dataset)},  # type: ignore[arg-type]
    }


def write_config(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the ``config.json`` of the run in ``folder``.

    Raises:
        RunError: if the disk is full.
    """
    path = folder / RUN_FILES[0]
    with writing(path):
        replace_file(path, json.dumps(document, indent=1))


def data_description(dataset: "Dataset[Any]") -> str:
    """Describe a dataset in a line for the user."""
    own = getattr(dataset, "description", None)
    return str(own) if own else f"{len(dataset)} items of a {type(dataset).__name__}"  # type: ignore[arg-type]


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a ``config.json``: three blocks and the numbers of items."""

    data: dict[str, Any] = field(default_factory=dict)
    flow: dict[str, Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)
    items: dict[str, Natural] = field(default_factory=dict)
    """Numbers of items of the data: ``training``, and ``held_out`` if some are."""
    run: dict[str, Any] = field(default_factory=dict)
    """Flags of the trainer, in a run of commit c5b7768."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Other flags, in a run of commit c5b7768."""
    network: dict[str, Any] | None = None
    """Description of the network, in a run of commit c5b7768."""


def read_config(path: Path) -> dict[str, Any]:
    """Read the ``config.json`` at ``path``.

    Raises:
        UsageError: if it cannot be read, is damaged, or does not belong to a run.
    """
    document = {name: value for name, value in asdict(read_document(path, ConfigFile)).items() if value}
    if document.keys().isdisjoint(("training", "run", "flags")):
        raise DamageError(f"{path} is not the config.json of a run")
    return document


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


def read_status(folder: Path) -> Status | None:
    """Return the status of the run in ``folder``, or None if it is missing or damaged."""
    with suppress(UsageError):
        return read_document(folder / STATUS_FILE, Status)
    return None


def write_status(folder: Path, state: RunState, step: int, total_steps: int, message: str = "") -> str:
    """Write the status of the run in ``folder``, unless the disk is full, and return the run's name in trackers."""
    path, known = folder / STATUS_FILE, read_status(folder)
    run_id = uuid.uuid4().hex[:12] if known is None else known.id  # the same after every restart
    now, host, pid = time.strftime("%Y-%m-%dT%H:%M:%S%z"), platform.node(), os.getpid()
    text = json.dumps(asdict(Status(state, step, total_steps, message, now, host, pid, run_id)), indent=1)
    try:
        replace_file(path, text)
    except OSError:
        with suppress(OSError):  # overwriting the old file needs no more space
            path.write_text(text)
    return run_id


def write_failure(folder: Path, error: BaseException, step: int, total_steps: int) -> None:
    """Write the cause of a failure, unless another rank has written one, since the first failure causes the others."""
    known = read_status(folder)
    if known is None or known.state not in ("failed", "finished"):
        state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        write_status(folder, state, step, total_steps, first_line(error))


def is_run(folder: Path) -> bool:
    """Return whether ``folder`` has the ``config.json`` of a run."""
    with suppress(UsageError):
        return bool(read_config(folder / RUN_FILES[0]))
    return False


def prepare_folders(config: TrainingConfig) -> None:
    """Create the folders of a run, and claim the names of its files there. Call in one process only.

    Raises:
        UsageError: if a folder cannot be written, or contains a file of the user's that the run would replace.
    """
    known, config_file = is_run(config.output_dir), config.output_dir / RUN_FILES[0]
    claim(prepare_folder("output_dir", config.output_dir), RUN_FILES, ours=known)
    if not known and config_file.exists():  # such as that of a saved model
        raise UsageError(
            f"{config_file} is damaged or does not belong to a run: move it away, or choose another --output_dir"
        )
    folder = prepare_folder("output_dir", config.checkpoints)
    claim(folder, [BEST], ours=any(map(is_artifact, folder.glob("step_*"))))
    for step in config.checkpoints.glob("step_" + "[0-9]" * 8):
        if not any((step / name).is_file() for name in (MANIFEST, "trainer.json")):
            owned_files(step, CHECKPOINT)


def lock_folder(config: TrainingConfig, held: ExitStack) -> None:
    """Create the folder of a run, and lock it until ``held`` closes.

    The operating system releases the lock when the process ends, even if it is killed.

    Raises:
        UsageError: if the folder cannot be written, or another run holds it.
    """
    prepare_folders(config)
    folder, status = config.output_dir, read_status(config.output_dir)
    writer = "another process" if status is None else f"process {status.pid} on {status.host}"
    lock, busy = folder / LOCK_FILE, f"{writer} is training in --output_dir {folder}"
    try:
        held.enter_context(locked(lock, busy, 0))
    except BusyError:
        tqdm.write(f"waiting for another run to release {folder}")
        held.enter_context(locked(lock, busy, LOCK_TIMEOUT))
