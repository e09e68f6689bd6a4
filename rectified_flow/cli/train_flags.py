"""The flags of the training programs, one dataclass a group. Imports no torch, so that ``--help`` answers at once."""

import re
from dataclasses import dataclass, field, fields
from math import prod
from os.path import realpath
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from annotated_types import Interval, Len

from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.framing import Crop, Framing, parse_ratio
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import (
    AtLeastTwo,
    Flags,
    Fraction,
    Natural,
    NonNegative,
    Options,
    Positive,
    PositiveNumber,
    Probability,
    default_is,
    plain,
    refuse,
)
from rectified_flow.flows import WEIGHT_POWER, Coupling, Distance, ObjectiveName, Prediction, Solver
from rectified_flow.runs.config import LrDecay, TrainingConfig
from rectified_flow.system.machine import require_memory

BYTES_PER_WEIGHT = 16
"""Least training memory of a weight: itself, its gradient and two moments in float32."""
UNET = "Unet"
Method = Literal["distill", "reflow", "mean_flow"]
SourceAs = Literal["start", "condition"]
STARTER = Path("starter")
"""Value of ``--init_from`` for the weights that are installed with the package."""
STARTER_FOLDER = Path(__file__).parents[1] / "networks" / STARTER
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Units of --budget."""


@dataclass(frozen=True)
class DataConfig(Flags):
    """The training pictures."""

    dataset: str = OXFORD_FLOWERS
    """Hub id of a dataset with an image column, synthetic-flowers (no download), or a registered dataset."""
    dataset_options: Options = ()
    """Arguments of a registered dataset."""
    dataset_path: Path | None = None
    """Folder of your own pictures (with a subfolder per class, or none), or a local datasets folder."""
    image_size: Annotated[int, Interval(gt=0, le=16384)] = 64
    """Short side of the images [px]; pictures are resized by their short side and cropped to --aspect_ratio."""
    aspect_ratio: str = "1:1"
    """Width to height of the images, such as 3:2."""
    crop: Crop = "center"
    """Centre crop, random crop, or pad."""
    alpha: bool = False
    """Keep transparency as a fourth channel; otherwise transparent parts become white."""
    space: Annotated[str | None, default_is("Pixels, or Latents with --autoencoder")] = None
    """Registered data space that the flow works in."""
    space_options: Options = ()
    """Arguments of the space."""
    autoencoder: str | None = None
    """Train on latents: haar (wavelet), folder or hub id of a diffusers autoencoder, or a registered autoencoder."""
    autoencoder_options: Options = ()
    """Arguments of a registered autoencoder."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    augment: Probability = 0.0
    """Probability of each augmentation; the network is conditioned on it. Try 0.15 on small data."""
    holdout: Fraction = 0.0
    """Fraction of the images to hold out, to detect memorisation."""
    skip_broken_images: bool = False
    """Skip pictures that cannot be decoded instead of stopping."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Folder for decoded images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        of_pixels = {
            f"aspect_ratio {self.aspect_ratio}": parse_ratio(self.aspect_ratio) != (1, 1),
            "crop random": self.crop == "random",
            "alpha": self.alpha,
            "augment": self.augment > 0,
        }
        if self.autoencoder is not None:
            refuse(of_pixels, "excludes --autoencoder, which encodes whole, opaque squares once: leave one out")

    @property
    def framing(self) -> Framing:
        """The form in which pictures are stored and trained on."""
        return Framing.of(self.image_size, self.aspect_ratio, alpha=self.alpha, crop=self.crop)


@dataclass(frozen=True)
class SourceConfig(Flags):
    """Source pictures, for image-to-image translation."""

    source_path: Path | None = None
    """Folder of source pictures, which are translated to pictures like those of the dataset."""
    paired: bool = False
    """Pair files of the same name in --source_path and --dataset_path; otherwise pairs are random in each epoch."""
    skip_unpaired: bool = False
    """Leave out pictures without a partner instead of stopping."""
    degrade: str | None = None
    """Make sources from the pictures: downsample:4, grey, blur:2, mask:box, mask:brush, edges, or a registered one."""
    source_as: Annotated[SourceAs | None, default_is("start with --source_path, condition with --degrade")] = None
    """start: paths start from the source instead of noise; condition: the source is a further input of the network."""
    source_noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise added to the source with --source_as start; it makes results random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source_path is None:
            refuse({"paired": self.paired}, "needs --source_path, the folder of the pictures to start from")
        if not self.paired:
            refuse({"skip_unpaired": self.skip_unpaired}, "has no effect without --paired: leave it out")
        if not self.is_given:
            unused = {"source_as": self.source_as, "source_noise": self.source_noise}
            refuse(unused, "has no effect without --source_path or --degrade: pass one of them")
        refuse(
            {"source_path": self.source_path is not None and self.degrade is not None},
            "and --degrade exclude each other: pass one",
        )
        if not self.as_start:
            refuse({"source_noise": self.source_noise}, "has no effect with --source_as condition: leave it out")

    @property
    def is_given(self) -> bool:
        """Whether the flow translates pictures."""
        return self.source_path is not None or self.degrade is not None

    @property
    def as_start(self) -> bool:
        """Whether paths start from sources, if there are any."""
        return self.source_as == "start" or (self.source_as is None and self.degrade is None)


@dataclass(frozen=True)
class ColumnConfig(Flags):
    """Columns beside the pictures, as conditions: what to draw, in words, numbers and labels."""

    condition_on: Annotated[tuple[str, ...], default_is("none")] = ()
    """Columns of metadata.csv, metadata.jsonl or a dataset to train on as conditions; or all."""
    condition_types: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="[COLUMN=TYPE ...]"), default_is("by values")
    ] = ()
    """Types of columns, if their values are misjudged: caption, label or number."""
    text_encoder: Annotated[str | None, default_is("the captions' own words")] = None
    """Frozen text encoder for captions: folder or hub id of a sentence model, CLIP or T5 (transformers)."""
    text_tokens: Natural = 0
    """Number of tokens of a caption that the attention levels also read; 0 for the caption's vector alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.condition_on:
            unused = {"condition_types": self.condition_types, "text_encoder": self.text_encoder}
            refuse(unused, "has no effect without --condition_on: pass both")
        if self.text_encoder is None:
            refuse({"text_tokens": self.text_tokens}, "needs --text_encoder, which encodes the tokens: pass both")
        for option in self.condition_types:
            if "=" not in option:
                raise UsageError(f"--condition_types {option} must be COLUMN=caption, COLUMN=label or COLUMN=number")


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
class EvaluationConfig(Flags):
    """Evaluation during training."""

    evaluate_every: Natural = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps; the best checkpoint is kept. 0 disables them."""
    evaluation_samples: AtLeastTwo = 2000
    """Number of samples for each evaluation."""
    feature_network: FeatureNetwork = "inception"
    """Features for comparing pictures: inception (FID and KID), or efficientnet_lite0 (no download)."""
    stop_when_memorising: bool = False
    """Stop when the loss on --holdout pictures rises; `best` has the lowest held-out loss."""


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
    """Objective of the paper of this name; so_flow needs float32."""
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
    """

    flag: str
    source: Path
    rows: Literal["pairs", "paths"]
    count: int
    folder: Path
    steps: int
    guidance_scale: float = 1.0
    solver: Solver = "midpoint"

    @property
    def points(self) -> int:
        """Points that are kept of each path beside its end; the noise alone for pairs."""
        return self.steps if self.rows == "paths" else 1

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
    teacher_steps: Annotated[Positive | None, default_is("16")] = None
    """Sampling steps of each path; sampling in more steps than that is not learned."""
    whole_fraction: Annotated[Probability | None, default_is("0.5")] = None
    """Fraction of each batch that learns whole paths, for one step; the rest learns parts of paths, for more steps."""
    paths_dir: Annotated[Path | None, default_is("OUTPUT_DIR/paths")] = None
    """Folder of the paths, which several runs may share."""


