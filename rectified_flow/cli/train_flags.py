"""The flags that say which pictures a run is trained on."""

from dataclasses import dataclass, field, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.framing import Crop, Framing, parse_ratio
from rectified_flow.errors import require, require_finite, require_fraction, require_natural, require_positive
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import check_paths, default_is
from rectified_flow.flows import Coupling, Distance, ObjectiveName, Prediction
from rectified_flow.runs.config import TrainingConfig, require_room_for_steps
from rectified_flow.system.machine import require_memory


@dataclass(frozen=True)
class DataConfig:
    """The training pictures."""

    dataset: str = OXFORD_FLOWERS
    """Hub id of a dataset with an image column, or synthetic-flowers, which needs no download."""
    dataset_path: Path | None = None
    """Folder of your own pictures (with a subfolder per class, or none), or a local datasets folder."""
    image_size: int = 64
    """Short side of the images [px]; pictures are resized by their short side and cropped to --aspect_ratio."""
    aspect_ratio: str = "1:1"
    """Width to height of the images, such as 3:2."""
    crop: Crop = "center"
    """What is kept of other pictures: the centre, a random part at each step, or (none) all of it, padded."""
    alpha: bool = False
    """Keep transparency, as a fourth channel; else transparent parts become white."""
    autoencoder: str | None = None
    """Train on latents: haar, an exact wavelet, or the folder or hub id of an image autoencoder of diffusers."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    augment: float = 0.0
    """Probability of each kind of change to an image, such as rotation, of which the network is told; 0.15 for few."""
    holdout: float = 0.0
    """Share of the images to hold out and measure, at --evaluate_every or else ten times: are others memorised?"""
    skip_broken_images: bool = False
    """Skip pictures that cannot be decoded, instead of stopping."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Where decoded images are kept."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        require_positive(self, "image_size")
        require(0 <= self.augment <= 1, f"--augment is {self.augment:g}; it is a probability, from 0 to 1")
        require(0 <= self.holdout < 1, f"--holdout is {self.holdout:g}; it is a share, at least 0 and below 1")
        ratio = parse_ratio(self.aspect_ratio)
        refused = {
            f"--aspect_ratio {self.aspect_ratio}": ratio != (1, 1),
            "--crop random": self.crop == "random",
            "--alpha": self.alpha,
            "--augment": self.augment > 0,
        }
        for flag, given in refused.items():
            require(
                self.autoencoder is None or not given,
                f"--autoencoder and {flag} exclude each other: latents are of whole, opaque squares, encoded once",
            )

    @property
    def framing(self) -> Framing:
        """The form in which pictures are stored and trained on."""
        return Framing.of(self.image_size, self.aspect_ratio, alpha=self.alpha, crop=self.crop)


BYTES_PER_WEIGHT = 16
"""In training, at least: the weight, its gradient and two moments, in float32."""


