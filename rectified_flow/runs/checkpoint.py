"""Checkpoints that are whole or absent.

A checkpoint is a folder ``step_00000100``: safetensors files, JSON documents, and a manifest with the size and hash of
each. It is written beside its place, flushed, and renamed into it. Nothing in it is ever unpickled.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import file_digest
from pathlib import Path
from stat import S_IMODE
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rectified_flow.errors import UsageError, first_line
from rectified_flow.files import flush, flush_folder, replace_file
from rectified_flow.runs.config import CHECKPOINTS

MODEL_FILE, EMA_FILE = "model.safetensors", "ema.safetensors"
CONFIG_FILE, FLOW_FILE, STATE_FILE, MANIFEST = "config.json", "flow.json", "trainer.json", "manifest.json"
STAGE_PREFIX = ".writing-"
BEST = "best"


def step_name(step: int) -> str:
    """``step_00000100``, for files and folders that sort by step."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


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
        shutil.rmtree(abandoned, ignore_errors=True)
    path, stage = folder / step_name(step), folder / f"{STAGE_PREFIX}{step_name(step)}"
    stage.mkdir()
    try:
        for name, values in tensors.items():
            save_tensors(values, stage / name)
        for name, document in documents.items():
            (stage / name).write_text(json.dumps(document, indent=1))
        files = {file.name: {"size": file.stat().st_size, "sha256": _sha256(file)} for file in stage.iterdir()}
        (stage / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
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
    with suppress(OSError):
        best = folder / (folder / BEST).read_text().strip()
        return best if (best / MANIFEST).exists() else None
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
    names = re.compile(r"step_\d{8,}")
    return sorted(path for path in folder.glob("step_*") if names.fullmatch(path.name) and (path / MANIFEST).exists())


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
        warn(f"ignoring checkpoint {path}: {problem}")
    if checkpoints:
        raise UsageError(f"every checkpoint in {folder} is damaged; move the folder away to start anew")
    return None


def find_damage(path: Path) -> str | None:
    """The damage of the checkpoint at ``path`` in words, or None.

    Raises:
        UsageError: if a file may not be read, which is no damage.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if (path / name).stat().st_size != expected["size"]:
                return f"{name} has the wrong size"
            if _sha256(path / name) != expected["sha256"]:
                return f"{name} was altered"
    except PermissionError as error:
        raise UsageError(f"{error.filename} cannot be read ({error.strerror}): change its rights") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def resolve(path: Path, warn: Callable[[str], object] = print) -> Path:
    """The checkpoint at ``path``: that itself, the newest of a run's folder, or the one that ``best`` points to.

    Raises:
        UsageError: if there is none, or it is damaged.
    """
    if path.name == BEST:
        path = best_of(path.parent) or path
    if (path / MANIFEST).exists():
        problem = find_damage(path)
        if problem is not None:
            raise UsageError(f"checkpoint {path} is damaged: {problem}")
        return path
    for folder in (path / CHECKPOINTS, path):
        newest = newest_checkpoint(folder, warn)
        if newest is not None:
            return newest
    raise UsageError(f"there is no checkpoint at {path}")


def load_tensors(path: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    """The named tensors of one of a checkpoint's safetensors files.

    Raises:
        UsageError: if it is not one.
    """
    try:
        return load_file(path / name, device=device)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"checkpoint {path} is damaged: {name} cannot be read ({first_line(error)})") from error


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


def has_averages(path: Path) -> bool:
    """Whether a checkpoint has averaged weights."""
    return (path / EMA_FILE).exists()


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
    """One of a checkpoint's JSON documents."""
    return dict(json.loads((path / name).read_text()))


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write named tensors as safetensors, with the rights that any new file has here."""
    file.touch()
    mode = file.stat().st_mode
    save_file(_unshared(tensors), file)  # leaves a file that nobody else may read
    file.chmod(S_IMODE(mode))


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


def _remove(path: Path) -> None:
    """Remove a checkpoint; one that is half removed does not look like one."""
    leaving = path.with_name(f"{STAGE_PREFIX}{path.name}.old")
    path.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)  # what is left of it goes before the next is written


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
