"""``trainer.json``: what a run resumes from, beside the tensors of a checkpoint."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from stat import S_IMODE
from typing import Annotated, Any, TypeVar

from accelerate import PartialState
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from safetensors.torch import save as save_to_bytes
from torch import Tensor, nn

from rectified_flow.distributed.collectives import any_rank, on_main
from rectified_flow.errors import DamageError, UsageError, first_line
from rectified_flow.runs.config import CHECKPOINTS
from rectified_flow.runs.document import upgraded
from rectified_flow.runs.manifest import MANIFEST, Natural, find_damage, read_manifest, write_manifest
from rectified_flow.system.files import (
    flush,
    flush_folder,
    open_regular,
    read_bytes,
    read_document,
    reading,
    remove,
    replace_file,
)

ByRank = Annotated[list[float], Field(min_length=1)]
Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class RunIdentity:
    """What makes two runs the same run; part of every checkpoint."""

    dataset: str
    """Fingerprint of the dataset."""
    seed: Natural
    global_batch: Natural
    origin: str
    """The checkpoint or run that ``--resume`` named when the run began, or "new"."""
    precision: str = ""
    """Of the forward pass; "" in checkpoints that do not record it."""


@dataclass(frozen=True)
class SavedState:
    """The counters of a run after ``step`` steps; the first checkpoints of version 0.1 lack some."""

    step: Natural
    run: RunIdentity
    images_seen: Natural = 0
    updates: Natural = -1
    """As many as steps, where it is not recorded."""
    bad_steps: Natural = 0
    bad_in_a_row: Natural = 0
    scaler_skips: Natural = 0
    sums: dict[str, float | ByRank] = field(default_factory=dict)
    """Of the values to log, by rank; version 0.1 kept their mean."""
    summands: Natural = 0
    ema_step: Natural | None = None
    grad_scaler: dict[str, Natural | Scale] | None = None
    optimizer: str | None = None
    optimizer_numbers: dict[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sums and self.summands == 0:
            raise ValueError("there are sums of no summands")
        if self.updates < 0:
            object.__setattr__(self, "updates", self.step)


MODEL_FILE, EMA_FILE = "model.safetensors", "ema.safetensors"
CONFIG_FILE, FLOW_FILE, STATE_FILE = "config.json", "flow.json", "trainer.json"
STAGE_PREFIX = ".writing-"
BEST = "best"
MISSING = "missing"
"""The fingerprint of no checkpoint."""
NAME = re.compile(r"step_([0-9]{8,})")

T = TypeVar("T")


def step_name(step: int) -> str:
    """``step_00000100``, for files and folders that sort by step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def list_steps(folder: Path) -> list[Path]:
    """What has the name of a step in ``folder``, oldest first.

    Raises:
        UsageError: if the folder may not be read.
    """
    try:
        with reading(folder):
            names = os.listdir(folder)
    except DamageError:  # it is missing, or no folder
        return []
    return [folder / name for name in sorted(names) if NAME.fullmatch(name)]


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Any],
    *,
    best: bool = False,
) -> Path:
    """Write a checkpoint into ``folder``.

    Args:
        folder: where the run's checkpoints are.
        step: optimizer steps made.
        tensors: file name to named tensors.
        documents: file name to what JSON can hold.
        best: point the name ``best`` to it.

    Returns:
        The checkpoint's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.glob(f"{STAGE_PREFIX}*"):
        with suppress(OSError):
            remove(abandoned)
    path, stage = folder / step_name(step), folder / f"{STAGE_PREFIX}{step_name(step)}"
    stage.mkdir()
    try:
        for name, values in tensors.items():
            save_tensors(values, stage / name)
        for name, document in documents.items():
            (stage / name).write_text(json.dumps(document, indent=1))
        write_manifest(stage, step)
        flush_folder(stage)
        if path.exists():
            _remove(path)
        if best:  # first: a run that is killed in between comes here again
            mark_best(path)
        stage.rename(path)
        flush(folder)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return path


def prune(newest: Path, keep: int, keep_every: int = 0) -> None:
    """Remove all checkpoints in the folder but the ``keep`` newest (0 keeps all), the milestones and the best.

    Args:
        newest: the one written last. Later checkpoints, if any, are damaged leftovers and do not count towards
            ``keep``.
        keep: how many to keep.
        keep_every: those at multiples of this step are milestones; 0 makes none.
    """
    older = [each for each in list_checkpoints(newest.parent) if each.name <= newest.name]
    for each in older[:-keep] if keep else []:
        if not (keep_every and step_of(each) % keep_every == 0) and each != best_of(newest.parent):
            _remove(each)


def mark_best(path: Path) -> None:
    """Point the name ``best`` to the checkpoint ``path``."""
    replace_file(path.parent / BEST, f"{path.name}\n")


def best_of(folder: Path) -> Path | None:
    """The checkpoint in ``folder`` that evaluations found the best, if there were any."""
    with suppress(DamageError, UnicodeDecodeError):
        name = read_bytes(folder / BEST).decode().strip()
        if NAME.fullmatch(name) and _is_checkpoint(folder / name):
            return folder / name
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first.

    Raises:
        UsageError: if the folder may not be read.
    """
    return [path for path in list_steps(folder) if _is_checkpoint(path)]


