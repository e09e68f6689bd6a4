"""The description of a run's data: flags, which ``config.json`` records, and by which the data are opened again."""

import fractions
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

import tyro
from annotated_types import Gt, Interval

from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Fraction, Natural, NonNegative, Part, Probability, Seed, default_is, flag
from rectified_flow.registry import register
from rectified_flow.system.files import read_lines
from rectified_flow.system.terminal import size_text

Crop = Literal["center", "random", "none"]
Side = Annotated[int, Gt(0)]
MARGIN = 1.25  # sides of a stored image from which random parts are cropped, as multiples of the sides of the parts


@dataclass(frozen=True)
class Framing:
    """Size, channels and crop of the training pictures.

    Args:
        width: width of the network's input [px].
        height: height of the network's input [px].
        alpha: keep transparency, as a fourth channel.
        crop: the centre, a random part at each step, or nothing: the whole picture is padded.
    """

    width: Side
    height: Side
    alpha: bool = False
    crop: Crop = "center"

    @classmethod
    def of(cls, image_size: int, aspect_ratio: str = "1:1", *, alpha: bool = False, crop: Crop = "center") -> Self:
        """Build the framing from the values of flags; ``image_size`` is the short side."""
        width, height = parse_ratio(aspect_ratio)
        short = min(width, height)
        times, rest = divmod(image_size, short)
        if rest:
            given = f"--image_size {image_size} with --aspect_ratio {aspect_ratio}"
            raise UsageError(f"{given} gives a fractional long side; pass a multiple of {short}")
        return cls(width * times, height * times, alpha, crop)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(c, h, w)`` of the network's input."""
        return 3 + self.alpha, self.height, self.width

    @property
    def stored_size(self) -> tuple[int, int]:
        """Width and height of a row of the store [px]."""
        margin = MARGIN if self.crop == "random" else 1
        return round(margin * self.width), round(margin * self.height)

    @property
    def size_text(self) -> str:
        """``64``, or ``96x64``."""
        return size_text(self.width, self.height)

    def enlarges(self, width: int, height: int) -> bool:
        """Return whether an image of this size would be enlarged when it is stored."""
        smaller = [given < stored for given, stored in zip((width, height), self.stored_size, strict=True)]
        return all(smaller) if self.crop == "none" else any(smaller)


def parse_ratio(text: str) -> tuple[int, int]:
    """Parse ``width:height``, such as ``3:2``, and return both numbers in lowest terms."""
    match = re.fullmatch("([1-9][0-9]{0,3}):([1-9][0-9]{0,3})", text)
    if match is None:
        rule = "it must be width:height, two whole numbers from 1 to 9999, such as 3:2"
        raise UsageError(f"--aspect_ratio is {text}; {rule}")
    return fractions.Fraction(int(match[1]), int(match[2])).as_integer_ratio()


@register
@dataclass(frozen=True)
class DataConfig(Flags):
    """The training pictures."""

    dataset: Annotated[Part, flag(replaces="dataset_path")] = (OXFORD_FLOWERS,)
    """Hub id of a dataset with an image column, synthetic-flowers (no download), or a registered dataset."""
    dataset_path: Annotated[Path | None, flag(local=True)] = None
    """Folder of your own pictures or measurements (with a subfolder per class, or none), or a local datasets folder."""
    image_size: Annotated[int, Interval(ge=0, le=16384)] = 64
    """Short side of the images [px]; pictures are resized by their short side and cropped to --aspect_ratio. 0 uses
    the size and the aspect ratio of the first picture."""
    aspect_ratio: str = "1:1"
    """Width to height of the images, such as 3:2."""
    crop: Crop = "center"
    """Centre crop, random crop, or pad."""
    alpha: Annotated[bool, flag(excludes="autoencoder")] = False
    """Keep transparency as a fourth channel; otherwise transparent parts become white."""
    space: Annotated[Part, default_is("by the files, or Latents with --autoencoder")] = ()
    """Data space: Pixels, Fields for measurements (.npy, .tif, 16-bit .png), or a registered one; arguments of Fields
    are value_range, transform, show, channels_last and store_bits."""
    autoencoder: Annotated[Part, flag(local=True, for_pictures=True, excludes="augment"), default_is("none")] = ()
    """Train on latents of an autoencoder: small (in the package), a diffusers folder or hub id, or a registered one."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    augment: Probability = 0.0
    """Probability of each augmentation; the network is conditioned on it. Try 0.15 on small data."""
    holdout: Annotated[Fraction, flag(for_pictures=True)] = 0.0
    """Fraction of the images to hold out, to detect memorisation."""
    data_seed: Annotated[Seed | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    """Seed of the held-out images, of unpaired sources, and of the choice among several captions. It is not a flag: a
    new run gets the value of ``--seed``, and a resumed run and its students keep that value."""
    skip_broken_images: bool = False
    """Skip pictures that cannot be decoded, or with --paired have no partner, instead of stopping."""
    exclude: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LIST.txt | NAME ..."), default_is("none")] = ()
    """Pictures to leave out: paths in the folder, numbers of rows of a table, or a text file with one a line."""
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
        return Framing.of(self.image_size, self.aspect_ratio, alpha=self.alpha, crop=self.crop)


@register
@dataclass(frozen=True)
class SourceConfig(Flags):
    """Source pictures, for image-to-image translation."""

    source_path: Annotated[Path | None, flag(local=True, for_pictures=True, excludes="degrade")] = None
    """Folder of source pictures, which are translated to pictures like those of the dataset."""
    paired: Annotated[bool, flag(needs="source_path", excludes="coupling")] = False
    """Pair files of the same name in both folders (cut pairs in one file first); otherwise pairs are random."""
    degrade: Annotated[str | None, flag(excludes="autoencoder coupling")] = None
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


@register
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


@register
@dataclass(frozen=True)
class RunData:
    """All data of a run: the block ``data`` of its ``config.json``."""

    pictures: DataConfig = field(default_factory=DataConfig)
    source: SourceConfig = field(default_factory=SourceConfig)
    columns: ColumnConfig = field(default_factory=ColumnConfig)
