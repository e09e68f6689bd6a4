"""The flags of the training program. Imports no torch, so that ``--help`` answers at once."""

import re
from dataclasses import dataclass, field
from os.path import realpath
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from annotated_types import Interval, Len

from rectified_flow.data.config import ColumnConfig, DataConfig, RunData, SourceConfig
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import (
    AtLeastTwo,
    Flags,
    Fraction,
    Natural,
    NonNegative,
    Part,
    Positive,
    changed_flags,
    default_is,
    flag,
    name_of,
)
from rectified_flow.flows import Coupling, Prediction
from rectified_flow.runs.config import TrainingConfig

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # units of --budget
UNET = "Unet"
STARTER, NO_WEIGHTS = Path("starter"), Path("none")  # values of --init_from that are not folders
STARTERS = Path(__file__).parents[1] / "networks" / "starters"
"""Folder of the weights that are installed with the package, with a subfolder for each value of ``starter``."""
Method = Literal["rectified", "mean_flow", "distill", "reflow"]


@dataclass(frozen=True)
class NetworkConfig(Flags):
    """The network."""

    network: Part = (UNET,)
    """Unet, or a registered network, and its arguments, such as blocks_per_level=1."""
    dim: Annotated[int, Interval(gt=0, le=4096)] = 64
    """Channels of the Unet at full resolution."""
    dim_mults: Annotated[tuple[Annotated[int, Interval(gt=0, le=64)], ...], Len(1)] = (1, 2, 3, 4)
    """Channels of each level as multiples of dim; each level halves the side."""
    dropout: Fraction = 0.1
    """Dropout probability inside residual blocks of the Unet."""
    use_cfg: bool = False
    """Train on the labels of subfolders, dropping 10%, so that sampling can be guided (classifier-free guidance)."""
    gradient_checkpointing: Annotated[bool, flag(local=True)] = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""


@dataclass(frozen=True)
class FlowConfig(Flags):
    """The training method and its objective."""

    method: Annotated[Method | None, default_is("rectified; one-step: distill with --teacher, else mean_flow")] = None
    """Rectified flow, or a one-step generator: mean_flow from pictures, distill from the paths of --teacher, or reflow
    from their end points."""
    flow: Annotated[Part, default_is("that of --method")] = ()
    """Registered flow to train instead, and its arguments, such as distance=pseudo_huber."""
    prediction: Annotated[Prediction, flag(excludes="one_step")] = "velocity"
    """Output of the network of a rectified flow; the loss is that of the velocity in each case."""
    coupling: Annotated[Coupling, flag(excludes="teacher")] = "independent"
    """Pairing of images and noise: independent, minibatch optimal transport, or the nearest of 8."""
    time_distribution: Annotated[Part, default_is("that of --method")] = ()
    """Distribution of the training times, 0 being data: logit_normal, uniform, u_shaped, or a registered one; and its
    arguments, such as mean=-0.5 std=1.2 shift=2."""
    guidance_scale: NonNegative = 1.0
    """Guidance inside the target of a mean flow, so that sampling needs none; of the teacher, with --teacher."""


@dataclass(frozen=True)
class TeacherConfig(Flags):
    """The trained rectified flow whose samples are the training data of --method distill or reflow."""

    teacher: Annotated[
        Path | None, flag(for_pictures=True, excludes="augment holdout init_from stop_when_memorising")
    ] = None
    """Run or checkpoint of a rectified flow; data and network are those of its run."""
    teacher_samples: Annotated[
        Positive | None, flag(needs="teacher"), default_is("5000; 50000 with --method reflow")
    ] = None
    """Number of paths, or of pairs of noise and image, to generate."""
    teacher_steps: Annotated[Positive | None, flag(needs="teacher"), default_is("8; 16 with --method reflow")] = None
    """Sampling steps of each path or pair."""
    teacher_dir: Annotated[Path | None, flag(needs="teacher", local=True), default_is("OUTPUT_DIR/paths or pairs")] = (
        None
    )
    """Folder of the generated paths or pairs, which several runs may share."""
    autoguidance: Annotated[NonNegative, flag(needs="teacher")] = 1.0
    """Scale of autoguidance with which the teacher samples, away from an early checkpoint of its run."""


