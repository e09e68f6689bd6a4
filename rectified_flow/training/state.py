"""Averages of the weights in training: one of constant decay, and two power-function averages.

Only trained parameters and buffers are averaged. Frozen parameters are shared with the module in training.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from ema_pytorch import EMA
from ema_pytorch.post_hoc_ema import KarrasEMA
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rectified_flow.errors import DamageError, RunError, UsageError, require
from rectified_flow.flows.flow import network_of
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


OPTIMIZER_FILE = "optimizer.safetensors"
LARGEST_WEIGHT = 1e6
"""A trained weight beyond this is what an explosion left, finite or not: nothing is learned from there."""
COUNTERS = ("step", "images_seen", "updates", "bad_steps", "bad_in_a_row", "scaler_skips")


class TrainingState:
    """Weights, their average, the optimizer's moments and the counters.

    There is no random state in it and no loader state: both are functions of the seed and the counters.

    Args:
        flow: the module in training, not wrapped.
        ema: its average of constant decay, or None.
        power: its power-function averages, or None.
        optimizer: over ``parameters``, as prepared by Accelerate.
        parameters: the trained parameters by name.
    """

    def __init__(
        self,
        flow: nn.Module,
        ema: EMA | None,
        power: PowerAverages | None,
        optimizer: AcceleratedOptimizer,
        parameters: dict[str, nn.Parameter],
    ) -> None:
        self.flow, self.ema, self.power, self.optimizer, self.parameters = flow, ema, power, optimizer, parameters
        self.step = 0
        self.images_seen = 0
        self.updates = 0
        """Steps that changed the weights; the others were skipped."""
        self.bad_steps = 0
        """Steps skipped for a loss or gradient that was not finite."""
        self.bad_in_a_row = 0
        """Those of them since the last good step."""
        self.scaler_skips = 0
        """Steps skipped because the loss scale of fp16 was too large."""
        self.sums: dict[str, Tensor] = {}
        """This rank's loss, and the flow's other logged values, summed over good steps since the last logged one."""
        self.summands = 0

    @property
    def scale_may_be_too_large(self) -> bool:
        """Whether fp16's loss scale can explain a bad step: it was above 1 (and has been halved since)."""
        return self.optimizer.scaler is not None and self.optimizer.scaler.get_scale() > 0.5

    def count(self, values: dict[str, Tensor]) -> None:
        """Add one good step's values to the sums; nothing waits for the device."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.summands += 1

    def clear_sums(self) -> None:
        """Start a new mean."""
        self.sums, self.summands = {}, 0

    def update_averages(self) -> None:
        """Add the weights after a good step to the averages."""
        for average in (self.ema, self.power):
            if average is not None:
                average.update()

    def require_sound(self) -> None:
        """Check the trained weights and their averages, and wait for the device to do so.

        Raises:
            RunError: if one of them is not finite, or larger than any that training makes.
        """
        weights: Mapping[str, Tensor] = self.parameters
        for tensors in (weights, *self._averages().values()):
            largest = get_total_norm([value for value in tensors.values() if value.is_floating_point()], torch.inf)
            if not largest <= LARGEST_WEIGHT:
                raise RunError(
                    f"the weights exploded by step {self.step} (the largest is {largest:.1e}), so they are not "
                    "saved and training ended; the checkpoints of earlier steps are kept: lower --learning_rate, or "
                    "clip gradients with --max_grad_norm"
                )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's tensors by file; frozen parameters are in the model's file only."""
        return {
            checkpoint.MODEL_FILE: checkpoint.own_weights(network_of(self.flow)),
            OPTIMIZER_FILE: {name: value for name, value in self._moments().items() if isinstance(value, Tensor)},
            **self._averages(),
        }

    def counters(self, sums: dict[str, list[float]]) -> dict[str, Any]:
        """Everything else of the state, as JSON can hold it; ``sums`` are this state's, by rank."""
        scaler = self.optimizer.scaler
        numbers = {name: value for name, value in self._moments().items() if isinstance(value, int | float)}
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "sums": sums,
            "summands": self.summands,
            "ema_step": None if self.ema is None else int(self.ema.step),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": type(self.optimizer.optimizer).__name__,
            **({"optimizer_numbers": numbers} if numbers else {}),
        }

    def _averages(self) -> dict[str, dict[str, Tensor]]:
        """The averages' tensors by file."""
        files = {} if self.power is None else self.power.tensors()
        if self.ema is not None:
            frozen = checkpoint.frozen_names(network_of(self.flow))  # the average itself requires no gradient
            files[checkpoint.EMA_FILE] = checkpoint.without(network_of(self.ema.ema_model).state_dict(), frozen)
        return files

    def _moments(self) -> dict[str, Any]:
        """The optimizer's state by parameter and name; in common optimizers tensors, numbers and None."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.optimizer.state[parameter].items()
        }

    def load(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        """Restore the state of the checkpoint at ``path`` for one of the ranks.

        Raises:
            UsageError: if it was made by another architecture or optimizer.
        """
        checkpoint.load_weights(network_of(self.flow), path, checkpoint.MODEL_FILE)
        saved = checkpoint.load_state(path)
        if self.ema is not None:
            checkpoint.load_averaged(network_of(self.ema.ema_model), path)
            self.ema.initted.fill_(True)
            self.ema.step.fill_(saved.ema_step or 0)
        if self.power is not None:
            self.power.load(path, saved.updates)
        now = type(self.optimizer.optimizer).__name__
        then = saved.optimizer or now
        require(then == now, f"checkpoint {path} was trained by {then}, not {now}: choose another output_dir")
        self._load_moments(checkpoint.load_tensors(path, OPTIMIZER_FILE) | saved.optimizer_numbers)
        if self.optimizer.scaler is not None and saved.grad_scaler is not None:
            try:
                self.optimizer.scaler.load_state_dict(saved.grad_scaler)
            except (LookupError, RuntimeError) as error:
                raise DamageError(f"checkpoint {path} is damaged: its loss scale lacks {error}") from error
        for name in COUNTERS:
            setattr(self, name, getattr(saved, name))
        self._load_sums(saved.sums, rank, world_size)
        self.summands = saved.summands

    def _load_sums(self, sums: Mapping[str, float | list[float]], rank: int, world_size: int) -> None:
        """Each rank's own sums, to the last bit, if there are as many ranks as there were; else the mean for all."""
        device = next(iter(self.parameters.values())).device
        self.sums = {}
        for name, value in sums.items():
            by_rank = value if isinstance(value, list) else [value]
            mine = by_rank[rank] if len(by_rank) == world_size else fmean(by_rank)
            self.sums[name] = torch.tensor(mine, device=device)

    def _load_moments(self, moments: Mapping[str, Any]) -> None:
        """Restore them, each in the memory format of its parameter, which the fused update takes for granted."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        # The optimizer numbers them group by group.
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        numbered: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(ordered):
            prefix = f"{names[id(parameter)]}."
            numbered[index] = {
                key.removeprefix(prefix): _like(parameter, value)
                for key, value in moments.items()
                if key.startswith(prefix) and "." not in key.removeprefix(prefix)
            }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def _like(parameter: Tensor, value: Any) -> Any:
    """A tensor of the shape of ``parameter`` in its memory format; anything else as it is."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value
