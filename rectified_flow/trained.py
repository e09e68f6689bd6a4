"""A trained flow and how to sample from it: what sample.py and evaluate.py have in common."""

import tempfile
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState

from rectified_flow import averages, checkpoint
from rectified_flow.errors import UsageError, require, require_positive
from rectified_flow.flows import Flow, RectifiedFlow
from rectified_flow.flows.guidance import Guidance
from rectified_flow.flows.solvers import Solver
from rectified_flow.flows.time_grids import TimeGrid
from rectified_flow.networks import place
from rectified_flow.processes.collectives import on_main


@dataclass(frozen=True)
class ModelFlags:
    checkpoint: Path = Path("runs/rectified-flow")
    """A run's folder, for its newest checkpoint, or a checkpoint; averaged weights are taken if there are any."""


@dataclass(frozen=True)
class SolverFlags:
    solver: Solver | None = None
    """How a rectified flow crosses an interval (default: midpoint); adaptive chooses its own steps."""
    time_grid: TimeGrid = "uniform"
    """How the intervals are cut: all alike, or denser near the noise, or as in EDM."""
    guidance_scale: float = 1.0
    """Above 1, pictures that show their class more clearly, and vary less; for a rectified flow with classes."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """First and last noise level at which guidance acts."""


@dataclass(frozen=True)
class PrecisionFlags:
    batch_size: int = 64
    """Pictures drawn at once by each process."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Precision of the network."""


def check_common(config: Any) -> None:
    """See that what all programs here are told makes sense.

    Raises:
        UsageError: if it does not.
    """
    require_positive(config, "batch_size")
    require(0 <= config.seed < 2**32, f"--seed is {config.seed}; it must be at least 0 and below 2**32")
    scale, (first, last) = config.guidance_scale, config.guidance_interval
    require(isfinite(scale) and scale >= 0, f"--guidance_scale is {scale}; it must not be below 0")
    require(first < last, f"--guidance_interval is {first:g} {last:g}; the first number must be the smaller one")
    require(
        scale != 1 or (first, last) == (0, 1),
        f"--guidance_interval {first:g} {last:g} needs a --guidance_scale other than 1",
    )
    require(
        config.solver != "adaptive" or not config.steps, "--steps and --solver adaptive exclude each other; give one"
    )


def load_flow(config: ModelFlags, precision: str, state: PartialState) -> tuple[Flow, Path]:
    """The flow of a run or checkpoint, on this process's device, and the checkpoint, the same one on all processes.

    Raises:
        UsageError: if there is none.
    """
    source = on_main(state, lambda: checkpoint.resolve(config.checkpoint))
    return place(Flow.from_checkpoint(source), state.device, precision), source


def load_average(flow: Flow, source: Path, length: float) -> None:
    """Give ``flow`` the power-function average of that length at the checkpoint ``source``.

    Raises:
        UsageError: if the run kept nothing to make it from.
    """
    flow.network.load_state_dict(averages.synthesize(source, length))


def weights_of(source: Path, length: float | None = None) -> str:
    """Which of a checkpoint's weights are used, in words."""
    if length is not None:
        return f"average of length {length:g}"
    return "averaged weights" if checkpoint.averaged_weights(source) == checkpoint.EMA_FILE else "last weights"


def prepare_folder(flag: str, folder: Path) -> Path:
    """``folder``, made and seen to be writable.

    Raises:
        UsageError: if it is not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--{flag} {folder} cannot be written: {error.strerror}") from error
    return folder


def solver_options(config: SolverFlags, flow: Flow, source: Path) -> dict[str, Any]:
    """Arguments of ``flow.sample``.

    Raises:
        UsageError: if the flow of the checkpoint ``source`` has no use for them.
    """
    guidance = Guidance(config.guidance_scale, config.guidance_interval)
    if isinstance(flow, RectifiedFlow):
        require(
            guidance.scale == 1 or flow.num_classes is not None,
            f"--guidance_scale: {source} was trained without labels; train with --use_cfg for them",
        )
        solver = {} if config.solver is None else {"solver": config.solver}
        return {"grid": config.time_grid, "guidance": guidance, **solver}
    kind = type(flow).__name__
    require(config.solver is None, f"--solver is for a rectified flow, and {source} holds a {kind}")
    require(
        guidance.scale == 1,
        f"--guidance_scale is for a rectified flow: {source} holds a {kind}, which is guided in training, by "
        "train_mean_flow.py --guidance_scale",
    )
    return {"grid": config.time_grid}


def run_folder_of(source: Path) -> Path:
    """The folder of the run that a checkpoint is of; with a --checkpoint_dir of its own, that one."""
    return source.parent.parent if source.parent.name == checkpoint.CHECKPOINTS else source.parent


def autocast(config: PrecisionFlags, device: torch.device) -> torch.autocast:
    """The precision in which the network runs."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16")
