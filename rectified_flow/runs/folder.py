"""A run's folder: its ``config.json``, ``status.json`` and lock, and the choice of the checkpoint to resume from.

``config.json`` has the parts that a run was made of, and the flags that start it again.

A resumed run comes to the same weights as one that was never stopped, to the last bit, if nothing that shapes it has
changed. Random draws and the order of the data are functions of the seed and the step, so a checkpoint has no random
state. A changed dataset or flow would mix two runs in one folder and is refused. Another seed, global batch
size, precision or learning rate makes the rest of the run different but sensible, so it is reported.
"""

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from os.path import lexists
from pathlib import Path
from typing import Literal

from accelerate import Accelerator
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from rectified_flow.data.degraded import Degraded
from rectified_flow.data.description import PictureData
from rectified_flow.data.open import Pictures
from rectified_flow.errors import DamageError, UsageError, first_line
from rectified_flow.flags import plain, recorded, rules_of
from rectified_flow.registry import Document, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import BEST, CONFIG_FILE, FLOW_FILE, OUTPUTS_FILE, RunIdentity
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.artifact import (
    CHECKPOINT,
    FileName,
    check_claim,
    claim,
    claimed_names,
    find_damage,
    owned_files,
    read_manifest,
)
from rectified_flow.system.files import (
    LOCK_TIMEOUT,
    check_folder,
    hash_file,
    locked,
    prepare_folder,
    read_bytes,
    read_document,
    replace_file,
    writing,
)

Block = Mapping[str, object] | None
"""A block of ``config.json``, if the caller knows it."""
RunState = Literal["running", "finished", "interrupted", "failed"]
STATUS_FILE, SAMPLES, LOCK = "status.json", "samples", "run"
LOGS = ("metrics.jsonl", "metrics.old.jsonl", "bad_steps.jsonl", "bad_steps.old.jsonl")
DATA_SHEET = "data.png"
CLOCK_FILE = "clock.json"
OWNER = "run"  # file in the folder of ``checkpoint_dir`` that contains the folder of the run
RUN_FILES = (CONFIG_FILE, STATUS_FILE, CLOCK_FILE, DATA_SHEET, "loss.png", SAMPLES, *LOGS)
"""Files and folders that every run writes into its output folder."""


def describe_run(
    config: TrainingConfig,
    flow: Mapping[str, object],
    dataset: Dataset[object],
    data: Block = None,
    flags: Block = None,
) -> Document:
    """Return the contents of the ``config.json`` of a run: the data and the flow, from which both are built, and flags.

    The block ``training`` has all flags that start the run again, those that name the data and the flow among them.
    """
    described = getattr(dataset, "described", None)
    if isinstance(dataset, Degraded) and isinstance(described, Pictures):
        described = PictureData(described, degradation=dataset.degradation, seed=dataset.seed_of_draws)
    data = data or ({"description": data_description(dataset)} if described is None else describe(described))
    return {"data": dict(data), "flow": dict(flow), "training": recorded(config) | dict(flags or {})}


def write_config(folder: Path, document: Mapping[str, object]) -> None:
    """Write the ``config.json`` of the run in ``folder``, whose name is claimed."""
    with writing(folder / CONFIG_FILE):
        replace_file(folder / CONFIG_FILE, json.dumps(document, indent=1))


def data_description(dataset: Dataset[object]) -> str:
    """Describe a dataset in a line for the user."""
    own = getattr(dataset, "description", None)
    return str(own) if own else f"{len(dataset)} items of a {type(dataset).__name__}"  # type: ignore[arg-type]


def read_config(path: Path) -> dict[str, Document]:
    """Read the ``config.json`` at ``path``."""
    blocks = read_document(path, dict[str, Document | None])
    document = {name: block for name, block in blocks.items() if block}
    if "training" not in document:
        raise DamageError(f"{path} is not the config.json of a run")
    return document


def read_status(folder: Path) -> Document:
    """Return the status of the run in ``folder``, which is empty if it is missing or damaged."""
    with suppress(UsageError):
        return read_document(folder / STATUS_FILE, Document)
    return {}


