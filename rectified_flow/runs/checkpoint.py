"""Checkpoints: folders with the weights of a flow and everything that a run resumes from, whole or absent."""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Annotated

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_to_bytes
from torch import Tensor, nn
from tqdm.auto import tqdm

from rectified_flow.errors import DamageError, NewerError, UsageError, first_line
from rectified_flow.registry import Document
from rectified_flow.runs.training_config import CHECKPOINTS
from rectified_flow.system.artifact import (
    CHECKPOINT,
    MANIFEST,
    Artifact,
    Natural,
    find_damage,
    read_manifest,
    remove,
)
from rectified_flow.system.files import open_regular, read_bytes, read_document, reading, replace_file, usable_path
from rectified_flow.system.terminal import shown, warn_once

EARLY, LATEST_EARLY = 1 / 8, 1 / 4
"""Best and latest position of a run's early checkpoint, which is kept for autoguidance, as fractions of its steps."""
ByRank = Annotated[list[float], Field(min_length=1)]
Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class RunIdentity:
    """Properties that make two runs the same run; part of every checkpoint."""

    dataset: str
    """Fingerprint of the dataset."""
    seed: Natural
    global_batch: Natural
    precision: str
    """Precision of the forward pass."""
    origin: str = "new"
    """Always "new", except in runs of earlier versions."""


@dataclass
class Counters:
    """Counters of a training run."""

    step: Natural
    images_seen: Natural = 0
    updates: Natural = 0
    """Number of steps that changed the weights; the others were skipped."""
    bad_steps: Natural = 0
    """Number of steps that were skipped because a loss or gradient was not finite."""
    bad_in_a_row: Natural = 0
    """Number of consecutive steps that were skipped because a loss or gradient was not finite."""
    scaler_skips: Natural = 0
    """Number of steps that were skipped because the loss scale of fp16 was too large."""
    summands: Natural = 0
    """Number of steps that changed the weights since the last line of metrics."""


@dataclass(kw_only=True)
class TrainerFile(Counters):
    """The contents of ``trainer.json``: the state of a run after ``step`` steps, without its tensors."""

    run: RunIdentity
    items: Natural = 0
    """Number of items that the run trains on; 0 in runs of earlier versions."""
    sums: dict[str, ByRank] = field(default_factory=dict)
    """Sums of the values to log, by rank."""
    ema_step: Natural | None = None
    grad_scaler: dict[str, Natural | Scale] | None = None
    optimizer: str | None = None
    optimizer_numbers: dict[str, int | float] = field(default_factory=dict)


MODEL_FILE, EMA_FILE = "model.safetensors", "ema.safetensors"
CONFIG_FILE, FLOW_FILE, STATE_FILE = "config.json", "flow.json", "trainer.json"
OUTPUTS_FILE = "outputs.json"
"""Names of the files in the folder of the run, by which a copy of the run without its hidden manifest goes on."""
FLOW_FILES = (MODEL_FILE, EMA_FILE, CONFIG_FILE, FLOW_FILE, STATE_FILE)
"""Files that a trained flow is loaded from; resuming a run reads others, too."""
BEST = "best"  # file that contains the name of the best checkpoint
NAME = re.compile(r"step_([0-9]{8,})")

Tensors = Mapping[str, Mapping[str, Tensor]]


def step_name(step: int) -> str:
    """Return ``step_00000100``, for files and folders that sort by step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def save(folder: Path, step: int, tensors: Tensors, documents: Mapping[str, object], *, best: bool = False) -> Path:
    """Write a checkpoint, and return its folder.

    ``tensors`` maps file names to contiguous tensors that share no memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in (*folder.glob("step_*.building"), *folder.glob("step_*.removing")):  # by a killed run
        with suppress(OSError, UsageError):
            remove(abandoned, CHECKPOINT)
    artifact = Artifact(folder / step_name(step), CHECKPOINT, (*tensors, *documents))
    with artifact.building():
        for name, values in tensors.items():
            file = artifact.stage / name
            save_file(dict(values), file)  # creates a file that only its owner can read
            file.chmod(artifact.stage.stat().st_mode & 0o666)
        for name, document in documents.items():
            (artifact.stage / name).write_text(json.dumps(document, indent=1))
        artifact.seal()
        if best:  # before the checkpoint exists: a run that is killed in between resumes earlier and comes here again
            mark_best(artifact.path)
        artifact.publish()
    return artifact.path


