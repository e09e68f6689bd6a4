"""A run's folder: its ``config.json``, ``status.json`` and lock, and the choice of the checkpoint to resume from.

``config.json`` has the parts that a run was made of, and the flags that start it again.

A resumed run comes to the same weights as one that was never stopped, to the last bit, if nothing that shapes it has
changed. Random draws and the order of the data are functions of the seed and the step, so a checkpoint has no random
state. A changed dataset, flow or origin would mix two runs in one folder and is refused. Another seed, global batch
size, precision or learning rate makes the rest of the run different but sensible, so it is reported.
"""

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from accelerate import Accelerator
from pydantic import Field
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from rectified_flow.errors import BusyError, DamageError, UsageError, first_line
from rectified_flow.flags import flags_in, plain, recorded, rules_of
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import BEST, FLOW_FILE, RunIdentity
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.artifact import CHECKPOINT, MANIFEST, Natural, is_artifact, owned_files
from rectified_flow.system.files import LOCK_TIMEOUT, locked, prepare_folder, read_document, replace_file, writing
from rectified_flow.system.outputs import claim

RunState = Literal["running", "finished", "interrupted", "failed"]
LOCK_FILE, STATUS_FILE = ".lock", "status.json"
RUN_FILES = ("config.json", STATUS_FILE, "loss.png", "samples")
"""Files and folders that every run writes into its output folder, in addition to its logs."""


def describe_run(
    config: TrainingConfig,
    flow: Mapping[str, Any],
    dataset: Dataset[Any],
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
    }


def write_config(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the ``config.json`` of the run in ``folder``.

    Raises:
        RunError: if the disk is full.
    """
    path = folder / RUN_FILES[0]
    with writing(path):
        replace_file(path, json.dumps(document, indent=1))


def data_description(dataset: Dataset[Any]) -> str:
    """Describe a dataset in a line for the user."""
    own = getattr(dataset, "description", None)
    return str(own) if own else f"{len(dataset)} items of a {type(dataset).__name__}"  # type: ignore[arg-type]


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a ``config.json``: three blocks, and the entries of earlier versions."""

    data: dict[str, Any] = field(default_factory=dict)
    flow: dict[str, Any] | None = None
    training: dict[str, Any] = field(default_factory=dict)
    items: dict[str, Natural] = field(default_factory=dict)
    """Numbers of items of the data, in runs of earlier versions."""
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
        raise UsageError(f"{config_file} is damaged or does not belong to a run: choose another --output_dir")
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


MAY_CHANGE = (
    *("condition_dropout", "space.horizontal_flip", "space.augmentation"),
    *("space.autoencoder.source", "space.mean", "space.std", "space.show"),
)
"""Parts of a flow that may differ when a run resumes; any other makes it another run."""


def precision_name(accelerator: Accelerator) -> str:
    """Return the precision of a run in words."""
    return {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)


def identify_run(config: TrainingConfig, dataset: str, global_batch: int, precision: str) -> RunIdentity:
    """Return the identity of a run that begins now on the dataset with this fingerprint."""
    origin = "new" if config.origin is None else str(config.origin.resolve())
    return RunIdentity(dataset, config.seed, global_batch, origin, precision)


def check_start(config: TrainingConfig, origin: Path | None = None, *, writes: bool = True) -> None:
    """Check, before the data take hours to prepare, that the run may start whatever the data are.

    Args:
        config: the run's flags.
        origin: a checkpoint whose weights the run starts with, if there is one.
        writes: create the run's folders.

    Raises:
        UsageError: if the run's folders cannot be written, ``--resume never`` finds checkpoints, or ``origin`` or the
            path of ``--resume`` does not exist.
    """
    if writes:
        prepare_folders(config)
    if not _own_checkpoints(config):
        for path in filter(None, (origin, config.origin)):
            checkpoint.resolve(path, names=())


def choose_checkpoint(
    config: TrainingConfig, run: RunIdentity, flow: Mapping[str, Any] | None
) -> tuple[Path | None, RunIdentity]:
    """Choose the checkpoint to load, and report each change since it was written.

    Args:
        config: the run's flags.
        run: the identity of a run that begins now.
        flow: the description of the flow to train, if it has one.

    Returns:
        The checkpoint, or None for a fresh start; and the identity of the run, which keeps its origin.

    Raises:
        UsageError: if resuming would mix two runs, or the path of ``--resume`` does not exist.
    """
    _own_checkpoints(config)
    own = checkpoint.newest_checkpoint(config.checkpoints)
    if own is None:
        if config.origin is None:
            return None, run
        named = checkpoint.resolve(config.origin, names=None)
        for change in _flow_changes(flow, named).values():
            tqdm.write(f"note: {change}")
        return named, run
    before = checkpoint.load_state(own).run
    places = (own, config.checkpoints, config.output_dir)
    if run.origin not in {"new", before.origin, *(str(place.resolve()) for place in places)}:
        begun = f"{config.checkpoints} has newer checkpoints than {config.resume}, or those of a run with another start"
        raise UsageError(f"{begun}: choose another --output_dir")
    if run.dataset != before.dataset:
        raise UsageError(f"{own} was trained on other data or at another size: choose another --output_dir")
    for name in ("seed", "global_batch", "precision"):
        then, now = getattr(before, name), getattr(run, name)
        if then != now:
            tqdm.write(f"warning: the {name.replace('_', ' ')} was {then} and is now {now}: the run changes")
    changes = _flow_changes(flow, own)
    for name, change in changes.items():
        if name not in MAY_CHANGE:
            raise UsageError(f"cannot resume from {own}: {change}; pass its flags, or choose another --output_dir")
    for change in (changes | _flag_changes(config, own)).values():
        tqdm.write(f"note: {change}")
    return own, replace(run, origin=before.origin)


def _own_checkpoints(config: TrainingConfig) -> list[Path]:
    """Return the checkpoints in the run's folder, of which ``--resume never`` allows none."""
    found = checkpoint.list_checkpoints(config.checkpoints)
    if found and config.resume == "never":
        raise UsageError(f"{config.checkpoints} already holds checkpoints: pass --resume auto, or another --output_dir")
    return found


def _flow_changes(flow: Mapping[str, Any] | None, path: Path) -> dict[str, str]:
    """Compare the flow with that of a checkpoint, except for the network, which is compared with its weights."""
    if flow is None or not (path / FLOW_FILE).exists():
        return {}
    then = checkpoint.load_document(path, FLOW_FILE)
    return _changes(_compared_parts(then), _compared_parts(flow))


def _compared_parts(flow: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in flow.items() if name not in ("kind", "network")}
    values = flat({"flow": flow.get("kind"), **parts})
    values.pop("space.shape", None)  # learned from the data
    return values


def _flag_changes(config: TrainingConfig, path: Path) -> dict[str, str]:
    """Compare the flags that shape the training with those of a checkpoint."""
    known, given = flags_in(read_config(path / checkpoint.CONFIG_FILE)), plain(config)
    names = [name for name, rule in rules_of(TrainingConfig).items() if rule.shapes_training and name in known]
    return _changes({name: known[name] for name in names}, {name: given[name] for name in names})


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return a description of each changed value. An option that an older version lacked counts as off."""
    return {
        name: f"{name} was {then.get(name)} and is now {now.get(name)}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name) and (then.get(name) or now.get(name))
    }


def flat(description: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested description by dotted name."""
    values: dict[str, Any] = {}
    for name, value in description.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values