def newest_checkpoint(folder: Path, warn: Callable[[str], object] = print) -> Path | None:
    """The newest undamaged checkpoint in ``folder``; ``warn`` is called with a line on each damaged one.

    Raises:
        UsageError: if there are checkpoints but every one is damaged.
    """
    checkpoints = list_checkpoints(folder)
    for path in reversed(checkpoints):
        problem = find_damage(path)
        if problem is None:
            return path
        if not _is_checkpoint(path):  # its run pruned it meanwhile, and has written a newer one
            return newest_checkpoint(folder, warn)
        warn(f"ignoring checkpoint {path}: {problem}")
    if checkpoints:
        raise UsageError(f"every checkpoint in {folder} is damaged; move the folder away to start anew")
    return None


def resolve(path: Path, warn: Callable[[str], object] = print) -> Path:
    """The checkpoint at ``path``: that itself, the newest of a run's folder, or the one that ``best`` points to.

    Raises:
        UsageError: if there is none, or it is damaged.
    """
    if path.name == BEST:
        path = best_of(path.parent) or path
    if _is_checkpoint(path):
        problem = find_damage(path)
        if problem is None:
            return path
        if _is_checkpoint(path):
            raise UsageError(f"checkpoint {path} is damaged: {problem}")
    for folder in (path / CHECKPOINTS, path):
        newest = newest_checkpoint(folder, warn)
        if newest is not None:
            return newest
    pruned = ", which its run may have pruned: pass the run's folder for its newest" * bool(NAME.fullmatch(path.name))
    raise UsageError(f"there is no checkpoint at {path}{pruned}")


def read(path: Path, action: Callable[[Path], T], state: PartialState | None = None) -> T:
    """Call ``action`` with the checkpoint that :func:`resolve` finds, and again if it is pruned meanwhile.

    A run that trains prunes its checkpoints at any time. If ``path`` names the run, the next one is read.

    Args:
        path: of a checkpoint or a run.
        action: reads everything that is needed of the checkpoint.
        state: of the processes, where all call this together; they read the same checkpoint.

    Raises:
        UsageError: if there is no checkpoint, or it is damaged.
    """
    while True:
        source = resolve(path) if state is None else on_main(state, lambda: resolve(path))
        failure: Exception | None = None
        try:
            result = action(source)
        except Exception as error:  # of any library that misses a file
            failure = error
        pruned = failure is not None and not _is_checkpoint(source)
        if not (pruned if state is None else any_rank(state, pruned)):
            if failure is not None:
                raise failure
            return result


def fingerprint(path: Path) -> str:
    """What identifies the contents of the checkpoint at ``path``; :data:`MISSING` if there is none."""
    try:
        return blake2b((path / MANIFEST).read_bytes(), digest_size=6).hexdigest()
    except OSError:
        return MISSING


