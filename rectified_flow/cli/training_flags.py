"""The flags of the training programs. Imports no torch, so that ``--help`` starts fast.

A new flag is a field with a docstring in one of the groups below, or in ``TrainingConfig`` if the trainer reads it.
Runs record it and resume with it, unless its :class:`rectified_flow.flags.Rule` says otherwise. A student has the flags
of the data and the network from its teacher (``record.py``).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Interval, Len

from rectified_flow.cli.budget import seconds_of
from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.framing import Bits, Crop, Framing, Resize, parse_ratio
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
    Probability,
    Seed,
    default_is,
    flag,
)
from rectified_flow.flows import Coupling, Prediction
from rectified_flow.parts import name_of
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.files import read_lines

UNET = "Unet"
STARTER, NO_WEIGHTS = Path("starter"), Path("none")  # values of --init_from that are not folders
STARTERS = Path(__file__).parents[1] / "networks" / "starters"
"""Folder of the weights that are installed with the package, with a subfolder for each value of ``starter``."""
Multiple = Annotated[int, Interval(gt=0, le=64)]
"""Channels of a level, as a multiple of those at full resolution."""
Method = Literal["rectified", "mean_flow", "distill", "reflow"]


@dataclass(frozen=True)
class DataConfig(Flags):
    """The training pictures."""

    dataset: Annotated[Part, flag(replaces="dataset_path")] = (OXFORD_FLOWERS,)
    """Hub id of a dataset with an image column, synthetic-flowers (no download), or a registered dataset."""
    dataset_path: Annotated[Path | None, flag(local=True, replaces="dataset")] = None
    """Folder of your own pictures or measurements (with a subfolder per class, or none), or a local datasets folder."""
    image_size: Annotated[int, Interval(ge=0, le=16384), flag(fixes_size=True)] = 64
    """Short side of the images [px]; pictures are resized by their short side and cropped to --aspect_ratio. 0 uses
    the size and the aspect ratio of the first picture."""
    aspect_ratio: Annotated[str, flag(for_pictures=True, fixes_size=True)] = "1:1"
    """Width to height of the images, such as 3:2."""
    crop: Annotated[Crop, flag(for_pictures=True, fixes_size=True)] = "center"
    """Centre crop, random crop, or pad."""
    alpha: Annotated[bool, flag(for_pictures=True, excludes="autoencoder", fixes_size=True)] = False
    """Keep transparency as a fourth channel; otherwise transparent parts become white."""
    grey: Annotated[bool, flag(for_pictures=True, excludes="alpha")] = False
    """Train on the brightness of pictures alone, as one channel; the default if all pictures are grey."""
    resize: Annotated[
        Resize | None, flag(for_pictures=True), default_is("nearest for pixel art and label maps, else lanczos")
    ] = None
    """Filter that resizes pictures; nearest makes no new colours."""
    bits: Annotated[Bits | None, flag(for_pictures=True), default_is("by the values")] = None
    """Bits of the values in 16-bit files that are read as pictures, such as 12."""
    space: Annotated[Part, flag(fixes_size=True), default_is("by the files, or Latents with --autoencoder")] = ()
    """Data space: Pixels, Fields for measurements (.npy, .tif, 16-bit .png), or a registered one; arguments of Fields
    are value_range, transform, show, channels_last and store_bits."""
    autoencoder: Annotated[Part, flag(local=True, for_pictures=True, fixes_size=True), default_is("none")] = ()
    """Train on latents of an autoencoder: small (in the package), a diffusers folder or hub id, or a registered one."""
    horizontal_flip: bool = True
    """Mirror half of the training images; off by default if classes or captions name sides, digits or letters."""
    augment: Probability = 0.0
    """Probability of each augmentation; the network is conditioned on it. Try 0.15 on small data. Latents are augmented
    with --autoencoder small only."""
    holdout: Annotated[Fraction, flag(for_pictures=True)] = 0.0
    """Fraction of the images to hold out, to detect memorisation."""
    data_seed: Annotated[Seed | None, default_is("--seed of the run's first start")] = None
    """Seed of the held-out images, of unpaired sources, and of the choice among several captions."""
    skip_broken_images: Annotated[bool, flag(for_pictures=True)] = False
    """Skip pictures that cannot be decoded, or with --paired have no partner, instead of stopping."""
    exclude: Annotated[
        tuple[str, ...], flag(for_pictures=True), tyro.conf.arg(metavar="LIST.txt | NAME ..."), default_is("none")
    ] = ()
    """Pictures to leave out: paths of files or subfolders, numbers of rows, or a text file with one per line."""
    max_train_samples: Annotated[
        Positive | None, flag(for_pictures=True, excludes="paired", stands_for="limit"), default_is("all")
    ] = None
    """Largest number of pictures to use, spread over the dataset, for a quick trial."""
    image_column: Annotated[str, flag(for_pictures=True), default_is("image, if there is one")] = ""
    """Column of the images in a table with several columns of images."""
    label_column: Annotated[str, flag(for_pictures=True), default_is("label, if there is one")] = ""
    """Column of the labels in a table with several columns of labels."""
    cache_dir: Annotated[
        Path | None, flag(local=True), default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")
    ] = None
    """Folder for decoded images."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_ratio(self.aspect_ratio)
        lists = [read_lines(Path(name)) if name.endswith(".txt") else [name] for name in self.exclude]
        object.__setattr__(self, "exclude", tuple(name for names in lists for name in names))

    @property
    def framing(self) -> Framing:
        """The form in which pictures are stored and trained on."""
        return Framing.of(
            self.image_size,
            self.aspect_ratio,
            alpha=self.alpha,
            crop=self.crop,
            grey=self.grey,
            resize=self.resize or "lanczos",
            bits=self.bits or 16,
        )

    @property
    def starter(self) -> str:
        """Name of the starter for these data: the name of the autoencoder, or ``pixels``."""
        return name_of(self.autoencoder) or "pixels"


