"""The checkpoint that a run resumes from, and the checks that it is still the same run.

A resumed run comes to the same weights as one that was never stopped, to the last bit, if nothing that shapes it has
changed. Random draws and the order of the data are functions of the seed and the step, so a checkpoint has no random
state. A changed dataset, flow or origin would mix two runs in one folder and is refused. Another seed, global batch
size, precision or learning rate makes the rest of the run different but sensible, so it is reported.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from rectified_flow.errors import UsageError
from rectified_flow.flags import flags_in, plain, rules_of
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE, RunIdentity
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import prepare_folders, read_config

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
        raise UsageError(
            f"{config.checkpoints} has checkpoints of a run that did not start from {config.resume}, or newer ones: "
            "choose another --output_dir"
        )
    if run.dataset != before.dataset:
        raise UsageError(
            f"{own} was trained on other data or at another size: choose another --output_dir "
            f"(and --resume {own} to start from its weights)"
        )
    for name in ("seed", "global_batch", "precision"):
        then, now = getattr(before, name), getattr(run, name)
        if then != now:
            tqdm.write(f"warning: the {name.replace('_', ' ')} was {then} and is now {now}: the run changes")
    for name, change in (_flow_changes(flow, own) | _flag_changes(config, own)).items():
        if name not in MAY_CHANGE and not shapes_training(name):
            raise UsageError(f"cannot resume from {own}: {change}; pass its flags, or choose another --output_dir")
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
    then = {name: known[name] for name in given if name in known and shapes_training(name)}
    return _changes(then, {name: given[name] for name in then})


def shapes_training(name: str) -> bool:
    """Return whether a flag of a run may change when the run resumes, and then trains differently."""
    rule = rules_of(TrainingConfig).get(name)
    return rule is not None and rule.shapes_training


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
