"""The flags of the network, of the flow and of its teacher."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Len

from rectified_flow.flags import (
    Flags,
    Fraction,
    NonNegative,
    Options,
    Positive,
    PositiveNumber,
    Probability,
    default_is,
    refuse,
)
from rectified_flow.flows import WEIGHT_POWER, Coupling, Distance, ObjectiveName, Prediction, Solver
from rectified_flow.system.machine import require_memory

BYTES_PER_WEIGHT = 16
"""Least training memory of a weight: itself, its gradient and two moments in float32."""
UNET = "Unet"
Method = Literal["distill", "reflow", "mean_flow"]
STARTER = Path("starter")
"""Value of ``--init_from`` for the weights that are installed with the package."""
STARTER_FOLDER = Path(__file__).parents[2] / "networks" / STARTER


@dataclass(frozen=True)
class NetworkConfig(Flags):
    """The network."""

    network: str = UNET
    """Unet, or a registered network."""
    network_options: Options = ()
    """Arguments of the network."""
    dim: Positive = 64
    """Channels of the Unet at full resolution."""
    dim_mults: Annotated[tuple[Positive, ...], Len(1)] = (1, 2, 3, 4)
    """Channels of each level as multiples of dim; each level halves the side."""
    dropout: Fraction = 0.1
    """Dropout probability inside residual blocks of the Unet."""
    use_cfg: bool = False
    """Train on the labels of subfolders, dropping 10%, so that sampling can be guided (classifier-free guidance)."""
    init_from: Path | None = None
    """Initialise from the weights of this checkpoint or run whose shapes match; starter: those that are installed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A level has at least two blocks down and three up, each of two 3x3 convolutions.
        weights = sum(2 * (2 + 3) * 9 * (self.dim * mult) ** 2 for mult in self.dim_mults)
        what = f"a Unet of --dim {self.dim} and --dim_mults {' '.join(map(str, self.dim_mults))}"
        require_memory(BYTES_PER_WEIGHT * weights, what, "lower one of the two")

    @property
    def origin(self) -> Path | None:
        """Checkpoint or run that the weights are initialised from, if any."""
        return STARTER_FOLDER if self.init_from == STARTER else self.init_from


@dataclass(frozen=True)
class FlowConfig(Flags):
    """The flow and its objective, as far as all flows share it."""

    flow: Annotated[str | None, default_is("the program's")] = None
    """Registered flow to train instead."""
    flow_options: Options = ()
    """Arguments of the flow."""
    coupling: Coupling = "independent"
    """Pairing of images and noise: independent, minibatch optimal transport, or the nearest of 8."""
    time_options: Options = ()
    """Arguments of the time distribution."""


@dataclass(frozen=True)
class RectifiedFlowConfig(FlowConfig):
    """A rectified flow's objective."""

    prediction: Prediction = "velocity"
    """Output of the network; the loss is that of the velocity in each case."""
    loss: Annotated[Distance | None, default_is("mse, and pseudo_huber with --reflow_from")] = None
    """Distance between predicted and true velocity."""
    time_distribution: Annotated[str | None, default_is("logit_normal, and u_shaped with --reflow_from")] = None
    """Distribution of the training times, 0 being data: logit_normal, uniform, u_shaped, or a registered one."""
    time_mean: float = -0.5
    """Mean of the time's logit, for logit_normal."""
    time_std: PositiveNumber = 1.2
    """Standard deviation of the time's logit, for logit_normal."""
    time_shift: PositiveNumber = 1.0
    """Shift of times towards the noise (above 1) or the data (below 1); not for u_shaped."""