def write_status(
    folder: Path, state: RunState, step: int, total_steps: int, message: str = "", *, times: Block = None
) -> str:
    """Write the status of the run in ``folder``, unless the disk is full, and return the run's name in trackers.

    Args:
        folder: the folder of the run.
        state: the state of the run.
        step: number of steps that are done.
        total_steps: number of steps of the whole run.
        message: the cause of a failure.
        times: the result of :func:`times_of`, during training. The file is then written without fsync.
    """
    before = read_status(folder)
    status: Document = {"state": state, "step": step, "total_steps": total_steps, "message": message}
    status |= {"time": _time_text(0), "host": platform.node(), "pid": os.getpid(), "folder": str(folder.resolve())}
    status["id"] = _kept_id(before, status["folder"]) or uuid.uuid4().hex[:12]
    goes_on = state == "running" and before.get("pid") == status["pid"]
    kept = ("step_time", "ends") if goes_on else ("step_time",)
    status |= times or {name: before.get(name) for name in kept}
    text = json.dumps(status, indent=1)
    try:
        replace_file(folder / STATUS_FILE, text, durable=times is None)
    except OSError:
        with suppress(OSError):  # overwriting the old file needs no more space
            (folder / STATUS_FILE).write_text(text)
    return str(status["id"])


def _kept_id(before: Mapping[str, object], folder: str) -> str | None:
    """Return the name in trackers of a run that was stopped or moved; None if the run is new, or a copy."""
    name, recorded = before.get("id"), before.get("folder", folder)
    is_copy = isinstance(recorded, str) and not _is_same(recorded, folder)
    is_copy = is_copy and read_status(Path(str(recorded))).get("id") == name
    return name if isinstance(name, str) and not is_copy else None


def _is_same(one: str | Path, other: str | Path) -> bool:
    """Return whether two paths name one folder, which may be mounted twice."""
    with suppress(OSError):
        return os.path.samefile(one, other)
    return Path(one) == Path(other)


def times_of(step_time: float, left: float) -> Document:
    """Return the times in a status: the time per step [s], and the expected end of the run.

    Args:
        step_time: time of a step, without previews and checkpoints [s].
        left: time until the end of the run [s].
    """
    return {"step_time": round(step_time, 5), "ends": _time_text(left)}


