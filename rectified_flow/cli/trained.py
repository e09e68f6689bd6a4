"""A trained flow and how to sample from it: what sample.py and evaluate.py share."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from rectified_flow.cli.run_flags import ModelConfig, SolverConfig
from rectified_flow.condition import Labels, chosen
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import UsageError, require
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.saved import network_of
from rectified_flow.flows.solvers import Guidance
from rectified_flow.networks.unet import to_device
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import RunIdentity
from rectified_flow.runs.config import CHECKPOINTS
from rectified_flow.runs.document import read_config
from rectified_flow.runs.manifest import read_manifest
from rectified_flow.runs.snapshots import synthesize
from rectified_flow.spaces.autoencoders import PretrainedAutoencoder
from rectified_flow.spaces.latents import Latents


@dataclass(frozen=True)
class Trained:
    """All that is read of a checkpoint, which its run may prune at any time."""

    flow: Flow
    source: Path
    averaged: bool
    """Whether the flow has averaged weights."""
    config: Mapping[str, Any]
    """The contents of its ``config.json``; empty if there is none."""
    run: RunIdentity | None
    """None in a checkpoint of weights alone."""

    def weights_name(self, length: float | None = None) -> str:
        """Which weights are used, in words; with a ``length``, those of :func:`load_average`."""
        if length is not None:
            return f"average of length {length:g}"
        return "averaged weights" if self.averaged else "last weights"


def load_trained(config: ModelConfig, state: PartialState) -> Trained:
    """The flow of a run or checkpoint, on this process's device, from the same checkpoint on all processes.

    Raises:
        UsageError: if there is none, another one is there on another machine, or it is not a :class:`Flow`; if its
            autoencoder is not there.
    """

    def read(source: Path) -> Trained:
        check_equal(state, lambda: {f"the manifest of {source}": checkpoint.fingerprint(source)})
        return read_trained(source)

    trained = checkpoint.read(config.checkpoint, read, state)
    if config.autoencoder is not None:
        _move_autoencoder(trained, config.autoencoder)
    trained.flow.space.prepare(state.device)
    to_device(trained.flow, state.device, config.mixed_precision)
    return trained


def _move_autoencoder(trained: Trained, name: str) -> None:
    """Take the autoencoder from elsewhere, if it has the same weights."""
    space = trained.flow.space
    if not (isinstance(space, Latents) and isinstance(space.autoencoder, PretrainedAutoencoder)):
        raise UsageError(f"--autoencoder has no effect: {trained.source} holds no flow of an autoencoder's latents")
    space.autoencoder = PretrainedAutoencoder.at(name, space.autoencoder.fingerprint)


def read_trained(source: Path) -> Trained:
    """The flow of the checkpoint ``source``, and what it says about itself.

    Raises:
        UsageError: if it is damaged, or holds no :class:`Flow`.
    """
    files = read_manifest(source).files  # not those that are there: the run may be removing them
    return Trained(
        flow=Flow.from_checkpoint(source),
        source=source,
        averaged=checkpoint.EMA_FILE in files,
        config=read_config(source / checkpoint.CONFIG_FILE) if checkpoint.CONFIG_FILE in files else {},
        run=checkpoint.load_state(source).run if checkpoint.STATE_FILE in files else None,
    )


def load_average(flow: Flow, snapshots: Mapping[Path, int], length: float) -> None:
    """Give ``flow`` the power-function average of that length at the last of these snapshots.

    Raises:
        UsageError: if there are too few for that length.
    """
    network_of(flow).load_state_dict(synthesize(snapshots, length), strict=False)  # frozen weights are in none


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
            where = ", which is guided in training, by train_mean_flow.py --guidance_scale" * isinstance(flow, FlowMap)
            require(name in accepted, f"--{flag} has no effect: {source} holds a {kind}{where * (name == 'guidance')}")
            options[name] = value
    require(
        guidance.scale == 1 or len(chosen(flow.conditions)) > 0,
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