@dataclass(frozen=True)
class UnetConfig:
    """A Unet for pictures."""

    dim: int = 64
    """Channels of the Unet at full resolution."""
    dim_mults: tuple[int, ...] = (1, 2, 3, 4)
    """Channels of each level as multiples of dim; each level halves the side."""
    dropout: float = 0.1
    """Dropout probability inside residual blocks."""
    use_cfg: bool = False
    """Train on labels, dropping 10% of them, so that sampling can be guided (classifier-free guidance)."""
    init_from: Path | None = None
    """Start from the weights of this checkpoint or run, as far as their shapes agree, on any data."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        require_positive(self, "dim")
        require_fraction(self, "dropout")
        require(
            len(self.dim_mults) > 0 and min(self.dim_mults) > 0,
            f"--dim_mults is {self.dim_mults}; it needs at least one number, all above 0",
        )
        # A level has at least two blocks down and three up, each of two 3x3 convolutions.
        weights = sum(2 * (2 + 3) * 9 * (self.dim * mult) ** 2 for mult in self.dim_mults)
        what = f"a Unet of --dim {self.dim} and --dim_mults {' '.join(map(str, self.dim_mults))}"
        require_memory(BYTES_PER_WEIGHT * weights, what, "lower one of the two")

    def check_side(self, image_size: int, latent_side: int | None = None, ratio: tuple[int, int] = (1, 1)) -> None:
        """Raise a UsageError if the levels cannot halve the sides of pictures, or the side of their latents.

        Args:
            image_size: the short side [px].
            latent_side: of latents, if the network works on them.
            ratio: width and height of pictures, without common divisors.
        """
        divisor = 2 ** (len(self.dim_mults) - 1)
        needed = f"by {divisor}, as the {len(self.dim_mults)} levels of --dim_mults need"
        if latent_side is None:
            multiple = divisor * min(ratio)  # as one of the two is odd
            nearest = max(1, round(image_size / multiple)) * multiple
            given, sides = f"--image_size {image_size}", "is"
            if ratio != (1, 1):
                given, sides = f"{given} with --aspect_ratio {ratio[0]}:{ratio[1]}", "gives sides that are"
            require(image_size % multiple == 0, f"{given} {sides} not divisible {needed}; take {nearest}")
            return
        require(
            latent_side % divisor == 0,
            f"--image_size {image_size} has latents of side {latent_side}, which is not divisible {needed}: pass fewer "
            "levels, or a larger power of two as --image_size",
        )


BYTES_PER_FEATURES = 5120
"""Of a picture's features, at least: 1280 of them in float32."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations on the way, see evaluate.py."""

    evaluate_every: int = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps, whose best checkpoint is kept; 0 makes none."""
    evaluation_samples: int = 2000
    """Pictures drawn for each evaluation."""
    feature_network: FeatureNetwork = "inception"
    """Features that pictures are compared by: inception, for FID and KID, or efficientnet_lite0, which needs no
    download."""
    stop_when_memorising: bool = False
    """End the run when the loss on --holdout pictures rises; the best checkpoint is then that of its least value."""

    def __post_init__(self) -> None:
        require_natural(self, "evaluate_every")
        require(
            self.evaluation_samples >= 2,
            f"--evaluation_samples is {self.evaluation_samples}; a distance needs at least 2",
        )
        what = f"--evaluation_samples {self.evaluation_samples}"
        require_memory(self.evaluation_samples * BYTES_PER_FEATURES, what, "draw fewer")


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


@dataclass(frozen=True)
class ProgramConfig:
    """Flags that every program has."""

    given: ClassVar[frozenset[str]] = frozenset()
    """The names of the flags that a person or a file gave; the parser sets it."""

    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import", help_behavior_hint="(default: none)")] = ()
    """Python modules to import first, which register networks, flows or data spaces of your own."""
    interrupted_exit_code: int = 0
    """Exit code after a signal asked for the end; 143 where Kubernetes, Ray or a script shall start it again."""

    def __post_init__(self) -> None:
        code = self.interrupted_exit_code
        require(
            0 <= code <= 255 and code not in (1, 2),
            f"--interrupted_exit_code is {code}; it must be 0 or from 3 to 255, as 1 and 2 mean errors",
        )


@dataclass(frozen=True)
class TrainProgramConfig(ProgramConfig):
    """Flags that the training programs have."""

    config: Path | None = None
    """Start from the flags in this file, a run's config.json; flags on the command line override them."""
    dry_run: bool = False
    """Print all flags, the batch arithmetic, and the memory and time that a step takes, and exit."""
    look: bool = False
    """Open the pictures, print what they are, write some as they are trained on to OUTPUT_DIR/look.png, and exit."""


@dataclass(frozen=True)
class TrainRectifiedFlow:
    """All flags of train_oxford.py."""

    data: DataConfig = field(default_factory=DataConfig)
    network: UnetConfig = field(default_factory=UnetConfig)
    rectified_flow: RectifiedFlowConfig = field(default_factory=RectifiedFlowConfig)
    coupling: CouplingConfig = field(default_factory=CouplingConfig)
    reflow: ReflowConfig = field(default_factory=ReflowConfig)
    run: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    def __post_init__(self) -> None:
        if self.reflow.reflow_from is not None:
            check_taught("reflow_from", self.data, self.network, self.evaluation)
        check_parts(self.data, self.network, self.run, self.evaluation)
        self.rectified_flow.check_times(self.times)
        require(
            self.reflow.reflow_from is None or self.coupling.coupling == "independent",
            "--coupling and --reflow_from exclude each other: drawn pairs come with their noise",
        )

    @property
    def times(self) -> str:
        """The name of the time distribution."""
        reflows = self.reflow.reflow_from is not None
        return self.rectified_flow.time_distribution or ("u_shaped" if reflows else "logit_normal")