@dataclass(frozen=True)
class ProgramConfig(Flags):
    """Flags that every program has."""

    given: ClassVar[frozenset[str] | None] = None
    """Names of the flags that were given on the command line or in a file, which the parser sets; else None."""

    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import", help_behavior_hint="(default: none)")] = ()
    """Python modules to import first, which register networks, flows, datasets or other parts of your own."""
    interrupted_exit_code: Annotated[int, Interval(ge=0, le=255)] = 0
    """Exit code after a signal asked for the end; 143 makes Kubernetes or Ray restart it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        code = self.interrupted_exit_code
        if code in (1, 2):
            raise UsageError(f"--interrupted_exit_code is {code}, the exit code of an error; choose 0, or 3 to 255")


def seconds_of(budget: str, flag: str = "budget") -> float:
    """Return the seconds of a time such as ``90s``, ``30m``, ``2h`` or ``1d``.

    Args:
        budget: the time.
        flag: the flag that has it, for the error.

    Raises:
        UsageError: if it is no such time, or 0.
    """
    number, unit = budget[:-1], SECONDS.get(budget[-1:])
    seconds = float(number) * unit if unit and re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", number) else 0.0
    if seconds <= 0:
        raise UsageError(f"--{flag} is {budget}; it must be a time such as 90s, 30m, 2h or 1d")
    return seconds


@dataclass(frozen=True)
class TrainProgramConfig(ProgramConfig):
    """Flags that the training programs have."""

    one_step: ClassVar[bool] = False
    """Whether a one-step generator learns from the run, which then has half of the budget."""

    config: Path | None = None
    """Start from the flags in this file, a run's config.json; flags on the command line override them."""
    budget: Annotated[str | None, default_is("1h with --dataset_path or a teacher, if no flag gives the length")] = None
    """Time to train, such as 90s, 30m, 2h or 1d; network, length and learning rate are chosen for it."""
    extend: str | None = None
    """Time by which to continue a run that has reached its last step."""
    dry_run: bool = False
    """Print all flags, the plan of the run, and the memory and time of a step, and exit."""
    look: bool = False
    """Open and describe the pictures, write some as the network sees them to OUTPUT_DIR/look.png, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("budget", "extend"):
            seconds_of(getattr(self, name) or "1s", name)


@dataclass(frozen=True)
class RectifiedFlowProgramConfig(TrainProgramConfig):
    """Flags that the training program of a rectified flow has."""

    one_step: bool = False  # type: ignore[misc]  # a flag of this program alone
    """Then distil the run to a one-step generator in OUTPUT_DIR/one-step; each gets half of the budget."""


def check_folders(run: TrainingConfig, data: Path | None, cache_dir: Path | None, flag: str = "dataset_path") -> None:
    """Raise a UsageError if a run would write into the folder ``data`` of its training data, which ``flag`` names."""
    if data is None:
        return
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoints, "cache_dir": cache_dir}
    for name, folder in written.items():
        if folder is not None and Path(realpath(folder)).is_relative_to(realpath(data)):
            raise UsageError(f"--{name} {folder} lies inside --{flag} {data}: choose a folder outside")


@dataclass(frozen=True)
class TrainConfig:
    """The flags that both training programs have, in the order of ``--help``."""

    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    flow: Any = field(default_factory=FlowConfig)
    teacher: Any = field(default_factory=TeacherConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    columns: ColumnConfig = field(default_factory=ColumnConfig)
    run: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    def __post_init__(self) -> None:
        taught = self.teacher_data
        if taught is not None:
            unused = {
                "augment": self.data.augment,
                "holdout": self.data.holdout,
                "init_from": self.network.init_from,
                "stop_when_memorising": self.evaluation.stop_when_memorising,
                "coupling": self.flow.coupling != "independent",
            }
            refuse(unused, f"has no effect with --{taught.flag}, which generates the training data and their noise")
        source = self.source
        degrades = {"degrade": source.degrade is not None}
        if self.data.autoencoder is not None:
            refuse(degrades, "excludes --autoencoder: latents cannot be degraded; leave one out")
        if source.is_given and self.flow.coupling != "independent":
            pairs = self.flow.coupling == "ot" and source.as_start and source.source_path and not source.paired
            needed = "needs noise, or ot an unpaired --source_path as the start"
            refuse({"coupling": not pairs}, f"{self.flow.coupling} has no effect here: it {needed}; leave it out")
        for flag, folder in {"dataset_path": self.data.dataset_path, "source_path": source.source_path}.items():
            check_folders(self.run, folder, self.data.cache_dir, flag)
        if self.data.dataset_path is None:  # else the recipe may hold some out
            self.check_held_out()
        picture = prod(self.data.framing.stored_shape)
        for name in ("batch_size", "num_samples"):
            count = getattr(self.run, name) or 1
            pictures = f"{count} picture{'s' * (count > 1)} of --image_size {self.data.framing.size_text}"
            require_memory(count * picture, pictures, f"lower --image_size or --{name}")

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags that the user set: if the config was built in Python, those that are not the defaults."""
        if self.program.given is not None:
            return self.program.given
        defaults = plain(type(self)())
        return frozenset(name for name, value in plain(self).items() if value != defaults[name])

    @property
    def teacher_data(self) -> TeacherData | None:
        """The data that a teacher is to generate; None without a teacher."""
        return None

    def check_held_out(self, share: float = 0.05) -> None:
        """Raise a UsageError, which proposes a share, if the run is to stop by pictures that it does not hold out."""
        if self.data.holdout <= 0 and self.evaluation.stop_when_memorising:
            raise UsageError(f"--stop_when_memorising needs pictures to measure on: pass --holdout {share:g}")


