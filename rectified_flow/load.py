"""Load trained flows from their checkpoints, and set them up for sampling."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from typing_extensions import TypeVar

from rectified_flow.condition import chosen
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import UsageError, require
from rectified_flow.flows import Solver, TimeGrid
from rectified_flow.flows.flow import Flow, network_of
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.mean import MeanFlow  # noqa: F401  registers the class
from rectified_flow.flows.rectified import RectifiedFlow  # noqa: F401
from rectified_flow.flows.solvers import Guidance
from rectified_flow.networks.unet import to_device
from rectified_flow.registry import DescriptionError, build
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE, RunIdentity
from rectified_flow.runs.config import CHECKPOINTS
from rectified_flow.runs.folder import read_config
from rectified_flow.runs.snapshots import synthesize
from rectified_flow.spaces.autoencoders import PretrainedAutoencoder
from rectified_flow.spaces.latents import Latents
from rectified_flow.system.artifact import read_manifest

RESULTS_FILE = "evaluation.json"
"""The results of evaluate.py, in a run's folder."""
F = TypeVar("F", bound=nn.Module, default=Flow)


def load_flow(path: str | Path, kind: type[F] = Flow) -> F:  # type: ignore[assignment]  # Flow is a module
    """Load the flow of a checkpoint, or of a run's newest, ready to sample.

    Args:
        path: a checkpoint or a run's folder. Averaged weights are used if there are any.
        kind: the class that the flow must have.

    Raises:
        UsageError: if there is no checkpoint, it is damaged, its flow is of another class, or a class that it names is
            not registered.
    """
    return checkpoint.read(Path(path), lambda source: _read_flow(source, kind))


def build_flow(description: Mapping[str, Any], source: Path | str, kind: type[F] = Flow) -> F:  # type: ignore[assignment]
    """Build the flow of a description with fresh weights.

    Args:
        description: the description, by :func:`rectified_flow.registry.describe`.
        source: the file or folder that an error names.
        kind: the class that the flow must have.

    Raises:
        UsageError: if the description is of another class, or a class that it names is not registered.
    """
    try:
        flow = build(description)
    except DescriptionError as error:
        raise UsageError(f"{source}: {error}") from error
    if not isinstance(flow, kind):
        wanted = "flow" if kind in (Flow, nn.Module) else kind.__name__
        raise UsageError(f"{source} describes a {type(flow).__name__}, not a {wanted}")
    return flow


def _read_flow(source: Path, kind: type[F]) -> F:
    require(
        (source / FLOW_FILE).exists(),
        f"checkpoint {source} has no {FLOW_FILE}, as its flow or network was not registered in training: build the "
        "flow by hand and load its weights with rectified_flow.runs.checkpoint.load_averaged",
    )
    flow = build_flow(checkpoint.load_document(source, FLOW_FILE), source / FLOW_FILE, kind)
    checkpoint.load_averaged(network_of(flow), source)
    return flow.eval()


@dataclass(frozen=True)
class Trained:
    """The contents of a checkpoint, read at once, since its run may prune it at any time."""

    flow: Flow
    source: Path
    averaged: bool
    """Whether the flow has averaged weights."""
    config: Mapping[str, Any]
    """The contents of its ``config.json``; empty if there is none."""
    run: RunIdentity | None
    """Identity of the run that wrote the checkpoint; None if the checkpoint contains weights only."""

    @property
    def run_folder(self) -> Path:
        """The folder of the run that wrote the checkpoint, or of a ``--checkpoint_dir`` outside of it."""
        return self.source.parent.parent if self.source.parent.name == CHECKPOINTS else self.source.parent

    def weights_name(self, ema_length: float | None = None) -> str:
        """Return the name of the weights in reports: by default those loaded, else the EMA of that length."""
        if ema_length is not None:
            return f"average of length {ema_length:g}"
        return "averaged weights" if self.averaged else "last weights"