@dataclass(frozen=True)
class EvaluationConfig(Flags):
    """Evaluation during training."""

    evaluate_every: Natural = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps; the best checkpoint is kept. 0 disables them."""
    evaluation_samples: AtLeastTwo = 2000
    """Number of samples for each evaluation."""
    feature_network: FeatureNetwork = "inception"
    """Features for comparing pictures: inception (FID and KID), or efficientnet_lite0 (no download)."""
    stop_when_memorising: Annotated[bool, flag(for_pictures=True)] = False
    """Stop when the loss on --holdout pictures rises; `best` has the lowest held-out loss."""


@dataclass(frozen=True)
class ProgramConfig(Flags):
    """Flags that every program has."""

    given: ClassVar[frozenset[str] | None] = None
    """Names of the flags that were given on the command line or in a file, which the parser sets; else None."""

    import_: Annotated[
        tuple[str, ...], flag(local=True), tyro.conf.arg(name="import", help_behavior_hint="(default: none)")
    ] = ()
    """Python modules to import first, which register networks, flows, datasets or other parts of your own."""
    interrupted_exit_code: Annotated[int, Interval(ge=0, le=255), flag(local=True)] = 0
    """Exit code after a signal asked for the end; 143 makes Kubernetes or Ray restart it."""


def seconds_of(budget: str) -> float:
    """Return the seconds of a time such as ``90s``, ``30m``, ``2h`` or ``1d``, with or without a plus sign.

    Raises:
        UsageError: if the text is not such a time, or the time is 0.
    """
    number, unit = budget[:-1].removeprefix("+"), SECONDS.get(budget[-1:])
    seconds = float(number) * unit if unit and re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", number) else 0.0
    if seconds <= 0:
        raise UsageError(f"--budget is {budget}; it must be a time such as 90s, 30m, 2h or 1d")
    return seconds


@dataclass(frozen=True)
class TrainProgramConfig(ProgramConfig):
    """Flags of the training program itself."""

    config: Annotated[Path | None, flag(recorded=False)] = None
    """Start from the flags in this file, a run's config.json; flags on the command line override them."""
    budget: Annotated[
        str | None,
        flag(recorded=False, for_pictures=True),
        default_is("1h with --dataset_path or a teacher, if no flag gives the length"),
    ] = None
    """Time to train, such as 90s, 30m, 2h or 1d; network, length and learning rate are chosen for it. With a plus sign,
    such as +30m, a run that has reached its last step continues for this time."""
    one_step: Annotated[bool, flag(recorded=False, for_pictures=True, excludes="flow")] = False
    """Then distil the run to a one-step generator in OUTPUT_DIR/one-step; each gets half of the budget."""
    dry_run: Annotated[bool, flag(recorded=False)] = False
    """Check the flags, print the plan of the run with its time and memory, and exit."""
    look: Annotated[bool, flag(recorded=False, for_pictures=True)] = False
    """Open and describe the pictures, write some as the network sees them to OUTPUT_DIR/look.png, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds_of(self.budget or "1s")

    @property
    def extends(self) -> bool:
        """Whether ``--budget`` continues a run."""
        return self.budget is not None and self.budget.startswith("+")


@dataclass(frozen=True)
class InitConfig(Flags):
    """Initial weights."""

    init_from: Path | None = None
    """Checkpoint or run whose weights initialise the network where their shapes match; starter: weights of the package;
    none: random weights."""


@dataclass(frozen=True)
class TrainConfig:
    """All flags of the training program, in the order of ``--help``."""

    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    init: InitConfig = field(default_factory=InitConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    columns: ColumnConfig = field(default_factory=ColumnConfig)
    run: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that the user set: if the config was built in Python, those that are not the defaults."""
        return changed_flags(self) if self.program.given is None else self.program.given

    @property
    def method(self) -> Method:
        """The training method."""
        return self.flow.method or "rectified"

    @property
    def origin(self) -> Path | None:
        """Checkpoint or run that the weights are initialised from, if any."""
        named = self.init.init_from
        return None if named == NO_WEIGHTS else STARTERS / self.starter if named == STARTER else named

    @property
    def starter(self) -> str:
        """Name of the starter for these data: the name of the autoencoder, or ``pixels``."""
        return name_of(self.data.autoencoder) or "pixels"

    @property
    def run_data(self) -> RunData:
        """The block ``data`` of ``config.json``."""
        return RunData(self.data, self.source, self.columns)


@dataclass(frozen=True)
class OneStepConfig(TrainConfig):
    """The flags of ``rectified-flow one-step``, with another default of ``--method``."""

    @property
    def method(self) -> Method:
        """The training method."""
        return self.flow.method or ("mean_flow" if self.teacher.teacher is None else "distill")


def check_folders(run: TrainingConfig, data: Path | None, cache_dir: Path | None, flag: str = "dataset_path") -> None:
    """Raise a UsageError if a run would write into the folder ``data`` of its training data, which ``flag`` names."""
    if data is None:
        return
    written = {"output_dir": run.output_dir, "cache_dir": cache_dir}
    for name, folder in written.items():
        if folder is not None and Path(realpath(folder)).is_relative_to(realpath(data)):
            raise UsageError(f"--{name} {folder} lies inside --{flag} {data}: choose a folder outside")