def prune(newest: Path, keep: int, total_steps: int | None = None) -> None:
    """Remove all checkpoints but the ``keep`` newest (0 keeps all), the best and an early one.

    A checkpoint that contains foreign files is reported and kept. Checkpoints later than ``newest`` are damaged
    leftovers and do not count towards ``keep``. Without ``total_steps``, no early checkpoint is kept.
    """
    older = [each for each in list_checkpoints(newest.parent) if each.name <= newest.name]
    kept = {best_of(newest.parent), None if total_steps is None else _early(older, total_steps)}
    for each in older[:-keep] if keep else []:
        try:
            if each not in kept:
                remove(each, CHECKPOINT)
        except (OSError, UsageError) as error:
            tqdm.write(shown(f"warning: {error}"))


def _early(checkpoints: Sequence[Path], steps: int) -> Path | None:
    """Return the checkpoint whose step is nearest to :data:`EARLY` times ``steps``, or None without checkpoints."""
    return min(checkpoints, key=lambda each: abs(step_of(each) - EARLY * steps), default=None)


def early_of(path: Path) -> Path | None:
    """Return the early checkpoint beside the checkpoint ``path``, for autoguidance; None if there is none."""
    if not NAME.fullmatch(path.name):
        return None
    earlier = [each for each in list_checkpoints(path.parent) if step_of(each) <= LATEST_EARLY * step_of(path)]
    return _early(earlier, step_of(path))


def intact_early_of(path: Path) -> Path | None:
    """Return the early checkpoint beside the checkpoint ``path``; None if there is none, or if it is damaged."""
    early = early_of(path)
    return None if early is None or find_damage(early, names=FLOW_FILES) else early


def mark_best(path: Path) -> None:
    """Point the name ``best`` to the checkpoint ``path``."""
    replace_file(path.parent / BEST, f"{path.name}\n")


def best_of(folder: Path) -> Path | None:
    """Return the checkpoint in ``folder`` that evaluations found the best, if there were any."""
    with suppress(DamageError):
        name = read_bytes(folder / BEST).decode(errors="replace").strip()
        if NAME.fullmatch(name) and is_checkpoint(folder / name):
            return folder / name
    return None


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint, which may be damaged."""
    with reading(path / MANIFEST):
        return (path / MANIFEST).exists() or (path / STATE_FILE).exists()


def set_aside(folder: Path) -> None:
    """Rename the checkpoints in ``folder`` without a manifest that can be read.

    They are not removed, since nothing proves whose they are, and otherwise they would be in the way of new ones.
    """
    for path in list_checkpoints(folder):
        try:
            read_manifest(path)
        except NewerError:
            continue
        except DamageError:
            aside = path.rename(path.with_name(f"{path.name}.damaged-{token_hex(2)}"))
            tqdm.write(f"note: {path} is renamed to {aside.name}: its manifest is missing or damaged")


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first; a UsageError if the folder may not be read."""
    names = list[str]()
    with suppress(DamageError), reading(folder):  # the path may be missing or not a folder
        names = sorted(os.listdir(folder))
    return [folder / name for name in names if NAME.fullmatch(name) and is_checkpoint(folder / name)]


def newest_checkpoint(folder: Path, names: Collection[str] | None = None) -> Path | None:
    """Return the newest undamaged checkpoint in ``folder``; None if there are no checkpoints."""
    checkpoints = list_checkpoints(folder)
    for path in reversed(checkpoints):
        problem = find_damage(path, names=names)
        if problem is None:
            return path
        warn_once(f"ignoring checkpoint {path}: {problem}")
    if checkpoints:
        raise UsageError(f"every checkpoint in {folder} is damaged; move the folder away to start a new run")
    return None


def place_of(run: Path) -> Path:
    """Return the folder of the checkpoints of the run in a folder: its ``checkpoint_dir``, if it had one."""
    with suppress(UsageError):
        training = read_document(run / CONFIG_FILE, Document).get("training")
        if isinstance(training, dict) and isinstance(place := training.get("checkpoint_dir"), str):
            return usable_path("`checkpoint_dir`", Path(place))
    return run / CHECKPOINTS