def _time_text(ahead: float) -> str:
    """Return the time that is ``ahead`` seconds from now, by ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() + ahead))


def write_failure(folder: Path, error: BaseException, step: int, total_steps: int) -> None:
    """Write the cause of a failure, unless another rank has written one, since the first failure causes the others."""
    if read_status(folder).get("state") not in ("failed", "finished"):
        state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        write_status(folder, state, step, total_steps, first_line(error))


def is_run(folder: Path) -> bool:
    """Return whether ``folder`` has the ``config.json`` of a run."""
    with suppress(UsageError):
        return bool(read_config(folder / CONFIG_FILE))
    return False


def prepare_folders(config: TrainingConfig, *, writes: bool = True) -> None:
    """Create the folders of a run, and claim the names of its files there. Call in one process only.

    Args:
        config: the flags of the run.
        writes: otherwise, nothing is created, and only the errors are raised.
    """
    make, hold = (prepare_folder, claim) if writes else (check_folder, check_claim)
    folder = make("output_dir", config.output_dir)
    found = proven_names(folder, config.checkpoints)
    proven = [] if CONFIG_FILE in claimed_names(folder) else found
    hold(folder, proven or RUN_FILES, proven=bool(proven))
    if not is_run(folder) and (folder / CONFIG_FILE).exists():  # such as that of a saved model
        may_remove = CONFIG_FILE in claimed_names(folder) and checkpoint.list_checkpoints(config.checkpoints)
        remedy = "remove it to resume from the checkpoints, or choose" if may_remove else "choose"
        problem = f"{folder / CONFIG_FILE} is damaged or does not belong to a run"
        raise UsageError(f"{problem}: {remedy} another `output_dir`")
    folder = make("checkpoint_dir" if config.checkpoint_dir else "output_dir", config.checkpoints)
    is_own = bool(found) or checkpoint.best_of(folder) is not None
    hold(folder, [BEST, OWNER] if config.checkpoint_dir else [BEST], proven=is_own)
    for step in folder.glob("step_" + "[0-9]" * 8):
        if not checkpoint.is_checkpoint(step):
            owned_files(step, CHECKPOINT)


def proven_names(folder: Path, checkpoints: Path) -> list[str]:
    """Return the names of the files of a run without its manifest, as after ``cp -r RUN/* COPY``; none without proof.

    The proof is a checkpoint in ``checkpoints`` that was saved with exactly the ``config.json`` in ``folder``.
    """
    with suppress(DamageError):
        digest, names = hash_file(folder / CONFIG_FILE), {CONFIG_FILE, OUTPUTS_FILE}
        for path in reversed(checkpoint.list_checkpoints(checkpoints)):
            if find_damage(path, names=names) is None:
                saved = read_manifest(path).files.get(CONFIG_FILE)
                if saved is not None and saved.sha256 == digest:
                    return [*RUN_FILES, *read_document(path / OUTPUTS_FILE, list[FileName])]
    return []


def lock_folder(config: TrainingConfig, held: ExitStack) -> None:
    """Create the folders of a run, and lock them until ``held`` closes."""
    prepare_folders(config)
    held.enter_context(_locked_run(config.output_dir))
    folder, place = config.output_dir, config.checkpoint_dir
    if place is not None and place.resolve() != folder.resolve():  # another run may save there, too
        busy = f"another run saves into `checkpoint_dir` {place}"
        held.enter_context(locked(place, LOCK, busy, LOCK_TIMEOUT))
        check_owner(config)
        replace_file(place / OWNER, f"{folder.resolve()}\n")


def lock_of(folder: Path) -> tuple[int, int] | None:
    """Return the device and the inode of the lock file of a run; None if there is none.

    Raises:
        OSError: if that cannot be found out, for example as a network disk does not answer.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(folder / f".{LOCK}.lock")
        return found.st_dev, found.st_ino
    return None


def lock_again(folder: Path, document: Mapping[str, object], held: ExitStack) -> None:
    """Create and lock the folder of a run after it was moved or deleted, and write its ``config.json``.

    Raises:
        BusyError: if another run has locked the new folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"`output_dir` {folder} was moved or deleted, and another run trains in its place"
    held.enter_context(locked(folder, LOCK, busy, 0))
    write_config(folder, document)


def wait_for_end(folder: Path) -> None:
    """Wait until no other process trains in the folder of a run; a UsageError if it takes too long."""
    if lexists(folder / f".{LOCK}.lock"):
        with _locked_run(folder):
            pass


def _locked_run(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock of the run in ``folder`` inside a block."""
    status = read_status(folder)
    busy = f"process {status.get('pid')} on {status.get('host')} is training in `output_dir` {folder}"
    return locked(folder, LOCK, busy, LOCK_TIMEOUT)


def check_owner(config: TrainingConfig) -> None:
    """Raise a UsageError if another run has saved checkpoints into the ``checkpoint_dir``.

    The folder of that run may have been moved since, and the checkpoints may have been copied.
    """
    place = config.checkpoints
    if config.checkpoint_dir is None or not checkpoint.list_checkpoints(place):
        return
    with suppress(DamageError):
        owner = Path(read_bytes(place / OWNER).decode(errors="replace").strip())
        saves_here = owner.is_absolute() and is_run(owner) and _is_same(checkpoint.place_of(owner), place)
        if saves_here and not _is_same(owner, config.output_dir):
            raise UsageError(f"`checkpoint_dir` {place} has the checkpoints of {owner}: choose another")


MAY_CHANGE = (
    *("condition_dropout", "guided_data", "space.horizontal_flip", "space.augmentation"),
    *("space.autoencoder.source", "space.mean", "space.std", "space.show", "network.source", "network.dropout"),
)
"""Parts of a flow that may differ when a run resumes; any other makes it another run."""


def precision_name(accelerator: Accelerator) -> str:
    """Return the precision of a run in words."""
    return {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)


def check_place(config: TrainingConfig) -> None:
    """Raise a UsageError if the checkpoints of the run in ``output_dir`` are not in ``checkpoint_dir``."""
    place = checkpoint.place_of(config.output_dir)
    if checkpoint.list_checkpoints(place) and not checkpoint.list_checkpoints(config.checkpoints):
        remedy = f"pass `checkpoint_dir` {place}, or move them"
        raise UsageError(f"the checkpoints of {config.output_dir} are in {place}: {remedy}")


def check_start(config: TrainingConfig, origin: Path | None = None, *, writes: bool = True) -> None:
    """Check, before the data take hours to prepare, that the run may start whatever the data are.

    A start that fails before its first step leaves no folder behind.
    """
    if writes:
        prepare_folders(config, writes=False)
    found = checkpoint.list_checkpoints(config.checkpoints)
    if found and config.resume == "never":
        raise UsageError(f"{config.checkpoints} already holds checkpoints: pass `resume` auto, or another `output_dir`")
    check_place(config)
    check_owner(config)
    if not found and origin is not None:
        checkpoint.resolve(origin, names=())


def choose_checkpoint(config: TrainingConfig, run: RunIdentity, flow: Block) -> Path | None:
    """Return the checkpoint to resume from, and report each change since it was written; None for a fresh start."""
    check_start(config, writes=False)
    path = checkpoint.newest_checkpoint(config.checkpoints)
    if path is None:
        return None
    before = checkpoint.load_state(path).run
    if run.dataset != before.dataset:
        raise UsageError(
            f"{path} was trained on other data, at another size or with another `holdout` (files that a .manifest.json"
            " names are left out, remove it to read them): choose another `output_dir`"
        )
    for name in ("seed", "global_batch", "precision"):
        then, now = getattr(before, name), getattr(run, name)
        if then != now:
            tqdm.write(f"warning: the {name.replace('_', ' ')} was {then} and is now {now}: the run changes")
    for name, change in _changes(config, flow, path).items():
        if name not in (*MAY_CHANGE, *rules_of(TrainingConfig)):
            raise UsageError(f"cannot resume from {path}: {change}; pass its flags, or choose another `output_dir`")
        tqdm.write(f"note: {change}")
    return path


def _changes(config: TrainingConfig, flow: Block, path: Path) -> dict[str, str]:
    """Describe what differs from the checkpoint: the flow, and the flags that shape the training.

    An option of the flow that an older version lacked counts as off. Arguments of the network that only one version
    has, and parts of the network, are compared by the weights alone.
    """
    known, given = read_config(path / checkpoint.CONFIG_FILE)["training"], plain(config)
    names = [name for name, rule in rules_of(TrainingConfig).items() if rule.shapes_training and name in known]
    then, now = ({name: flags[name] for name in names} for flags in (known, given))
    if flow is not None and (path / FLOW_FILE).exists():
        then, now = _parts_of(checkpoint.load_document(path, FLOW_FILE)) | then, _parts_of(flow) | now
    comparable = (then.keys() & now.keys()) | {name for name in (*then, *now) if not name.startswith("network.")}
    return {
        name: f"{name} was {then.get(name)} and is now {now.get(name)}"
        for name in dict.fromkeys([*then, *now])
        if name in comparable and then.get(name) != now.get(name) and (then.get(name) or now.get(name))
    }


def _parts_of(flow: Mapping[str, object]) -> dict[str, object]:
    """Return the compared values of a flow by dotted name. The shape is learned from the data."""
    return {"flow": flow.get("kind")} | {
        name: value
        for name, value in flat(flow).items()
        if name not in ("kind", "space.shape") and not (name.startswith("network.") and name.count(".") > 1)
    }


def flat(description: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the values of a nested description by dotted name."""
    values: dict[str, object] = {}
    for name, value in description.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values
