"""Averages of the weights: one of constant decay, and two power-function ones that make any other afterwards.

A power-function average weighs the past by a power of the time, so its length is a share of the run: 0.1 averages over
the last tenth or so. From snapshots of two of them the average of any other length is solved for by least squares
(Karras et al. 2023, arXiv:2312.02696, section 3.2).
"""

import os
import shutil
from pathlib import Path

import torch
from ema_pytorch import EMA
from ema_pytorch.post_hoc_ema import KarrasEMA, sigma_rel_to_gamma, solve_weights
from torch import Tensor, nn

from rectified_flow import checkpoint
from rectified_flow.errors import UsageError
from rectified_flow.files import flush_folder

LENGTHS = (0.05, 0.10)
"""Of the two averages that are kept."""
SHORTEST, LONGEST = 0.02, 0.28
"""What can be made: a shorter one amplifies rounding, and one that weighs all steps alike has 0.289."""
POOR_FIT = 0.1
"""How far the weights of the snapshots may sum up to something else than 1."""
SNAPSHOTS = "averages"


def constant_average(flow: nn.Module, decay: float) -> EMA:
    """The moving average of ``flow``, with its own counters on the CPU, where reading them waits for no device."""
    ema = EMA(flow, beta=decay, update_every=1, update_after_step=0, include_online_model=False, use_foreach=True)
    ema.ema_model.eval()
    return ema


class PowerAverages:
    """The two averages of a network in training.

    Args:
        network: on its device.
    """

    def __init__(self, network: nn.Module) -> None:
        self._averages = {file_of(length): KarrasEMA(network, length, update_every=1) for length in LENGTHS}

    def update(self) -> None:
        """Take in the weights after a step."""
        for average in self._averages.values():
            average.update()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's tensors by file."""
        return {file: average.ema_model.state_dict() for file, average in self._averages.items()}

    def load(self, path: Path, updates: int) -> None:
        """Become those of a checkpoint after so many updates.

        Raises:
            UsageError: if it has none.
        """
        for file, average in self._averages.items():
            if not (path / file).exists():
                raise UsageError(f"--power_ema must be there from a run's first step, and {path} was made without")
            checkpoint.load_weights(average.ema_model, path, file)
            average.initted.fill_(updates > 0)
            average.step.fill_(updates)


def file_of(length: float) -> str:
    """The file with the average of that length in a checkpoint or snapshot."""
    return f"power_ema_{length:.2f}.safetensors"


def keep_snapshots(checkpoints: Path) -> None:
    """Give the averages in every checkpoint of the folder a name that stays when the checkpoint goes."""
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
    """Remove the snapshots of later steps than ``after``, which a run that goes on from there makes anew."""
    for each in (checkpoints / SNAPSHOTS).glob("step_*"):
        if checkpoint.step_of(each) > after:
            shutil.rmtree(each)


def find_shares(path: Path, length: float) -> list[tuple[Path, str, float]]:
    """Folder and file of each average that was kept up to the checkpoint ``path``, and its share in one of ``length``.

    Args:
        path: the checkpoint.
        length: standard deviation of the average's profile, as a share of the run; from ``SHORTEST`` to ``LONGEST``.

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
    shares = (solved / solved.sum()).tolist()  # so that what never changes stays as it is
    sources = [(each, file_of(kept)) for each in by_updates.values() for kept in LENGTHS]
    return [(*source, share) for source, share in zip(sources, shares, strict=True)]


def synthesize(path: Path, length: float) -> dict[str, Tensor]:
    """The average of that length at a checkpoint, from the snapshots up to it; see :func:`find_shares`."""
    total: dict[str, Tensor] = {}
    for snapshot, file, share in find_shares(path, length):
        for name, value in checkpoint.load_tensors(snapshot, file).items():
            total[name] = total.get(name, 0) + share * value.double()
    return {name: value.float() for name, value in total.items()}