def resolve(path: Path, names: Collection[str] | None = FLOW_FILES) -> Path:
    """Return the checkpoint at ``path``, the newest of a run's folder, or the checkpoint that ``best`` names."""
    if path.name == BEST:
        path = best_of(path.parent) or path
    if is_checkpoint(path):
        if problem := find_damage(path, names=names):
            raise UsageError(f"checkpoint {path} is damaged: {problem}")
        return path
    newest = newest_checkpoint(place_of(path), names) or newest_checkpoint(path, names)
    if newest is None:
        is_model = (path / MODEL_FILE).is_file()
        remedy = "load its model with load_pretrained, or pass" if is_model else "pass"
        raise UsageError(f"there is no checkpoint at {path}: {remedy} the folder of a run, or one of its checkpoints")
    return newest


def fingerprint(path: Path) -> str:
    """Return a hash of the contents of the checkpoint at ``path``; "missing" if there is none."""
    with suppress(OSError):
        return blake2b((path / MANIFEST).read_bytes(), digest_size=6).hexdigest()
    return "missing"


def load_tensors(path: Path, *names: str) -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint's safetensors files, later files over earlier ones."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with reading(path / name), open_regular(path / name):  # reading a pipe would wait
                tensors |= load_file(path / name)
        except (RuntimeError, SafetensorError) as error:
            raise DamageError(f"{path / name} cannot be read ({first_line(error)})") from error
    return tensors


def load_weights(network: nn.Module, path: Path, *names: str) -> None:
    """Give ``network`` the weights in a checkpoint's safetensors files, later files over earlier ones."""
    saved = load_tensors(path, *names)
    wanted = network.state_dict()
    elsewhere = wanted.keys() - own_weights(network).keys() - saved.keys()
    for key in [*wanted, *saved]:
        there, here = (tuple(of[key].shape) if key in of else "missing" for of in (saved, wanted))
        if there != here and key not in elsewhere:
            architecture = f"another architecture ({key}: {there} saved, {here} expected)"
            raise UsageError(f"checkpoint {path} is of {architecture}: pass its flags, or choose another `output_dir`")
    network.load_state_dict(saved, strict=False)


def load_averaged(network: nn.Module, path: Path) -> None:
    """Give ``network`` the weights of the checkpoint at ``path``, averaged if there are averages."""
    load_weights(network, path, *averaged_files(path))


def load_matching(network: nn.Module, path: Path) -> tuple[set[str], set[str]]:
    """Give ``network`` the averaged weights of the checkpoint at ``path`` that have the same names and shapes.

    A network with a method ``align`` may rename them first, as :meth:`rectified_flow.networks.unet.Unet.align` does. Of
    a flow with weights outside of its network, those of the network are taken.

    Returns:
        The names of the network's own weights that were taken, and of those that were not.
    """
    saved, own = load_tensors(path, *averaged_files(path)), own_weights(network)
    if saved.keys().isdisjoint(own):  # then the names are those of a flow
        saved = {key.removeprefix("network."): value for key, value in saved.items() if key.startswith("network.")}
    saved = getattr(network, "align", dict)(saved)
    taken = {key: value for key, value in saved.items() if key in own and own[key].shape == value.shape}
    network.load_state_dict(taken, strict=False)
    return set(taken), own.keys() - taken.keys()


def averaged_files(path: Path) -> list[str]:
    """Return the names of a checkpoint's files that hold the averaged weights, later files over earlier ones.

    Averages have no frozen weights, so the file of the model itself comes first.
    """
    return [MODEL_FILE] + [EMA_FILE] * (EMA_FILE in read_manifest(path).files)


def own_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint keeps.

    Frozen parameters are left out if the network has a ``frozen_source``, from which its constructor loads them.
    """
    frozen = set() if getattr(network, "frozen_source", None) is None else frozen_names(network)
    return {name: value for name, value in network.state_dict().items() if name not in frozen}


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained."""
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def load_document(path: Path, name: str) -> Document:
    """Return one of a checkpoint's JSON documents; a UsageError if it cannot be read, or is no JSON object."""
    return read_document(path / name, Document)


def load_state(path: Path) -> TrainerFile:
    """Return the counters of the checkpoint at ``path``; a UsageError if they cannot be read, or make no sense."""
    return read_document(path / STATE_FILE, TrainerFile)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise named tensors to the safetensors format. Tensors may share memory (tied weights)."""
    return save_to_bytes({name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()})
