"""The flags of the programs that use a trained model; imports no torch, so that ``--help`` answers at once."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Interval

from rectified_flow.cli.config import ProgramConfig
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import AtLeastTwo, Flags, NonNegative, Positive, Seed, Strength, default_is, refuse
from rectified_flow.flows import Solver, TimeGrid


@dataclass(frozen=True)
class ModelConfig(Flags):
    """The model to sample from."""

    checkpoint: Path = Path("runs/rectified-flow")
    """A checkpoint, or a run's folder for its newest one; averaged weights are used if there are any."""
    batch_size: Positive = 64
    """Per-process batch size."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Precision of the network."""
    autoencoder: str | None = None
    """Folder or hub id of the autoencoder of a latent flow, if it has moved."""
    text_encoder: str | None = None
    """Folder or hub id of the text encoder of a flow with captions, if it has moved."""


@dataclass(frozen=True)
class SolverConfig(Flags):
    """Sampling from noise to data."""

    solver: Annotated[Solver | None, default_is("ab2")] = None
    """ODE solver of a rectified flow; midpoint and heun use two network calls per step."""
    time_grid: TimeGrid = "uniform"
    """Step spacing: uniform, shifted, EDM."""
    guidance_scale: Annotated[NonNegative | None, default_is("2 with captions, else 1")] = None
    """Classifier-free guidance scale, for models with conditions; above 1, images vary less."""
    guidance: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=SCALE ...]"), default_is("none")] = ()
    """Guidance scales of single conditions beside --guidance_scale, such as category=2 text=3."""
    autoguidance: NonNegative = 1.0
    """Autoguidance scale of a rectified flow, away from an early checkpoint of its run; doubles the network calls."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """First and last noise level at which guidance acts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.guidance_interval
        if first >= last:
            raise UsageError(f"--guidance_interval {first:g} {last:g} is empty: pass the smaller number first")
        scales = self.guidance_scales
        if self.guidance_scale in (None, 1) and self.autoguidance == 1 and not scales:
            refuse(
                {"guidance_interval": self.guidance_interval != (0, 1)},
                "needs a --guidance_scale other than 1, or --autoguidance",
            )

    @property
    def guidance_scales(self) -> dict[str, float]:
        """The scales of single conditions by name."""
        scales = {}
        for option in self.guidance:
            name, _, text = option.partition("=")
            if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]+)?", text):
                raise UsageError(f"--guidance {option} must be NAME=SCALE with a number of at least 0, such as text=3")
            scales[name] = float(text)
        return scales


@dataclass(frozen=True)
class PicturesConfig(Flags):
    """The images to sample."""

    num_samples: Annotated[int | None, Interval(gt=0, le=10**8), default_is("64, or all translations")] = None
    """Number of samples."""
    steps: Annotated[Positive | None, default_is("16 for a rectified flow, 1 for a mean flow")] = None
    """Sampling steps."""
    classes: Annotated[str | None, default_is("random")] = None
    """Comma-separated names or numbers of classes, used in turn; or all."""
    prompt: str | None = None
    """Caption of the images, of a model that was trained on captions."""
    prompts: Path | None = None
    """Text file with a caption in each line; each line becomes an image with the name of the line."""
    set_: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(name="set", metavar="NAME=VALUE", help_behavior_hint="(default: none)"),
    ] = ()
    """Values of conditions by name, such as unicode_version=9; several, separated by commas, are used in turn."""
    grid: Annotated[tuple[str, str] | None, tyro.conf.arg(metavar="ROWS COLUMNS")] = None
    """Generate a labelled grid; each axis is a condition (NAME or NAME=VALUE,VALUE) or seed=COUNT."""
    seed: Seed = 0
    """Sample i depends only on the seed and i."""
    from_images: Path | None = None
    """Image or folder of images to translate, or to add noise to and start from (--strength)."""
    variants: Positive = 1
    """Number of results for each image of --from_images."""
    mask: Path | None = None
    """Mask for inpainting --from_images: white pixels are generated, all others are kept."""
    degrade: bool = False
    """Degrade --from_images first, as in training, to test a model on intact pictures."""
    reverse: bool = False
    """Translate in the opposite direction, from target pictures to source pictures."""
    strength: Annotated[Strength | None, default_is("0.6")] = None
    """Noise level in (0, 1] of --from_images."""
    output_dir: Annotated[Path | None, default_is("the run's folder/generated")] = None
    """Folder for the images."""
    metadata: bool = True
    """Write seed, settings, the model's hash and the IPTC mark of generated pictures into the pictures."""
    like: Path | None = None
    """Generate the picture in this file again, by the settings that are written in it."""
    nearest: Annotated[
        tuple[Path] | tuple[()] | None, tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="(default: no)")
    ] = None
    """Also write a sheet of the training pictures nearest to each sample; FOLDER has them if they have moved."""
    path: Literal["none", "strip", "gif"] = "none"
    """Save the sampling trajectory."""
    save_pretrained: Path | None = None
    """Also save the model with its card in this folder, ready for the Hugging Face hub."""
    license: str | None = None
    """Licence on the model card, as the hub spells it, such as mit or cc-by-4.0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.like is not None:
            kept = {"like", "output_dir", "metadata", "nearest", "save_pretrained", "license"}
            changed = {each.name.rstrip("_"): getattr(self, each.name) != each.default for each in fields(self)}
            refuse(changed | dict.fromkeys(kept), "has no effect with --like, which repeats the settings of a picture")
        needs = dict.fromkeys(("strength", "mask", "degrade", "reverse"), "from_images")
        for flag, needed in {**needs, "license": "save_pretrained"}.items():
            if getattr(self, needed) is None:
                refuse({flag: getattr(self, flag)}, f"has no effect without --{needed}: pass both")
        refuse({"prompts": self.prompt is not None and self.prompts}, "and --prompt exclude each other: pass one")
        grid = {"num_samples": self.num_samples, "from_images": self.from_images, "prompts": self.prompts}
        refuse(grid if self.grid else {}, "excludes --grid, whose axes determine the images: leave one out")
        if self.from_images is None:
            refuse({"variants": self.variants > 1}, "has no effect without --from_images: pass both")
        if self.mask is not None:
            refuse({"reverse": self.reverse, "degrade": self.degrade}, "excludes --mask: leave one out")
        _check_license(self.license)


def _check_license(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[a-z0-9.-]+", name):
        raise UsageError(f"--license {name} is not a license id of the hub: choose one such as mit")


@dataclass(frozen=True)
class MeasureConfig(Flags):
    """The comparison."""

    num_samples: AtLeastTwo = 10_000
    """Number of samples; with fewer the Fréchet distance grows, so compare equal numbers only."""
    steps: Annotated[tuple[Positive, ...], default_is("16 for a rectified flow, 1 for a mean flow")] = ()
    """Sampling steps; one evaluation for each number."""
    feature_network: FeatureNetwork = "inception"
    """Features for comparing pictures: inception (FID and KID), or efficientnet_lite0 (no download)."""
    metric: Annotated[tuple[str, ...], default_is("those of the data")] = ()
    """Registered metrics: frechet, kernel, copies, manifold, agreement, translation, spectra, likelihood or yours."""
    seed: Seed = 0
    """Seed of the samples and of the kernel distance's subsets."""
    dataset_path: Path | None = None
    """Folder of the training pictures, if it has moved."""
    source_path: Path | None = None
    """Folder of the source pictures, if it has moved."""
    cache_dir: Path | None = None
    """Folder of decoded images, if it has moved."""
    output_dir: Annotated[Path | None, default_is("the run's folder")] = None
    """Folder for the results, evaluation.json."""


