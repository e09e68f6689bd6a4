"""The flags of a run of each flow, beside those that all have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rectified_flow.errors import require, require_positive
from rectified_flow.flows.mean import ObjectiveName
from rectified_flow.flows.rectified import Loss, Prediction
from rectified_flow.training.config import TrainingConfig


@dataclass(frozen=True)
class RectifiedFlowFlags:
    prediction: Prediction = "velocity"
    """What the network predicts; the loss is that of the velocity in each case."""
    loss: Loss | None = None
    """Distance between predicted and true velocity (default: mse, and pseudo_huber with --reflow_from)."""
    time_distribution: Literal["logit_normal", "uniform", "u_shaped"] | None = None
    """Where training times come from, 0 being data (default: logit_normal, and u_shaped with --reflow_from)."""
    time_mean: float = -0.5
    """Mean of the time's logit, for logit_normal."""
    time_std: float = 1.2
    """Standard deviation of the time's logit, for logit_normal."""
    time_shift: float = 1.0
    """Move times towards the noise (above 1) or the data (below 1); not for u_shaped."""


@dataclass(frozen=True)
class ReflowFlags:
    reflow_from: Path | None = None
    """Straighten the rectified flow of this run or checkpoint, whose pictures and network it keeps, for fewer steps."""
    reflow_pairs: int | None = None
    """Pictures it draws to be trained on, each with its noise (default: 50000)."""
    reflow_steps: int | None = None
    """Intervals that each is drawn in (default: 16)."""
    pairs_dir: Path | None = None
    """Where they are kept (default: OUTPUT_DIR/pairs); a second run may name those of the first."""


@dataclass(frozen=True)
class RectifiedFlowConfig(ReflowFlags, RectifiedFlowFlags, TrainingConfig):
    """A training run of a rectified flow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("time_std", "time_shift", "reflow_pairs", "reflow_steps"):
            require_positive(self, name)
        without_use = {"uniform": ["time_mean", "time_std"], "u_shaped": ["time_mean", "time_std", "time_shift"]}
        for name in without_use.get(self.times, ()):
            require(
                getattr(self, name) == getattr(RectifiedFlowFlags, name),
                f"--{name} has no use here, as the time distribution is {self.times}: leave it out, or pass "
                "--time_distribution logit_normal",
            )
        require(
            self.reflow_from is None or self.coupling == "independent",
            "--coupling and --reflow_from exclude each other: the pictures it draws have their noise",
        )
        for name in ("reflow_pairs", "reflow_steps", "pairs_dir"):
            require(
                getattr(self, name) is None or self.reflow_from is not None, f"--{name} is for --reflow_from: give one"
            )

    @property
    def times(self) -> str:
        """The name of the time distribution."""
        return self.time_distribution or ("logit_normal" if self.reflow_from is None else "u_shaped")


@dataclass(frozen=True)
class MeanFlowFlags:
    objective: ObjectiveName = "improved_mean_flow"
    """Which of the papers' objectives to learn by; alpha_flow and so_flow want float32."""
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
    """Guidance inside what is learned, so that sampling needs none; with --use_cfg."""
    guidance_mixing: float = 0.0
    """Share of the network's own velocity in it; the effective scale is guidance_scale / (1 - guidance_mixing)."""
    init_from: Path | None = None
    """Start from the weights of this checkpoint or run, of a rectified flow for example."""


@dataclass(frozen=True)
class MeanFlowConfig(MeanFlowFlags, TrainingConfig):
    """A training run of a mean flow."""

    @property
    def bears_bf16(self) -> bool:
        """Not where a finite step shrinks until its difference is lost in rounding."""
        return self.objective not in ("alpha_flow", "so_flow")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("time_std", "earlier_std"):
            require_positive(self, name)
        require(0 <= self.mean_fraction <= 1, f"--mean_fraction is {self.mean_fraction}; it must be in [0, 1]")
        require(0 <= self.guidance_mixing < 1, f"--guidance_mixing is {self.guidance_mixing}; it must be in [0, 1)")
        require(
            self.use_cfg or (self.guidance_scale, self.guidance_mixing) == (1, 0),
            "--guidance_scale and --guidance_mixing need labels: pass --use_cfg",
        )