@dataclass(frozen=True)
class SourceConfig(Flags):
    """Source pictures, for image-to-image translation."""

    source_path: Annotated[Path | None, flag(local=True, for_pictures=True, excludes="degrade", fixes_size=True)] = None
    """Folder of source pictures, which are translated to pictures like those of the dataset."""
    paired: Annotated[bool, flag(needs="source_path", excludes="coupling")] = False
    """Pair files of the same name in both folders (cut pairs in one file first); otherwise pairs are random."""
    source_resize: Annotated[
        Resize | None, flag(needs="source_path"), default_is("as for --resize, by the sources")
    ] = None
    """Filter that resizes source pictures."""
    source_bits: Annotated[Bits | None, flag(needs="source_path"), default_is("as for --bits, by the sources")] = None
    """Bits of the values in 16-bit files of source pictures."""
    degrade: Annotated[str | None, flag(excludes="autoencoder coupling", fixes_size=True)] = None
    """Make sources from the pictures: downsample:4, grey, blur:2, mask:box, mask:brush, edges, or a registered one."""
    source_as: Annotated[
        Literal["start", "condition"] | None,
        flag(needs="source_path degrade"),
        default_is("start with --source_path, condition with --degrade"),
    ] = None
    """start: paths start from the source instead of noise; condition: the source is a further input of the network."""
    source_noise: Annotated[NonNegative, flag(needs="source_path degrade")] = 0.0
    """Standard deviation of Gaussian noise added to the source with --source_as start; it makes results random."""

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
    """Conditions from metadata columns: captions, numbers and labels."""

    condition_on: Annotated[
        tuple[str, ...], flag(for_pictures=True), tyro.conf.arg(metavar="COLUMN[=TYPE] ..."), default_is("none")
    ] = ()
    """Columns to train on as conditions, of metadata.csv, metadata.jsonl, NAME.txt (text) or a dataset; or all. TYPE
    is caption, label, number, or a registered one; without it, the values determine the type."""
    text_encoder: Annotated[str | None, flag(local=True, needs="condition_on"), default_is("bag of words")] = None
    """Frozen text encoder for captions: folder or hub id of a sentence model, CLIP or T5 (transformers)."""
    text_tokens: Annotated[Natural, flag(needs="text_encoder")] = 0
    """Number of caption tokens that attention levels attend to; 0 uses only the vector of the whole caption."""


