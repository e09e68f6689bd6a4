"""The state of a training run: weights, their averages, the optimizer's state, and counters.

Only trained parameters and buffers are averaged. Frozen parameters are shared with the module in training.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from ema_pytorch import EMA
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import network_of
from rectified_flow.runs import checkpoint

OPTIMIZER_FILE = "optimizer.safetensors"
LARGEST_WEIGHT = 1e6
"""Bound of the trained weights. A larger one is left by an explosion, and nothing is learned from it."""
COUNTERS = [field.name for field in fields(checkpoint.Counters)]


def trained_parameters(flow: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name.

    Raises:
        UsageError: if a trained parameter has less than 32 bits.
    """
    parameters = {name: p for name, p in flow.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if parameter.element_size() < torch.float32.itemsize:
            precision = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(f"{name} would be trained in {precision}: convert trained parameters with .float()")
    return parameters


def constant_average(flow: nn.Module, decay: float) -> EMA:
    """Build the moving average of ``flow``, whose own counters are on the CPU: reading them waits for no device."""
    ema = EMA(
        flow,
        deepcopy(flow, {id(p): p for p in flow.parameters() if not p.requires_grad}),
        beta=decay,
        update_every=1,
        update_after_step=0,
        include_online_model=False,
        use_foreach=True,
        ignore_names=checkpoint.frozen_names(flow),
    )
    ema.ema_model.eval()
    return ema


class TrainingState(checkpoint.Counters):
    """Weights, their averages, the optimizer's state and the counters: all that a resumed run needs.

    There is no random state in it and no loader state: both are functions of the seed and the counters.

    Args:
        flow: the module in training, not wrapped.
        ema: its average of constant decay, or None.
        optimizer: the optimizer of ``parameters``, as prepared by Accelerate.
        parameters: the trained parameters by name.
    """

    def __init__(
        self,
        flow: nn.Module,
        ema: EMA | None,
        optimizer: AcceleratedOptimizer,
        parameters: dict[str, nn.Parameter],
    ) -> None:
        super().__init__(step=0)
        self.flow, self.ema, self.optimizer, self.parameters = flow, ema, optimizer, parameters
        self.sums: dict[str, Tensor] = {}
        """Sums of this rank's loss and of the flow's other logged values over ``summands`` steps."""

    def count(self, values: dict[str, Tensor]) -> None:
        """Add one good step's values to the sums, without a wait for the device."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value
        self.summands += 1

    def update_averages(self) -> None:
        """Add the weights after a good step to their average."""
        if self.ema is not None:
            self.ema.update()

    def require_sound(self) -> None:
        """Check the trained weights and their averages, which waits for the device.

        Raises:
            RunError: if one of them is not finite, or larger than any that training makes.
        """
        weights: Mapping[str, Tensor] = self.parameters
        for tensors in (weights, self._averaged()):
            largest = get_total_norm([value for value in tensors.values() if value.is_floating_point()], torch.inf)
            if not largest <= LARGEST_WEIGHT:
                exploded = f"the weights exploded by step {self.step} (the largest is {largest:.1e}) and are not saved"
                raise RunError(f"{exploded}: lower --learning_rate, or clip gradients with --max_grad_norm")

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint by file; frozen parameters are in the model's file only."""
        return {
            checkpoint.MODEL_FILE: checkpoint.own_weights(network_of(self.flow)),
            OPTIMIZER_FILE: {name: value for name, value in self._moments().items() if isinstance(value, Tensor)},
            **({} if self.ema is None else {checkpoint.EMA_FILE: self._averaged()}),
        }

    def counters(self, sums: dict[str, list[float]]) -> dict[str, Any]:
        """Return everything else of the state as JSON can hold it; ``sums`` are the sums of all ranks."""
        scaler = self.optimizer.scaler
        numbers = {name: value for name, value in self._moments().items() if isinstance(value, int | float)}
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "sums": sums,
            "ema_step": None if self.ema is None else int(self.ema.step),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": type(self.optimizer.optimizer).__name__,
            "optimizer_numbers": numbers,
        }

    def load(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        """Restore the state of the checkpoint at ``path`` for one of the ranks.

        Raises:
            UsageError: if the checkpoint is of another architecture or optimizer.
        """
        checkpoint.load_weights(network_of(self.flow), path, checkpoint.MODEL_FILE)
        saved = checkpoint.load_state(path)
        if self.ema is not None:
            checkpoint.load_averaged(network_of(self.ema.ema_model), path)
            self.ema.initted.fill_(True)
            self.ema.step.fill_(saved.ema_step or 0)
        optimizer = type(self.optimizer.optimizer).__name__
        if saved.optimizer != optimizer:
            raise UsageError(f"{path} was trained by {saved.optimizer}, not {optimizer}: choose another --output_dir")
        self._load_moments(checkpoint.load_tensors(path, OPTIMIZER_FILE) | saved.optimizer_numbers)
        if self.optimizer.scaler is not None and saved.grad_scaler is not None:
            self.optimizer.scaler.load_state_dict(saved.grad_scaler)
        for name in COUNTERS:
            setattr(self, name, getattr(saved, name))
        # Each rank's own sums, to the last bit, if there are as many ranks as there were; else the mean for all.
        device = next(iter(self.parameters.values())).device
        self.sums = {
            name: torch.tensor(by_rank[rank] if len(by_rank) == world_size else fmean(by_rank), device=device)
            for name, by_rank in saved.sums.items()
        }

    def _averaged(self) -> dict[str, Tensor]:
        """Return the averaged weights of the network by name."""
        if self.ema is None:
            return {}
        frozen = checkpoint.frozen_names(network_of(self.flow))  # the average itself requires no gradient
        averaged = network_of(self.ema.ema_model).state_dict()
        return {name: value for name, value in averaged.items() if name not in frozen}

    def _moments(self) -> dict[str, Any]:
        """Return the optimizer's state by ``PARAMETER.NAME``: tensors, numbers and None."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.optimizer.state[parameter].items()
        }

    def _load_moments(self, moments: Mapping[str, Any]) -> None:
        """Restore the optimizer's state, whatever the number and order of its groups.

        A checkpoint names parameters, while torch's state dict numbers them group by group.
        """
        by_parameter: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
        for label, value in moments.items():
            name, _, key = label.rpartition(".")
            if name in self.parameters:
                by_parameter[self.parameters[name]][key] = _like(self.parameters[name], value)
        groups = self.optimizer.state_dict()["param_groups"]
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {number: by_parameter[parameter] for number, parameter in enumerate(ordered)}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(parameter: Tensor, value: Any) -> Any:
    """Give a tensor of the shape of ``parameter`` its memory format, which a fused update takes for granted."""
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    return value