def load_tensors(path: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    """The named tensors of one of a checkpoint's safetensors files.

    Raises:
        UsageError: if it is not one.
    """
    with reading(path / name):
        open_regular(path / name).close()
    try:
        return load_file(path / name, device=device)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise DamageError(f"checkpoint {path} is damaged: {name} cannot be read ({first_line(error)})") from error


def load_weights(network: nn.Module, path: Path, *names: str) -> None:
    """Give ``network`` the weights in a checkpoint's safetensors files, later files over earlier ones.

    Raises:
        UsageError: if one is damaged, or of another architecture.
    """
    saved: dict[str, Tensor] = {}
    for name in names:
        saved |= load_tensors(path, name)
    wanted = network.state_dict()
    elsewhere = wanted.keys() - own_weights(network).keys() - saved.keys()
    for key in [*wanted, *saved]:
        there, here = (tuple(of[key].shape) if key in of else "missing" for of in (saved, wanted))
        if there != here and key not in elsewhere:
            raise UsageError(
                f"checkpoint {path} is of another architecture ({key} is {there} there and {here} here): pass the "
                "network flags in its config.json, or choose another --output_dir"
            )
    network.load_state_dict(saved, strict=False)


def load_averaged(network: nn.Module, path: Path) -> None:
    """Give ``network`` the weights of the checkpoint at ``path``, averaged if there are averages.

    Raises:
        UsageError: if it is of another architecture.
    """
    load_weights(network, path, MODEL_FILE, *([EMA_FILE] if has_averages(path) else []))


def load_matching(network: nn.Module, path: Path) -> tuple[set[str], set[str]]:
    """Give ``network`` the averaged weights of the checkpoint at ``path`` that have the same names and shapes.

    Returns:
        The names of the network's own weights that were taken, and of those that were not.

    Raises:
        UsageError: if the checkpoint is damaged.
    """
    saved = load_tensors(path, MODEL_FILE) | (load_tensors(path, EMA_FILE) if has_averages(path) else {})
    own = own_weights(network)
    taken = {key: value for key, value in saved.items() if key in own and own[key].shape == value.shape}
    network.load_state_dict(taken, strict=False)
    return set(taken), own.keys() - taken.keys()


def has_averages(path: Path) -> bool:
    """Whether a checkpoint has averaged weights.

    Raises:
        UsageError: if its manifest cannot be read, as it was pruned, for example.
    """
    return EMA_FILE in read_manifest(path).files


def own_weights(network: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint keeps: all, or without frozen parameters where the network has a
    ``frozen_source``, by which its constructor loads them."""
    keeps_all = getattr(network, "frozen_source", None) is None
    return network.state_dict() if keeps_all else without(network.state_dict(), frozen_names(network))


def frozen_names(module: nn.Module) -> set[str]:
    """The names of the parameters that are not trained."""
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def without(tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """The tensors that have none of these names."""
    return {name: value for name, value in tensors.items() if name not in names}


def load_document(path: Path, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON documents.

    Raises:
        UsageError: if it cannot be read, or is no JSON object.
    """
    return read_document(path / name, dict[str, Any])


def load_description(path: Path) -> Mapping[str, Any]:
    """The description of the flow of the checkpoint at ``path``.

    Raises:
        UsageError: if it cannot be read, or is damaged.
    """
    return upgraded(load_document(path, FLOW_FILE), path / FLOW_FILE)


def load_state(path: Path) -> SavedState:
    """The counters of the checkpoint at ``path``.

    Raises:
        UsageError: if they cannot be read, or make no sense.
    """
    return read_document(path / STATE_FILE, SavedState)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write named tensors as safetensors, with the rights that any new file has here."""
    file.touch()
    mode = file.stat().st_mode
    save_file(_unshared(tensors), file)  # leaves a file that nobody else may read
    file.chmod(S_IMODE(mode))


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The contents of a safetensors file of named tensors."""
    return save_to_bytes(_unshared(tensors))


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, copied where two share memory (tied weights), which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        value = tensor.detach().contiguous()
        memory = value.untyped_storage().data_ptr()
        result[key] = value.clone() if memory in seen else value
        seen.add(memory)
    return result


def _is_checkpoint(path: Path) -> bool:
    with reading(path / MANIFEST):
        return (path / MANIFEST).exists()


def _remove(path: Path) -> None:
    """Remove a checkpoint; one that is half removed does not look like one."""
    leaving = path.with_name(f"{STAGE_PREFIX}{path.name}.old")
    with suppress(OSError):
        remove(leaving)
    path.rename(leaving)
    with suppress(OSError):  # what is left of it goes before the next is written
        remove(leaving)
