"""Averages of the weights in training: one of constant decay, and two power-function averages.

Only trained parameters and buffers are averaged. Frozen parameters are shared with the module in training.
"""

from copy import deepcopy
from pathlib import Path
from typing import TypeVar

from ema_pytorch import EMA
from ema_pytorch.post_hoc_ema import KarrasEMA
from torch import Tensor, nn

from rectified_flow.errors import UsageError
from rectified_flow.runs import checkpoint
from rectified_flow.runs.snapshots import LENGTHS, file_of

M = TypeVar("M", bound=nn.Module)


def constant_average(flow: nn.Module, decay: float) -> EMA:
    """The moving average of ``flow``, with its own counters on the CPU, where reading them waits for no device."""
    ema = EMA(
        flow,
        _copy(flow),
        beta=decay,
        update_every=1,
        update_after_step=0,
        include_online_model=False,
        use_foreach=True,
        ignore_names=checkpoint.frozen_names(flow),
    )
    ema.ema_model.eval()
    return ema


class PowerAverages:
    """The two averages of a network in training, from whose snapshots others are made (:mod:`..runs.snapshots`).

    Args:
        network: on its device.
    """

    def __init__(self, network: nn.Module) -> None:
        self._frozen = checkpoint.frozen_names(network)
        self._averages = {
            file_of(length): KarrasEMA(
                network, length, ema_model=_copy(network), update_every=1, ignore_names=self._frozen
            )
            for length in LENGTHS
        }

    def update(self) -> None:
        """Add the weights after a step."""
        for average in self._averages.values():
            average.update()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's tensors by file."""
        return {
            file: checkpoint.without(average.ema_model.state_dict(), self._frozen)
            for file, average in self._averages.items()
        }

    def load(self, path: Path, updates: int) -> None:
        """Restore the averages of a checkpoint after that many updates.

        Raises:
            UsageError: if it has none.
        """
        for file, average in self._averages.items():
            if not (path / file).exists():
                raise UsageError(f"--power_ema must be on from a run's first step, and {path} was saved without it")
            checkpoint.load_weights(average.ema_model, path, checkpoint.MODEL_FILE, file)
            average.initted.fill_(updates > 0)
            average.step.fill_(updates)


def _copy(module: M) -> M:
    """A copy of ``module`` that shares its frozen parameters."""
    return deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})