@dataclass(frozen=True)
class NetworkConfig(Flags):
    """The network."""

    network: Annotated[Part, flag(choice="network")] = (UNET,)
    """Unet, or a registered network, and its arguments, such as blocks_per_level=1."""
    dim: Annotated[int, Interval(gt=0, le=4096), flag(choice="network")] = 64
    """Channels of the Unet at full resolution."""
    dim_mults: Annotated[tuple[Multiple, ...], Len(1), flag(choice="network")] = (1, 2, 3, 4)
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

    teacher: Annotated[Path | None, flag(for_pictures=True, excludes="augment init_from stop_when_memorising")] = None
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
    autoguidance: Annotated[
        NonNegative | None,
        flag(needs="teacher one_step"),
        default_is("1.5 for most teachers of 400 items or more, else 1"),
    ] = None
    """Scale of autoguidance with which the teacher samples, away from an early checkpoint of its run."""


@dataclass(frozen=True)
class EvaluationConfig(Flags):
    """Evaluation during training."""

    evaluate_every: Natural = 0
    """Steps between evaluations (see evaluate.py) at --sample_steps; the best checkpoint is kept. 0 disables them."""
    evaluation_samples: Annotated[AtLeastTwo, flag(needs="evaluate_every")] = 2000
    """Number of samples for each evaluation."""
    feature_network: Annotated[FeatureNetwork, flag(needs="evaluate_every")] = "inception"
    """Features for comparing pictures: inception (FID and KID), or efficientnet_lite0 (no download)."""
    evaluate_metric: Annotated[
        tuple[str, ...], flag(needs="evaluate_every", stands_for="metric"), default_is("none")
    ] = ()
    """Further registered metrics of each evaluation, beside frechet, kernel and copies, such as agreement."""
    stop_when_memorising: Annotated[bool, flag(for_pictures=True)] = False
    """Stop when the loss on --holdout pictures rises; `best` has the lowest held-out loss."""


@dataclass(frozen=True)
class TrainProgramConfig(ProgramConfig):
    """Flags of the training program itself."""

    config: Annotated[Path | None, flag(recorded=False)] = None
    """Start from the flags in this file, a run's config.json; flags on the command line override them."""
    budget: Annotated[
        str | None,
        flag(recorded=False, for_pictures=True, excludes="num_epochs train_num_steps config"),
        default_is("1h with --dataset_path or a teacher, if no flag gives the length"),
    ] = None
    """Time to train, such as 90s, 45min, 1h30m or 1d; network, length and learning rate are chosen for it."""
    one_step: Annotated[
        bool, flag(recorded=False, for_pictures=True, excludes="flow num_epochs train_num_steps config")
    ] = False
    """Then distil the run to a one-step generator in OUTPUT_DIR/one-step; each gets half of the budget."""
    dry_run: Annotated[bool, flag(recorded=False)] = False
    """Check the flags, print the plan of the run with its time and memory, and exit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds_of(self.budget or "1s")


@dataclass(frozen=True)
class InitConfig(Flags):
    """Initial weights."""

    init_from: Path | None = None
    """Checkpoint or run whose weights initialise the network where their shapes match; starter: weights of the package;
    none: random weights."""

    def origin(self, starter: str) -> Path | None:
        """Return the checkpoint or run that the weights are initialised from; None for random weights.

        Args:
            starter: name of the starter for the data, as :attr:`DataConfig.starter`.

        Raises:
            UsageError: if the package has no starter for the data.
        """
        if self.init_from != STARTER:
            return None if self.init_from == NO_WEIGHTS else self.init_from
        if starter not in {folder.name for folder in STARTERS.iterdir()}:
            remedy = "pass --autoencoder small, or another --init_from"
            raise UsageError(f"--init_from starter has no weights for --autoencoder {starter}: {remedy}")
        return STARTERS / starter


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
    def method(self) -> Method:
        """The training method."""
        return self.flow.method or "rectified"

    @property
    def is_planned(self) -> bool:
        """Whether the program chooses flags that are not given, for a folder of pictures, a teacher or a budget."""
        has_own_data = self.data.dataset_path is not None or self.teacher.teacher is not None
        is_timed = self.program.budget is not None or self.program.one_step
        return (has_own_data or is_timed) and self.program.config is None


@dataclass(frozen=True)
class OneStepConfig(TrainConfig):
    """The flags of ``rectified-flow one-step``, with another default of ``--method``."""

    RUN_FLAG = "--teacher"  # the flag that a run most likely belongs to, for hints

    @property
    def method(self) -> Method:
        """The training method."""
        return self.flow.method or ("mean_flow" if self.teacher.teacher is None else "distill")