@dataclass(frozen=True)
class MeanFlowConfig(FlowConfig):
    """Training method of the one-step generator, and objective of a mean flow."""

    method: Annotated[Method | None, default_is("distill with --teacher, else mean_flow")] = None
    """Learn from the paths of --teacher (distill), from their end points (reflow), or from the pictures (mean_flow)."""
    objective: ObjectiveName = "improved_mean_flow"
    """Objective of the paper of this name."""
    mean_fraction: Probability = 0.5
    """Fraction of each batch that learns average velocities; the rest learns the velocity as in rectified flow."""
    weight_power: NonNegative = WEIGHT_POWER
    """Rows are weighted by their squared error to minus this power; 0 weights all alike."""
    weight_epsilon: PositiveNumber = 1e-3
    """Added to the squared error before the power."""
    time_distribution: Annotated[str | None, default_is("logit_normal")] = None
    """Distribution of the time t, 0 being data: logit_normal, uniform, u_shaped, or a registered one."""
    time_mean: float = -0.6
    """Mean of the logit of the time t."""
    time_std: PositiveNumber = 1.6
    """Standard deviation of the logit of the time t."""
    earlier_mean: float = -4.0
    """Mean of the logit of the earlier time r."""
    earlier_std: PositiveNumber = 1.6
    """Standard deviation of the logit of the earlier time r."""
    guidance_scale: NonNegative = 1.0
    """Guidance inside the training target, so that sampling needs none; of the teacher, with --teacher."""
    guidance_mixing: Fraction = 0.0
    """Share of the network's own velocity in the target; the scale is then guidance_scale / (1 - guidance_mixing)."""


@dataclass(frozen=True)
class TeacherData:
    """The data that a teacher generates for a run.

    Args:
        flag: the flag that names the teacher.
        source: the teacher's run or checkpoint.
        rows: ``pairs`` of noise and data, or ``paths`` between them.
        count: the number of them.
        folder: where they are stored.
        steps: intervals of each sample.
        guidance_scale: guidance of the teacher.
        solver: solver of an interval.
        autoguidance: autoguidance of the teacher by its early checkpoint.
    """

    flag: str
    source: Path
    rows: Literal["pairs", "paths"]
    count: int
    folder: Path
    steps: int
    guidance_scale: float = 1.0
    solver: Solver = "midpoint"
    autoguidance: float = 1.0

    @property
    def points(self) -> int:
        """Points that are kept of each path beside its end; the noise alone for pairs."""
        return max(1, self.path_points)

    @property
    def path_points(self) -> int:
        """Points of each path in the training data, 0 for pairs."""
        return self.steps if self.rows == "paths" else 0

    @property
    def steps_flag(self) -> str:
        """Name of the flag for the steps of each sample."""
        return f"{self.flag.removesuffix('_from')}_steps"

    @property
    def count_flag(self) -> str:
        """Name of the flag for the number of pairs or paths."""
        return f"{self.flag.removesuffix('_from')}_{self.rows}"


@dataclass(frozen=True)
class TeacherFlags(Flags):
    """Teacher-generated training data. The first flag names the teacher, which all others need."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {each.name: getattr(self, each.name) is not None for each in fields(self)}
        teacher = next(iter(given))
        if not given[teacher]:
            refuse(given, f"needs --{teacher}: pass the run of a rectified flow")


@dataclass(frozen=True)
class ReflowConfig(TeacherFlags):
    """Teacher-generated training data: pairs of noise and data."""

    reflow_from: Path | None = None
    """Straighten the rectified flow of this run or checkpoint; data and network flags are inherited from it."""
    reflow_pairs: Annotated[Positive | None, default_is("50000")] = None
    """Number of pairs of noise and image to generate."""
    reflow_steps: Annotated[Positive | None, default_is("16")] = None
    """Sampling steps of each image."""
    pairs_dir: Annotated[Path | None, default_is("OUTPUT_DIR/pairs")] = None
    """Folder of the pairs, which several runs may share."""


@dataclass(frozen=True)
class TeacherConfig(TeacherFlags):
    """Teacher-generated training data: paths from noise to data."""

    teacher: Path | None = None
    """Distil the rectified flow of this run or checkpoint; data and network flags are inherited from it."""
    teacher_paths: Annotated[Positive | None, default_is("5000")] = None
    """Number of paths from noise to image to generate."""
    teacher_steps: Annotated[Positive | None, default_is("8")] = None
    """Sampling steps of each path, with the solver ab2."""
    autoguidance: Annotated[NonNegative | None, default_is("1")] = None
    """Scale of autoguidance with which the teacher samples paths, away from an early checkpoint of its run."""
    whole_fraction: Annotated[Probability | None, default_is("0.75 with a budget, else 0.5")] = None
    """Fraction of each batch that learns whole paths, for one step; the rest learns parts of paths, for more steps."""
    paths_dir: Annotated[Path | None, default_is("OUTPUT_DIR/paths")] = None
    """Folder of the paths, which several runs may share."""
