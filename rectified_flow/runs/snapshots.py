"""Snapshots of power-function averages, kept beside the checkpoints, and averages of any length made of them.

A power-function average weighs the past by a power of the time, so its length is a share of the run: 0.1 averages over
the last tenth or so. From snapshots of two of them, least squares give the average of any other length
(Karras et al. 2023, arXiv:2312.02696, section 3.2).
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from ema_pytorch.post_hoc_ema import sigma_rel_to_gamma, solve_weights
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.runs import checkpoint
from rectified_flow.system.artifact import CHECKPOINT, Artifact, find_damage, remove

LENGTHS = (0.05, 0.10)
"""Lengths of the two averages that are kept."""
POOR_FIT = 0.1
"""Largest difference from 1 of the sum of the snapshots' weights."""
SNAPSHOTS = "averages"


def file_of(length: float) -> str:
    """Return the name of the file with the average of that length in a checkpoint or snapshot."""
    return f"power_ema_{length:.2f}.safetensors"


def keep_snapshots(checkpoints: Path) -> None:
    """Link the averages of every intact checkpoint to a snapshot, which is kept when the checkpoint is pruned.

    Raises:
        OSError: if they cannot be linked or copied.
        UsageError: if something foreign is in the place of a snapshot.
    """
    names = (*map(file_of, LENGTHS), checkpoint.STATE_FILE)
    for each in checkpoint.list_checkpoints(checkpoints):
        snapshot = Artifact(checkpoints / SNAPSHOTS / each.name, CHECKPOINT, names)
        has_averages = all((each / name).exists() for name in names)
        if snapshot.path.exists() or not has_averages or find_damage(each, names=names) is not None:
            continue
        with snapshot.building():
            for name in names:
                try:
                    os.link(each / name, snapshot.stage / name)
                except OSError:  # a file system without hard links
                    shutil.copyfile(each / name, snapshot.stage / name)
            snapshot.finish()


def drop_snapshots(checkpoints: Path, after: int) -> None:
    """Remove the snapshots of later steps than ``after``, which a run that resumes there makes again.

    Raises:
        UsageError: if one of them holds something foreign.
    """
    for each in checkpoint.list_steps(checkpoints / SNAPSHOTS):
        if checkpoint.step_of(each) > after:
            remove(each, CHECKPOINT)


def intact_snapshots(path: Path) -> dict[Path, int]:
    """Return the snapshots up to the checkpoint ``path``, oldest first, with the number of updates before each.

    Damaged snapshots are reported and left out.

    Raises:
        UsageError: if the snapshot of the checkpoint itself is missing or damaged, or one may not be read.
    """
    folder = path.parent / SNAPSHOTS
    snapshots = [each for each in checkpoint.list_steps(folder) if each.name <= path.name]
    if not snapshots or snapshots[-1].name != path.name:
        raise UsageError(f"there are no averages of {path.name} in {folder}: train with --power_ema to have some")
    intact: dict[Path, int] = {}
    for each in snapshots:
        problem = find_damage(each)
        if problem is None:
            intact[each] = checkpoint.load_state(each).updates
        elif each.name == path.name:
            raise DamageError(f"the averages {each} are damaged: {problem}")
        else:
            tqdm.write(f"warning: the averages {each} are damaged: {problem}; they are left out")
    return intact


def find_shares(snapshots: Mapping[Path, int], length: float) -> list[tuple[Path, str, float]]:
    """Return folder and file of each kept average, and its share in an average of ``length`` after the last update.

    Args:
        snapshots: snapshots of a checkpoint, see :func:`intact_snapshots`.
        length: standard deviation of the average's profile, as a share of the run, from ``SHORTEST_EMA`` to
            ``LONGEST_EMA``.

    Raises:
        UsageError: if there are too few snapshots for that length.
    """
    by_updates = {float(updates): each for each, updates in snapshots.items()}
    by_updates.pop(0.0, None)  # nothing was averaged yet
    *_, last = snapshots
    if not by_updates:
        raise UsageError(f"{last} has not been trained yet, so there is nothing to average")
    counts = list(by_updates)
    at, now = torch.tensor(counts).repeat_interleave(len(LENGTHS)), torch.tensor([counts[-1]])
    gammas = torch.tensor([sigma_rel_to_gamma(each) for each in LENGTHS]).repeat(len(counts))
    solved = solve_weights(at, gammas, now, torch.tensor([sigma_rel_to_gamma(length)])).flatten()
    if not abs(solved.sum() - 1) < POOR_FIT:
        raise UsageError(
            f"an average of length {length:g} cannot be made of the {len(counts)} snapshots up to {last}: take one "
            f"nearer to {LENGTHS[0]:g}, or train with a smaller --save_every"
        )
    shares = (solved / solved.sum()).tolist()  # so that constants stay as they are
    sources = [(each, file_of(kept)) for each in by_updates.values() for kept in LENGTHS]
    return [(*source, share) for source, share in zip(sources, shares, strict=True)]


def synthesize(snapshots: Mapping[Path, int], length: float) -> dict[str, Tensor]:
    """Return the average of that length at a checkpoint, from its snapshots; see :func:`find_shares`."""
    total: dict[str, Tensor] = {}
    for snapshot, file, share in find_shares(snapshots, length):
        for name, value in checkpoint.load_tensors(snapshot, file).items():
            total[name] = total.get(name, 0) + share * value.double()
    return {name: value.float() for name, value in total.items()}
