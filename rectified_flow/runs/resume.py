"""Where a run resumes, and whether it is still the same run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator

from rectified_flow.data.fingerprint import length_only
from rectified_flow.errors import UsageError
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig


@dataclass(frozen=True)
class RunIdentity:
    """What makes two runs the same run; part of every checkpoint."""

    dataset: str
    """Fingerprint of the dataset."""
    seed: int
    global_batch: int
    origin: str
    """The checkpoint or run that ``--resume`` named when the run began, or "new"."""
    precision: str = ""
    """Of the forward pass; "" in checkpoints that do not record it."""


def precision_name(accelerator: Accelerator) -> str:
    """The precision of a run, in words."""
    return {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)


def identify_run(config: TrainingConfig, dataset: str, global_batch: int, precision: str) -> RunIdentity:
    """The identity of a run that begins now."""
    named = config.resume not in ("auto", "never")
    origin = str(Path(config.resume).resolve()) if named else "new"
    return RunIdentity(dataset, config.seed, global_batch, origin, precision)


def choose_checkpoint(
    config: TrainingConfig, run: RunIdentity, length: int, report: Callable[[str], object]
) -> tuple[Path | None, RunIdentity]:
    """The checkpoint to load, if any, and the run's identity, which keeps its origin.

    Args:
        config: the run's flags.
        run: the identity of a run that begins now.
        length: of the dataset.
        report: called with each warning.

    Raises:
        UsageError: if resuming would mix two runs, or the path of ``--resume`` does not exist.
    """
    folder = config.checkpoints
    if config.resume == "never":
        if checkpoint.list_checkpoints(folder):
            raise UsageError(
                f"{folder} already holds checkpoints: pass --resume auto to resume, or another --output_dir"
            )
        return None, run
    own = checkpoint.newest_checkpoint(folder, warn=report)
    if own is None:
        return None if config.resume == "auto" else checkpoint.resolve(Path(config.resume), warn=report), run
    before = RunIdentity(**checkpoint.load_document(own, checkpoint.STATE_FILE)["run"])
    _check_same_run(config, run, before, own, length)
    for name in ("seed", "global_batch", "precision"):
        then, now = getattr(before, name), getattr(run, name)
        if then not in (now, ""):
            report(f"warning: the {name.replace('_', ' ')} was {then} and is now {now}: the run changes")
    return own, replace(run, origin=before.origin)


def _check_same_run(config: TrainingConfig, run: RunIdentity, before: RunIdentity, own: Path, length: int) -> None:
    folder = config.checkpoints
    ourselves = {str(place.resolve()) for place in (own, folder, config.output_dir)}
    if run.origin != "new" and run.origin not in ourselves | {before.origin}:
        raise UsageError(
            f"{folder} holds checkpoints of a run that did not start from {config.resume}, or newer ones: choose "
            "another --output_dir to start from there"
        )
    if before.dataset not in (run.dataset, length_only(length)):
        raise UsageError(
            f"checkpoint {own} was trained on other data or at another size: choose another --output_dir; "
            f"with --resume {own} there, training starts from its weights"
        )
