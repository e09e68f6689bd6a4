"""Snapshots of power-function averages, kept beside the checkpoints, and averages of any length made of them.

A power-function average weighs the past by a power of the time, so its length is a share of the run: 0.1 averages over
the last tenth or so. From snapshots of two of them, least squares give the average of any other length
(Karras et al. 2023, arXiv:2312.02696, section 3.2).
"""

import os
import shutil
from pathlib import Path

import torch
from ema_pytorch.post_hoc_ema import sigma_rel_to_gamma, solve_weights
from torch import Tensor

from rectified_flow.errors import UsageError
from rectified_flow.files import flush_folder
from rectified_flow.runs import checkpoint

LENGTHS = (0.05, 0.10)
"""Of the two averages that are kept."""
POOR_FIT = 0.1
"""Largest difference from 1 of the sum of the snapshots' weights."""
SNAPSHOTS = "averages"


def file_of(length: float) -> str:
    """The file with the average of that length in a checkpoint or snapshot."""
    return f"power_ema_{length:.2f}.safetensors"


def keep_snapshots(checkpoints: Path) -> None:
    """Link the averages of every checkpoint in the folder to a snapshot, which stays when the checkpoint is pruned."""
    for each in checkpoint.list_checkpoints(checkpoints):
        files = [each / name for name in (*map(file_of, LENGTHS), checkpoint.STATE_FILE)]
        snapshot = checkpoints / SNAPSHOTS / each.name
        if snapshot.exists() or not all(file.exists() for file in files):
            continue
        stage = snapshot.with_name(f"{checkpoint.STAGE_PREFIX}{each.name}")
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        for file in files:
            try:
                os.link(file, stage / file.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, stage / file.name)
        flush_folder(stage)
        stage.rename(snapshot)


def drop_snapshots(checkpoints: Path, after: int) -> None:
    """Remove the snapshots of later steps than ``after``, which a run that resumes there makes again."""
    for each in (checkpoints / SNAPSHOTS).glob("step_*"):
        if checkpoint.step_of(each) > after:
            shutil.rmtree(each)


def find_shares(path: Path, length: float) -> list[tuple[Path, str, float]]:
    """Folder and file of each average that was kept up to the checkpoint ``path``, and its share in one of ``length``.

    Args:
        path: the checkpoint.
        length: standard deviation of the average's profile, as a share of the run, from ``SHORTEST_EMA`` to
            ``LONGEST_EMA``.

    Raises:
        UsageError: if there are no snapshots, or too few for that length.
    """
    folder = path.parent / SNAPSHOTS
    snapshots = [each for each in sorted(folder.glob("step_*")) if each.name <= path.name]
    if not snapshots or snapshots[-1].name != path.name:
        raise UsageError(f"there are no averages of {path.name} in {folder}: train with --power_ema to have some")
    by_updates = {float(checkpoint.load_document(each, checkpoint.STATE_FILE)["updates"]): each for each in snapshots}
    by_updates.pop(0.0, None)  # nothing was averaged yet
    if not by_updates:
        raise UsageError(f"{path} has not been trained yet, so there is nothing to average")
    counts = list(by_updates)
    at, now = torch.tensor(counts).repeat_interleave(len(LENGTHS)), torch.tensor([counts[-1]])
    gammas = torch.tensor([sigma_rel_to_gamma(each) for each in LENGTHS]).repeat(len(counts))
    solved = solve_weights(at, gammas, now, torch.tensor([sigma_rel_to_gamma(length)])).flatten()
    if not abs(solved.sum() - 1) < POOR_FIT:
        raise UsageError(
            f"an average of length {length:g} cannot be made of the {len(counts)} snapshots of {path}: take one nearer "
            f"to {LENGTHS[0]:g}, or train with a smaller --save_every"
        )
    shares = (solved / solved.sum()).tolist()  # so that constants stay as they are
    sources = [(each, file_of(kept)) for each in by_updates.values() for kept in LENGTHS]
    return [(*source, share) for source, share in zip(sources, shares, strict=True)]


def synthesize(path: Path, length: float) -> dict[str, Tensor]:
    """The average of that length at a checkpoint, from the snapshots up to it; see :func:`find_shares`."""
    total: dict[str, Tensor] = {}
    for snapshot, file, share in find_shares(path, length):
        for name, value in checkpoint.load_tensors(snapshot, file).items():
            total[name] = total.get(name, 0) + share * value.double()
    return {name: value.float() for name, value in total.items()}
