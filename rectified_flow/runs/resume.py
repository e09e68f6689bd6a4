"""The checkpoint that a run resumes from, and the checks that it is still the same run.

A resumed run comes to the same weights as one that was never stopped, to the last bit, if nothing that shapes it has
changed. Random draws and the order of the data are functions of the seed and the step, so a checkpoint has no random
state. A changed dataset, flow or origin would mix two runs in one folder and is refused. Another seed, global batch
size, precision or learning rate makes the rest of the run different but sensible, so it is reported.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rectified_flow.errors import UsageError, require
from rectified_flow.flags import plain
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE, RunIdentity
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import program_flags, read_config
from rectified_flow.system.files import prepare_folder

MAY_CHANGE = (
    *("condition_dropout", "space.horizontal_flip", "space.augmentation"),
    *("space.autoencoder.source", "space.mean", "space.std"),
)
"""Parts of a flow that may differ when a run resumes; any other makes it another run."""
SHAPING = (
    *("learning_rate", "lr_warmup_steps", "lr_decay", "adam_betas", "weight_decay", "max_grad_norm"),
    *("use_ema", "ema_decay", "power_ema", "compile", "optimizer_options"),
)
"""Flags of a run that shape the training and may differ when it resumes."""


def precision_name(accelerator: Accelerator) -> str:
    """Return the precision of a run in words."""
    return {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)


def identify_run(config: TrainingConfig, dataset: str, global_batch: int, precision: str) -> RunIdentity:
    """Return the identity of a run that begins now on the dataset with this fingerprint."""
    origin = "new" if config.origin is None else str(config.origin.resolve())
    return RunIdentity(dataset, config.seed, global_batch, origin, precision)


def check_start(config: TrainingConfig, origin: Path | None = None) -> None:
    """Check, before the data take hours to prepare, that the run may start whatever the data are.

    Args:
        config: the run's flags.
        origin: a checkpoint whose weights the run starts with, if there is one.

    Raises:
        UsageError: if the run's folders cannot be written, ``--resume never`` finds checkpoints, or ``origin`` or the
            path of ``--resume`` does not exist.
    """
    for flag, folder in config.folders.items():
        prepare_folder(flag, folder)
    if not _own_checkpoints(config):
        for path in filter(None, (origin, config.origin)):
            checkpoint.resolve(path, warn=lambda _line: None, names=())


def choose_checkpoint(
    config: TrainingConfig, run: RunIdentity, flow: Mapping[str, Any] | None, report: Callable[[str], object]
) -> tuple[Path | None, RunIdentity]:
    """Choose the checkpoint to load.

    Args:
        config: the run's flags.
        run: the identity of a run that begins now.
        flow: the description of the flow to train, if it has one.
        report: called with a sentence on each change since the checkpoint.

    Returns:
        The checkpoint, or None for a fresh start; and the identity of the run, which keeps its origin.

    Raises:
        UsageError: if resuming would mix two runs, or the path of ``--resume`` does not exist.
    """
    _own_checkpoints(config)
    own = checkpoint.newest_checkpoint(config.checkpoints, warn=report)
    if own is None:
        if config.origin is None:
            return None, run
        named = checkpoint.resolve(config.origin, warn=report, names=None)
        _compare_flows(flow, named, report, refuse=False)
        return named, run
    before = checkpoint.load_state(own).run
    places = (own, config.checkpoints, config.output_dir)
    require(
        run.origin in {"new", before.origin, *(str(place.resolve()) for place in places)},
        f"{config.checkpoints} holds checkpoints of a run that did not start from {config.resume}, or newer ones: "
        "choose another --output_dir to start from there",
    )
    require(
        run.dataset == before.dataset,
        f"checkpoint {own} was trained on other data or at another size: choose another --output_dir; "
        f"with --resume {own} there, training starts from its weights",
    )
    _compare_flows(flow, own, report, refuse=True)
    for name in ("seed", "global_batch", "precision"):
        then, now = getattr(before, name), getattr(run, name)
        if then != now:
            report(f"warning: the {name.replace('_', ' ')} was {then} and is now {now}: the run changes")
    flags_then, flags_now = program_flags(read_config(own / checkpoint.CONFIG_FILE)), plain(config)
    optimizer = flags_then.get("optimizer", config.optimizer)
    require(
        optimizer == config.optimizer,
        f"checkpoint {own} was trained with --optimizer {optimizer}: pass that, or choose another --output_dir",
    )
    for name in SHAPING:
        if name in flags_then and flags_then[name] != flags_now[name]:
            report(f"note: {name} was {flags_then[name]} and is now {flags_now[name]}")
    return own, replace(run, origin=before.origin)


def _own_checkpoints(config: TrainingConfig) -> list[Path]:
    """Return the checkpoints in the run's folder, of which ``--resume never`` allows none."""
    found = checkpoint.list_checkpoints(config.checkpoints)
    require(
        config.resume != "never" or not found,
        f"{config.checkpoints} already holds checkpoints: pass --resume auto to resume, or another --output_dir",
    )
    return found


def _compare_flows(
    flow: Mapping[str, Any] | None, path: Path, report: Callable[[str], object], *, refuse: bool
) -> None:
    """Compare the flow with the one of a checkpoint, except for the network, which is compared with its weights.

    Raises:
        UsageError: if the flows differ in a part that may not change, and ``refuse`` is given.
    """
    if flow is None or not (path / FLOW_FILE).exists():
        return
    then, now = (flat(each) for each in (checkpoint.load_document(path, FLOW_FILE), flow))
    for name in dict.fromkeys([*then, *now]):
        absent = not then.get(name) and not now.get(name)  # an older version lacked the option, so it was off
        if then.get(name) == now.get(name) or absent or name == "space.shape" or name.startswith("network."):
            continue
        called = {"kind": "flow"}.get(name, name)
        if refuse and name not in MAY_CHANGE:
            raise UsageError(
                f"checkpoint {path} was trained with {called} {then.get(name)}, and this run has {called} "
                f"{now.get(name)}: choose another --output_dir, or pass the flags of its config.json"
            )
        report(f"note: {called} was {then.get(name)} and is now {now.get(name)}")


def flat(description: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested description by dotted name."""
    values: dict[str, Any] = {}
    for name, value in description.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values
