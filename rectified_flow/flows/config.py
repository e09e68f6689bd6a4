"""The flags of each flow."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from rectified_flow.errors import require, require_finite, require_natural, require_positive
from rectified_flow.flags import check_paths, default_is
from rectified_flow.runs.config import require_room_for_steps

Coupling = Literal["independent", "ot", "immiscible"]
Prediction = Literal["velocity", "clean", "noise"]
Distance = Literal["mse", "pseudo_huber"]
ObjectiveName = Literal["mean_flow", "improved_mean_flow", "so_flow"]
RemovedObjective = Literal["alpha_flow", "shortcut"]
"""Objectives of earlier versions, by whose checkpoints a flow can be sampled, and not trained."""
Solver = Literal["euler", "midpoint", "heun", "stochastic", "adaptive"]
TimeGrid = Literal["uniform", "shifted", "edm"]


@dataclass(frozen=True)
class CouplingConfig:
    """The pairing of data with noise."""

    coupling: Coupling = "independent"
    """Which noise an image is trained with: any, the best match over the global batch (ot), or the nearest of some."""


@dataclass(frozen=True)
class RectifiedFlowConfig:
    """A rectified flow's objective."""

    prediction: Prediction = "velocity"
    """The meaning of the network's output; the loss is that of the velocity in each case."""
    loss: Annotated[Distance | None, default_is("mse, and pseudo_huber with --reflow_from")] = None
    """Distance between predicted and true velocity."""
    time_distribution: Annotated[
        Literal["logit_normal", "uniform", "u_shaped"] | None,
        default_is("logit_normal, and u_shaped with --reflow_from"),
    ] = None
    """Distribution of the training times, 0 being data."""
    time_mean: float = -0.5
    """Mean of the time's logit, for logit_normal."""
    time_std: float = 1.2
    """Standard deviation of the time's logit, for logit_normal."""
    time_shift: float = 1.0
    """Move times towards the noise (above 1) or the data (below 1); not for u_shaped."""

    def __post_init__(self) -> None:
        require_finite(self)
        require_positive(self, "time_std", "time_shift")

    def check_times(self, times: str) -> None:
        """Raise a UsageError if a flag is given that the distribution of ``times`` does not use."""
        unused = {"uniform": ["time_mean", "time_std"], "u_shaped": ["time_mean", "time_std", "time_shift"]}
        for name in unused.get(times, ()):
            require(
                getattr(self, name) == getattr(RectifiedFlowConfig, name),
                f"--{name} has no effect, as the time distribution is {times}: leave it out, or pass "
                "--time_distribution logit_normal",
            )


@dataclass(frozen=True)
class ReflowConfig:
    """Reflow: training on pairs that a trained flow draws."""

    reflow_from: Path | None = None
    """Straighten the rectified flow of this run or checkpoint, whose data and network flags it inherits."""
    reflow_pairs: Annotated[int | None, default_is("50000")] = None
    """Pictures that it draws to train on, each with its noise."""
    reflow_steps: Annotated[int | None, default_is("16")] = None
    """Intervals that each picture is drawn in."""
    pairs_dir: Annotated[Path | None, default_is("OUTPUT_DIR/pairs")] = None
    """Folder of the pairs; a second run may name that of the first."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_positive(self, "reflow_pairs", "reflow_steps")
        require_room_for_steps("reflow_steps", self.reflow_steps or 1)
        for name in ("reflow_pairs", "reflow_steps", "pairs_dir"):
            require(
                getattr(self, name) is None or self.reflow_from is not None,
                f"--{name} needs --reflow_from: pass the run to start from",
            )


@dataclass(frozen=True)
class TeacherConfig:
    """A trained rectified flow to learn average velocities from, instead of from pictures."""

    teacher: Path | None = None
    """Learn from the rectified flow of this run or checkpoint, whose data and network flags it inherits."""
    teacher_paths: Annotated[int | None, default_is("5000")] = None
    """Paths from noise to picture that it draws to train on."""
    teacher_steps: Annotated[int | None, default_is("16")] = None
    """Intervals that each path is drawn in; sampling in more steps than that asks for what was never learned."""
    whole_fraction: Annotated[float | None, default_is("0.5")] = None
    """Share of each batch that learns whole paths, for one step; the rest learns parts of paths, for more steps."""
    paths_dir: Annotated[Path | None, default_is("OUTPUT_DIR/paths")] = None
    """Folder of the paths; a second run may name that of the first."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        require_positive(self, "teacher_paths", "teacher_steps")
        require_room_for_steps("teacher_steps", self.teacher_steps or 1)
        fraction = self.whole_fraction
        require(fraction is None or 0 <= fraction <= 1, f"--whole_fraction is {fraction}; it must be in [0, 1]")
        for name in ("teacher_paths", "teacher_steps", "whole_fraction", "paths_dir"):
            require(
                getattr(self, name) is None or self.teacher is not None,
                f"--{name} needs --teacher: pass the run of a rectified flow",
            )


@dataclass(frozen=True)
class MeanFlowConfig:
    """A mean flow's objective."""

    objective: ObjectiveName = "improved_mean_flow"
    """Which of the papers' objectives to learn by; so_flow needs float32."""
    mean_fraction: float = 0.5
    """Share of each batch that learns average velocities; the rest learns the velocity as in rectified flow."""
    weight_power: float = 0.75
    """Rows are weighted by their squared error to minus this power; 0 weights all alike."""
    weight_epsilon: float = 1e-3
    """Added to the squared error before the power."""
    time_mean: float = -0.6
    """Mean of the logit of the time t."""
    time_std: float = 1.6
    """Standard deviation of the logit of the time t."""
    earlier_mean: float = -4.0
    """Mean of the logit of the earlier time r."""
    earlier_std: float = 1.6
    """Standard deviation of the logit of the earlier time r."""
    guidance_scale: float = 1.0
    """Guidance inside the training target, so that sampling needs none; with --use_cfg. Of a teacher, as it draws."""
    guidance_mixing: float = 0.0
    """Share of the network's own velocity in it; the effective scale is guidance_scale / (1 - guidance_mixing)."""

    def __post_init__(self) -> None:
        require_finite(self)
        require_positive(self, "time_std", "earlier_std", "weight_epsilon")
        require_natural(self, "weight_power", "guidance_scale")
        require(0 <= self.mean_fraction <= 1, f"--mean_fraction is {self.mean_fraction}; it must be in [0, 1]")
        require(0 <= self.guidance_mixing < 1, f"--guidance_mixing is {self.guidance_mixing}; it must be in [0, 1)")

    def check_teacher(self) -> None:
        """Raise a UsageError if a flag is given that learning from a teacher does not use."""
        for each in fields(self):
            require(
                each.name in ("weight_power", "weight_epsilon", "guidance_scale")
                or getattr(self, each.name) == each.default,
                f"--{each.name} has no effect with --teacher, whose paths are learned by regression: leave it out",
            )