@dataclass(frozen=True)
class TrainRectifiedFlow(TrainConfig):
    """All flags of train_oxford.py."""

    flow: RectifiedFlowConfig = field(default_factory=RectifiedFlowConfig)
    teacher: ReflowConfig = field(default_factory=ReflowConfig)
    program: RectifiedFlowProgramConfig = field(default_factory=RectifiedFlowProgramConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.program.one_step:
            other = {"flow": self.flow.flow is not None, "prediction": self.flow.prediction != "velocity"}
            refuse(other, "excludes --one_step, which distils a rectified flow that predicts the velocity")

    @property
    def teacher_data(self) -> TeacherData | None:
        """The pairs of ``--reflow_from``."""
        flags = self.teacher
        if flags.reflow_from is None:
            return None
        folder = flags.pairs_dir or self.run.output_dir / "pairs"
        count, steps = flags.reflow_pairs or 50_000, flags.reflow_steps or 16
        return TeacherData("reflow_from", flags.reflow_from, "pairs", count, folder, steps)


@dataclass(frozen=True)
class MeanFlowTraining(TrainingConfig):
    """A training run with the defaults of a mean flow."""

    lr_decay: LrDecay = "cosine"


@dataclass(frozen=True)
class TrainMeanFlow(TrainConfig):
    """All flags of train_one_step.py and train_mean_flow.py."""

    flow: MeanFlowConfig = field(default_factory=MeanFlowConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    run: TrainingConfig = field(default_factory=MeanFlowTraining)

    def __post_init__(self) -> None:
        super().__post_init__()
        flow = self.flow
        if self.teacher.teacher is None:
            needy = {"method": flow.method in ("distill", "reflow")}
            refuse(needy, f"{flow.method} needs --teacher: pass the run of a rectified flow")
            guided = {"guidance_scale": flow.guidance_scale != 1, "guidance_mixing": flow.guidance_mixing > 0}
            conditional = self.network.use_cfg or self.columns.condition_on != ()
            conditional = conditional or (self.source.is_given and not self.source.as_start)
            refuse({} if conditional else guided, "needs conditions: pass --use_cfg or --condition_on")
            return
        of_pictures = {"method": flow.method == "mean_flow"}
        refuse(of_pictures, "mean_flow learns from pictures: pass --init_from instead of --teacher")
        if flow.method == "reflow":
            refuse(
                {"config": self.program.config is not None},
                "excludes --method reflow: pass the flags from the file on the command line",
            )
            return
        changed = {each.name: getattr(flow, each.name) != each.default for each in fields(flow)}
        for name in ("method", "flow", "flow_options", "weight_power", "weight_epsilon", "guidance_scale"):
            del changed[name]
        refuse(changed, "has no effect with --teacher, whose paths are learned by regression: leave it out")

    @property
    def teacher_data(self) -> TeacherData | None:
        """The paths of ``--teacher``, by Euler's method: for as many calls, twice the points of midpoint."""
        flags = self.teacher
        if flags.teacher is None:
            return None
        folder = flags.paths_dir or self.run.output_dir / "paths"
        count, steps = flags.teacher_paths or 5_000, flags.teacher_steps or 16
        return TeacherData(
            "teacher", flags.teacher, "paths", count, folder, steps, self.flow.guidance_scale, solver="euler"
        )