@dataclass(frozen=True)
class SamplingConfig:
    """The flags that sample.py and evaluate.py share, in the order of ``--help``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    samples: Any = field(default_factory=PicturesConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """All flags of sample.py."""

    samples: PicturesConfig = field(default_factory=PicturesConfig)

    def __post_init__(self) -> None:
        if self.samples.like is not None and self.solver != SolverConfig():
            raise UsageError("--like repeats the settings of a picture: leave the flags of the solver out")
        solver, is_guided = self.solver, self.solver.autoguidance != 1
        if self.samples.save_pretrained is not None:
            refuse({"autoguidance": is_guided}, "excludes --save_pretrained, which saves one network")
        if self.samples.reverse:
            flags = {"autoguidance": is_guided, "guidance_scale": solver.guidance_scale not in (None, 1)}
            refuse(flags | {"guidance": solver.guidance}, "has no effect with --reverse: leave it out")
            refuse({"solver": solver.solver == "stochastic"}, "stochastic cannot be inverted: pass another solver")


@dataclass(frozen=True)
class EvaluateConfig(SamplingConfig):
    """All flags of evaluate.py."""

    samples: MeasureConfig = field(default_factory=MeasureConfig)


@dataclass(frozen=True)
class ExportedConfig(Flags):
    """The model and its format."""

    checkpoint: Path = Path("runs/rectified-flow")
    """A run's folder, for its newest checkpoint, or a checkpoint; its averaged weights are used if there are any."""
    format: Literal["onnx", "page"] = "onnx"
    """ONNX, or a web page that samples in the browser."""
    output_dir: Annotated[Path | None, default_is("the run's folder/exported")] = None
    """Folder for the program and its model.json."""
    half: bool = False
    """Store weights in float16, half the size; the program still computes in float32."""
    open: bool = False
    """Also serve the page on this machine until Ctrl-C, and open it in a browser."""
    metadata: bool = True
    """Have the page write seed, settings and the mark of generated pictures into the pictures that it saves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != "page":
            refuse({"open": self.open}, "has no effect without --format page: pass both")


@dataclass(frozen=True)
class ExportConfig:
    """All flags of export.py."""

    model: ExportedConfig = field(default_factory=ExportedConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


@dataclass(frozen=True)
class WatchedConfig(Flags):
    """The runs to watch."""

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of a run (--output_dir), or a folder that contains runs."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 6006
    """Port of the page."""


@dataclass(frozen=True)
class WatchConfig:
    """All flags of watch."""

    watched: WatchedConfig = field(default_factory=WatchedConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)
