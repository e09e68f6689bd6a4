"""A trained flow and how to sample from it: what sample.py and evaluate.py share."""

import inspect
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from rectified_flow.cli.flags import ModelConfig, SolverConfig
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import require
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.guidance import Guidance
from rectified_flow.flows.saved import network_of
from rectified_flow.networks.conditions import Labels
from rectified_flow.networks.placing import to_device
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import CHECKPOINTS
from rectified_flow.runs.snapshots import synthesize


def load_trained(config: ModelConfig, state: PartialState) -> tuple[Flow, Path]:
    """The flow of a run or checkpoint, on this process's device, and the checkpoint, the same one on all processes.

    Raises:
        UsageError: if there is none, or it is not a :class:`Flow`.
    """
    source = on_main(state, lambda: checkpoint.resolve(config.checkpoint))
    return to_device(Flow.from_checkpoint(source), state.device, config.mixed_precision), source


def load_average(flow: Flow, source: Path, length: float) -> None:
    """Give ``flow`` the power-function average of that length at the checkpoint ``source``.

    Raises:
        UsageError: if the run kept no snapshots to make it from.
    """
    network_of(flow).load_state_dict(synthesize(source, length), strict=False)  # frozen weights are in no snapshot


def weights_name(source: Path, length: float | None = None) -> str:
    """Which of a checkpoint's weights are used, in words."""
    if length is not None:
        return f"average of length {length:g}"
    return "averaged weights" if checkpoint.has_averages(source) else "last weights"


def class_names(flow: Flow) -> list[str]:
    """The names of the classes that the flow can be given; empty if it takes no labels."""
    labels = flow.conditions.get("labels")
    if not isinstance(labels, Labels):
        return []
    return list(labels.names) or [str(label) for label in range(labels.num_classes)]


def solver_options(config: SolverConfig, flow: Flow, source: Path) -> dict[str, Any]:
    """Arguments of ``flow.sample``.

    Raises:
        UsageError: if the flow of the checkpoint ``source`` has no use for them.
    """
    guidance = Guidance(config.guidance_scale, config.guidance_interval)
    options: dict[str, Any] = {}
    kind, accepted = type(flow).__name__, inspect.signature(flow.sample).parameters
    given = {
        "solver": ("solver", config.solver, None),
        "time_grid": ("grid", config.time_grid, "uniform"),
        "guidance_scale": ("guidance", guidance, Guidance()),
    }
    for flag, (name, value, default) in given.items():
        if value != default:
            where = ", which is guided in training, by train_mean_flow.py --guidance_scale" * (kind == "MeanFlow")
            require(name in accepted, f"--{flag} has no effect: {source} holds a {kind}{where * (name == 'guidance')}")
            options[name] = value
    require(
        guidance.scale == 1 or len(flow.conditions) > 0,
        f"--guidance_scale: {source} was trained without labels; train with --use_cfg for them",
    )
    return options


def solver_name(flow: Flow, options: dict[str, Any]) -> str | None:
    """The solver that ``flow.sample`` uses with these options; None if it has one way only."""
    default = inspect.signature(flow.sample).parameters.get("solver")
    return None if default is None else str(options.get("solver", default.default))


def run_folder_of(source: Path) -> Path:
    """The folder of the run that a checkpoint is of; with a --checkpoint_dir of its own, that one."""
    return source.parent.parent if source.parent.name == CHECKPOINTS else source.parent


def autocast(config: ModelConfig, device: torch.device) -> torch.autocast:
    """The precision in which the network runs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16")
