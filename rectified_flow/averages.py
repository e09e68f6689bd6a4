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

LENGTHS = (0.05, 0.10)
"""Of the two averages that are kept."""
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
        """Become those of a checkpoint after so many updates, or its averaged weights if it has none."""
        for file, average in self._averages.items():
            name = file if (path / file).exists() else checkpoint.best_weights(path)
            checkpoint.load_weights(average.ema_model, path, name)
            average.initted.fill_(True)
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
        stage.rename(snapshot)


def find_snapshots(path: Path) -> list[Path]:
    """The snapshots up to the checkpoint ``path``, oldest first.

    Raises:
        UsageError: if there are none.
    """
    folder = path.parent / SNAPSHOTS
    snapshots = [each for each in sorted(folder.glob("step_*")) if each.name <= path.name]
    if not snapshots:
        raise UsageError(f"there are no averages in {folder} up to {path.name}: train with --power_ema to have some")
    return snapshots


def synthesize(path: Path, length: float) -> dict[str, Tensor]:
    """The average of that length at a checkpoint, from the snapshots up to it.

    Args:
        path: the checkpoint.
        length: standard deviation of the average's profile, as a share of the run; above 0, at most 0.28.

    Raises:
        UsageError: if there are no snapshots.
    """
    snapshots = find_snapshots(path)
    counts = [float(checkpoint.load_document(each, checkpoint.STATE_FILE)["updates"]) for each in snapshots]
    at, now = torch.tensor(counts).repeat_interleave(len(LENGTHS)), torch.tensor([counts[-1]])
    gammas = torch.tensor([sigma_rel_to_gamma(each) for each in LENGTHS]).repeat(len(snapshots))
    solved = solve_weights(at, gammas, now, torch.tensor([sigma_rel_to_gamma(length)])).flatten()
    shares = (solved / solved.sum()).tolist()  # so that what never changes stays as it is
    sources = [(each, file_of(kept)) for each in snapshots for kept in LENGTHS]
    total: dict[str, Tensor] = {}
    for share, (snapshot, file) in zip(shares, sources, strict=True):
        for name, value in checkpoint.load_tensors(snapshot, file).items():
            total[name] = total.get(name, 0) + share * value.double()
    return {name: value.float() for name, value in total.items()}
