"""Everything a run must remember between two steps, and how it becomes a checkpoint and comes back."""

from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from ema_pytorch import EMA
from torch import Tensor, nn

from rectified_flow import checkpoint
from rectified_flow.averages import PowerAverages
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.saved import FLOW_FILE

OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS = ("step", "images_seen", "updates", "bad_steps", "bad_in_a_row", "scaler_skips")


class TrainingState:
    """Weights, their average, the optimizer's moments and the counters.

    There is no random state in it and no loader state: both are functions of the seed and the counters.

    Args:
        flow: the module in training, not wrapped.
        ema: its average of constant decay, or None.
        power: its power-function averages, or None.
        optimizer: over ``parameters``, as prepared by Accelerate.
        parameters: the trained parameters by name, in the optimizer's order.
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
        """Steps skipped for a loss or gradient that was not finite, and those of them since the last good one."""
        self.bad_in_a_row = 0
        self.scaler_skips = 0
        """Steps skipped because the loss scale of fp16 was too large."""
        self.sums: dict[str, Tensor] = {}
        """This rank's loss, and what else its flow logs, summed over good steps since the last logged one."""
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
        """Take in the weights after a good step."""
        for average in (self.ema, self.power):
            if average is not None:
                average.update()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's tensors by file."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.optimizer.state[parameter].items()
        }
        files = {checkpoint.MODEL_FILE: network_of(self.flow).state_dict(), OPTIMIZER_FILE: moments}
        if self.ema is not None:
            files[checkpoint.EMA_FILE] = network_of(self.ema.ema_model).state_dict()
        return files if self.power is None else files | self.power.tensors()

    def documents(
        self, config: dict[str, Any], run: dict[str, Any], sums: dict[str, list[float]]
    ) -> dict[str, dict[str, Any]]:
        """A checkpoint's other files: the run's flags and identity, its numbers, and how its flow is built.

        Args:
            config: the flags.
            run: what makes it the same run.
            sums: this state's, by rank.
        """
        description = self.flow.describe() if isinstance(self.flow, Flow) else None
        files = {checkpoint.CONFIG_FILE: config, checkpoint.STATE_FILE: self._counters(sums) | {"run": run}}
        return files if description is None else files | {FLOW_FILE: description}

    def _counters(self, sums: dict[str, list[float]]) -> dict[str, Any]:
        scaler = self.optimizer.scaler
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "sums": sums,
            "summands": self.summands,
            "ema_step": None if self.ema is None else int(self.ema.step),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
        }

    def load(self, path: Path, rank: int = 0, world_size: int = 1) -> None:
        """Become what the checkpoint at ``path`` holds for one of the ranks.

        Raises:
            UsageError: if it was made by another architecture.
        """
        checkpoint.load_weights(network_of(self.flow), path, checkpoint.MODEL_FILE)
        counters = checkpoint.load_document(path, checkpoint.STATE_FILE)
        # Those that version 0.1 did not have yet.
        counters = dict.fromkeys(COUNTERS, 0) | {"updates": counters["step"]} | counters
        if self.ema is not None:
            checkpoint.load_weights(network_of(self.ema.ema_model), path, checkpoint.averaged_weights(path))
            self.ema.initted.fill_(True)
            self.ema.step.fill_(counters["ema_step"] or 0)
        if self.power is not None:
            self.power.load(path, counters["updates"])
        self._load_moments(checkpoint.load_tensors(path, OPTIMIZER_FILE))
        if self.optimizer.scaler is not None and counters["grad_scaler"] is not None:
            self.optimizer.scaler.load_state_dict(counters["grad_scaler"])
        for name in COUNTERS:
            setattr(self, name, counters[name])
        device = next(iter(self.parameters.values())).device
        # As many ranks as there were: each goes on with its own sums, to the last bit. Else all with the mean.
        mine = {
            name: by_rank[rank] if len(by_rank) == world_size else fmean(by_rank)
            for name, value in counters["sums"].items()
            for by_rank in [value if isinstance(value, list) else [value]]
        }
        self.sums = {name: torch.tensor(value, device=device) for name, value in mine.items()}
        self.summands = counters["summands"]

    def _load_moments(self, moments: dict[str, Tensor]) -> None:
        """Take them in, each in the memory format of its parameter, which the fused update takes for granted."""
        numbered: dict[int, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            prefix = f"{name}."
            numbered[index] = {
                key.removeprefix(prefix): value if key == f"{prefix}step" else torch.empty_like(parameter).copy_(value)
                for key, value in moments.items()
                if key.startswith(prefix) and "." not in key.removeprefix(prefix)
            }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def network_of(flow: nn.Module) -> nn.Module:
    """The module whose weights are a flow's: its ``network``, if nothing outside of that has any."""
    network = getattr(flow, "network", None)
    if isinstance(network, nn.Module) and len(network.state_dict()) == len(flow.state_dict()):
        return network
    return flow