def load_trained(path: Path, state: PartialState, *, autoencoder: str | None = None, precision: str = "no") -> Trained:
    """Load a trained flow on this process's device, from the same checkpoint on all processes.

    Args:
        path: a checkpoint or a run's folder.
        state: the processes, which all call this function together.
        autoencoder: the folder or hub id of the flow's autoencoder, if it has moved since the training.
        precision: the precision of the network: ``no`` or ``bf16``.

    Raises:
        UsageError: if there is no checkpoint, it differs between machines, or it holds no :class:`Flow`; if its
            autoencoder is missing.
    """

    def read(source: Path) -> Trained:
        check_equal(state, lambda: {f"the manifest of {source}": checkpoint.fingerprint(source)})
        return read_trained(source)

    trained = checkpoint.read(path, read, state)
    space = trained.flow.space
    if autoencoder is not None:
        if not (isinstance(space, Latents) and isinstance(space.autoencoder, PretrainedAutoencoder)):
            raise UsageError(f"--autoencoder has no effect: {trained.source} holds no flow of an autoencoder's latents")
        space.autoencoder = PretrainedAutoencoder(autoencoder, space.autoencoder.fingerprint)
    space.prepare(state.device)
    to_device(trained.flow, state.device, precision)
    return trained


def read_trained(source: Path) -> Trained:
    """Read the flow of the checkpoint ``source``, and its record of the run.

    Raises:
        UsageError: if it is damaged, or holds no :class:`Flow`.
    """
    files = read_manifest(source).files  # not the files in the folder: the run may be removing some
    return Trained(
        flow=_read_flow(source, Flow),
        source=source,
        averaged=checkpoint.EMA_FILE in files,
        config=read_config(source / checkpoint.CONFIG_FILE) if checkpoint.CONFIG_FILE in files else {},
        run=checkpoint.load_state(source).run if checkpoint.STATE_FILE in files else None,
    )


def load_average(flow: Flow, snapshots: Mapping[Path, int], length: float) -> None:
    """Give ``flow`` the power-function EMA of this length at the last of these snapshots.

    Raises:
        UsageError: if there are too few snapshots for that length.
    """
    network_of(flow).load_state_dict(synthesize(snapshots, length), strict=False)  # snapshots contain no frozen weights


def solver_options(
    flow: Flow,
    source: Path,
    *,
    solver: Solver | None,
    time_grid: TimeGrid,
    guidance_scale: float,
    guidance_interval: tuple[float, float],
) -> dict[str, Any]:
    """Return the arguments of ``flow.sample`` for the flags of the same names.

    Raises:
        UsageError: if a flag has no effect on the flow of the checkpoint ``source``.
    """
    guidance = Guidance(guidance_scale, guidance_interval)
    defaults = {"solver": None, "grid": "uniform", "guidance": Guidance()}
    options = {"solver": solver, "grid": time_grid, "guidance": guidance}
    options = {name: value for name, value in options.items() if value != defaults[name]}
    accepted = inspect.signature(flow.sample).parameters
    unused = next((name for name in options if name not in accepted), None)
    if unused is not None:
        flag = {"solver": "solver", "grid": "time_grid", "guidance": "guidance_scale"}[unused]
        trained_in = ", which is guided in training, by train_mean_flow.py --guidance_scale"
        hint = trained_in if unused == "guidance" and isinstance(flow, FlowMap) else ""
        raise UsageError(f"--{flag} has no effect: {source} holds a {type(flow).__name__}{hint}")
    require(
        guidance.scale == 1 or len(chosen(flow.conditions)) > 0,
        f"--guidance_scale: {source} was trained without labels; train with --use_cfg for them",
    )
    return options


def solver_name(flow: Flow, options: Mapping[str, Any]) -> str | None:
    """Return the solver that ``flow.sample`` uses with these options; None if the flow has no choice of solvers."""
    default = inspect.signature(flow.sample).parameters.get("solver")
    return None if default is None else str(options.get("solver", default.default))


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which the network runs in ``precision``: ``no`` or ``bf16``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
