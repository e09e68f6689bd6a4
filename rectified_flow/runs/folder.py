"""A run's folder: its ``config.json`` and ``status.json``, and the locks by which one run at a time writes in it.

``config.json`` has the parts that a run was made of, and the flags that start it again.
"""

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rectified_flow.data.framing import Crop
from rectified_flow.errors import BusyError, UsageError, first_line
from rectified_flow.flags import plain
from rectified_flow.registry import describe
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.artifact import MANIFEST
from rectified_flow.system.files import (
    LOCK_TIMEOUT,
    check_document,
    locked,
    prepare_folder,
    read_document,
    replace_file,
)
from rectified_flow.system.outputs import claim

if TYPE_CHECKING:  # the command line reads these files before torch is imported
    from torch import nn
    from torch.utils.data import Dataset

RunState = Literal["running", "finished", "interrupted", "failed"]
LOCK_FILE, STATUS_FILE, BEST = ".lock", "status.json", "best"
RUN_FILES = ("config.json", STATUS_FILE, "loss.png", "samples")
"""Files and folders that every run writes in its output folder, beside its logs."""


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a ``config.json``."""

    run: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] | None = None
    flow: dict[str, Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataArguments:
    """The arguments of :func:`rectified_flow.open_dataset` that open a run's data again."""

    dataset: str
    dataset_path: Path | None = None
    image_size: Annotated[int, Field(gt=0)] | None = None
    split: str | None = None
    cache_dir: Path | None = None
    skip_broken_images: bool = False
    aspect_ratio: str = "1:1"
    crop: Crop = "center"
    alpha: bool = False


def describe_run(
    config: TrainingConfig,
    flow: "nn.Module",
    dataset: "Dataset[Any]",
    flags: Mapping[str, Any] | None = None,
    unused: Collection[str] = (),
) -> dict[str, Any]:
    """Return the contents of the ``config.json`` of a run.

    Args:
        config: the run's flags.
        flow: the flow with its network.
        dataset: the data. Its attribute ``arguments`` has the arguments of :func:`rectified_flow.open_dataset`, and
            ``description`` a line for the user.
        flags: all flags of the program that built these parts, if a program did.
        unused: flags of the run that have no effect, because the trainer was given a part in their place.
    """
    network = getattr(flow, "network", None)
    document = {
        "run": {name: value for name, value in plain(config).items() if name not in unused},
        "data": getattr(dataset, "arguments", None) or {"description": data_description(dataset)},
        "network": None if network is None else _described(network),
        "flow": {name: value for name, value in _described(flow).items() if name != "network"},
    }
    return document if flags is None else document | {"flags": dict(flags)}


def data_description(dataset: "Dataset[Any]") -> str:
    """Describe a dataset in a line for the user."""
    own = getattr(dataset, "description", None)
    return str(own) if own else f"{len(dataset)} items of a {type(dataset).__name__}"  # type: ignore[arg-type]


def read_config(path: Path) -> dict[str, Any]:
    """Read the ``config.json`` at ``path``.

    Raises:
        UsageError: if it cannot be read or is damaged.
    """
    document = read_document(path, dict[str, Any])
    check_document(document, ConfigFile, path)
    return document


def program_flags(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags by name in a ``config.json``: those of the program that started the run, or of the run alone."""
    return dict(document.get("run", {})) | dict(document.get("flags", {}))


def data_arguments(document: Mapping[str, Any], path: Path) -> DataArguments | None:
    """Return the arguments that open a run's data again, or None if its ``config.json`` has none.

    Args:
        document: the contents of the ``config.json``.
        path: the file, for the error message.

    Raises:
        UsageError: if the arguments are damaged.
    """
    data = document.get("data", {})
    known = {each.name: data[each.name] for each in fields(DataArguments) if each.name in data}
    return check_document(known, DataArguments, path) if "dataset" in data else None


def _described(part: "nn.Module") -> dict[str, Any]:
    try:
        return describe(part)
    except UsageError:
        return {"description": type(part).__name__}


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
    def writer(self) -> str:
        """The process that wrote the status, in words."""
        known = self.read()
        return "another process" if known is None else f"process {known.pid} on {known.host}"

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
            with suppress(OSError):  # overwrite the old file, which needs no more space
                self.path.write_text(text)

    def write_failure(self, error: BaseException, step: int, total_steps: int) -> None:
        """Write the cause of an early end, unless another rank has written one. The first failure causes the others."""
        known = self.read()
        if known is None or known.state not in ("failed", "finished"):
            state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.write(state, step, total_steps, first_line(error))


def prepare_folders(config: TrainingConfig) -> None:
    """Make the folders of a run, and claim the names of its files there. Call in one process only.

    Raises:
        UsageError: if a folder cannot be written, or holds a file of the user's that the run would replace.
    """
    for flag, folder in config.folders.items():
        prepare_folder(flag, folder)
    is_run = False
    with suppress(UsageError):
        is_run = bool(read_config(config.output_dir / RUN_FILES[0]))
    claim(config.output_dir, RUN_FILES, ours=is_run)
    claim(config.checkpoints, [BEST], ours=is_run or any(config.checkpoints.glob(f"step_*/{MANIFEST}")))
    for step in config.checkpoints.glob("step_" + "[0-9]" * 8):
        if not (step / MANIFEST).is_file():
            raise UsageError(f"{step} has the name of a checkpoint and is none: move it away, or choose another folder")


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
    prepare_folders(config)
    with ExitStack() as locks:
        for flag, folder in config.folders.items():
            if flag == "checkpoint_dir" and folder.resolve() == config.output_dir.resolve():
                continue
            lock, busy = folder / LOCK_FILE, f"{StatusFile(folder).writer} is training in --{flag} {folder}"
            try:
                locks.enter_context(locked(lock, busy, 0, report))
            except BusyError:
                report(f"waiting for another run to release {folder}")
                locks.enter_context(locked(lock, busy, LOCK_TIMEOUT, report))
        yield