@dataclass(frozen=True)
class TrainMeanFlow:
    """All flags of train_mean_flow.py."""

    data: DataConfig = field(default_factory=DataConfig)
    network: UnetConfig = field(default_factory=UnetConfig)
    mean_flow: MeanFlowConfig = field(default_factory=MeanFlowConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    coupling: CouplingConfig = field(default_factory=CouplingConfig)
    run: TrainingConfig = field(default_factory=partial(TrainingConfig, lr_decay="cosine"))
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    program: TrainProgramConfig = field(default_factory=TrainProgramConfig)

    def __post_init__(self) -> None:
        if self.teacher.teacher is not None:
            check_taught("teacher", self.data, self.network, self.evaluation)
        check_parts(self.data, self.network, self.run, self.evaluation)
        guidance = self.mean_flow.guidance_scale, self.mean_flow.guidance_mixing
        if self.teacher.teacher is not None:
            self.mean_flow.check_teacher()
            require(
                self.coupling.coupling == "independent",
                "--coupling and --teacher exclude each other: paths come with their noise",
            )
        require(
            self.network.use_cfg or self.teacher.teacher is not None or guidance == (1, 0),
            "--guidance_scale and --guidance_mixing need labels: pass --use_cfg",
        )


def check_parts(data: DataConfig, network: UnetConfig, run: TrainingConfig, evaluation: EvaluationConfig) -> None:
    """Raise a UsageError if flags of these parts do not fit together."""
    if data.autoencoder is None:
        network.check_side(data.image_size, ratio=parse_ratio(data.aspect_ratio))
    check_folders(data, run)
    check_room(data, run)
    if data.dataset_path is None:  # else a recipe may hold some out
        check_held_out(data, evaluation)


def check_folders(data: DataConfig, run: TrainingConfig) -> None:
    """Raise a UsageError if a run would write into its own training pictures."""
    if data.dataset_path is None:
        return
    pictures = data.dataset_path.resolve()
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoints, "cache_dir": data.cache_dir}
    for flag, folder in written.items():
        require(
            folder is None or not folder.resolve().is_relative_to(pictures),
            f"--{flag} {folder} lies inside --dataset_path {data.dataset_path}, where the run's own files would become "
            "training pictures: choose a folder outside",
        )


def check_held_out(data: DataConfig, evaluation: EvaluationConfig, share: float = 0.05) -> None:
    """Raise a UsageError, which proposes a share, if the run is to stop by pictures that it does not hold out."""
    require(
        data.holdout > 0 or not evaluation.stop_when_memorising,
        f"--stop_when_memorising needs pictures to measure on: pass --holdout {share:g}",
    )


def check_taught(flag: str, data: DataConfig, network: UnetConfig, evaluation: EvaluationConfig) -> None:
    """Raise a UsageError if a flag is given that a run has no use for which learns from what a teacher draws."""
    given = {"augment": data.augment, "holdout": data.holdout, "init_from": network.init_from}
    given |= {"stop_when_memorising": evaluation.stop_when_memorising}
    for name, value in given.items():
        require(not value, f"--{name} has no effect with --{flag}, which draws what the run learns: leave it out")


def check_room(data: DataConfig, run: TrainingConfig) -> None:
    """Raise a UsageError if a batch of pictures, or those of a preview, cannot fit into memory."""
    picture = prod(data.framing.stored_shape)
    for name in ("batch_size", "num_samples"):
        count = getattr(run, name) or 1
        require_memory(
            count * picture,
            f"{count} picture{'s' * (count > 1)} of --image_size {data.framing.size_text}",
            f"lower --image_size or --{name}",
        )
