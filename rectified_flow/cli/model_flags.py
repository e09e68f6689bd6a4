"""The flags of the programs that read a trained model or its run: sample, evaluate, export and watch.

Imports no torch, so that ``--help`` starts fast.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Interval

from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import (
    AtLeastTwo,
    Flags,
    NonNegative,
    Part,
    Positive,
    Seed,
    default_is,
    flag,
)
from rectified_flow.flows import Solver, Strength, TimeGrid


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
    time_grid: Annotated[TimeGrid | None, default_is("edm on latents or with autoguidance, else uniform")] = None
    """Step spacing: uniform, shifted, EDM."""
    guidance_scale: Annotated[NonNegative | None, default_is("2 with captions and without --guidance, else 1")] = None
    """Classifier-free guidance scale, for models with conditions; above 1, images vary less."""
    guidance: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=SCALE ...]"), default_is("none")] = ()
    """Guidance scales of single conditions beside --guidance_scale, such as category=2 text=3."""
    autoguidance: Annotated[NonNegative | None, default_is("2.5 for runs on 400 items or more, else 1")] = None
    """Autoguidance scale of a rectified flow, away from an early checkpoint of its run; takes up to twice the calls."""
    guidance_interval: Annotated[
        tuple[float, float] | None,
        flag(needs="guidance_scale guidance autoguidance"),
        default_is("0 0.9 for autoguidance alone, else 0 1"),
    ] = None
    """Noise levels between which guidance is applied."""

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

    num_samples: Annotated[
        int | None, Interval(gt=0, le=10**8), default_is("64; more for all classes or given images")
    ] = None
    """Number of samples, or of the images to translate or to inpaint (--variants for several results of each)."""
    steps: Annotated[Positive | None, default_is("16 for a rectified flow, 1 for a mean flow")] = None
    """Sampling steps."""
    classes: Annotated[str | None, default_is("random")] = None
    """Comma-separated names or numbers of classes, used in turn; or all."""
    prompt: str | None = None
    """Caption of the images, of a model that was trained on captions."""
    prompts: Annotated[Path | None, flag(excludes="prompt")] = None
    """Text file with a caption in each line; each line becomes an image with the name of the line."""
    set_: Annotated[
        tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]],
        tyro.conf.arg(name="set", metavar="NAME=VALUE", help_behavior_hint="(default: none)"),
    ] = ()
    """Values of conditions by name, such as unicode_version=9; several, separated by commas, are used in turn."""
    grid: Annotated[
        tuple[str, str] | None, tyro.conf.arg(metavar="ROWS COLUMNS"), flag(excludes="num_samples from_images prompts")
    ] = None
    """Generate a grid with its values below; each axis is a condition (NAME or NAME=VALUE,VALUE) or seed=COUNT."""
    seed: Seed = 0
    """Sample i depends only on the seed and i."""
    from_images: Path | None = None
    """Image or folder of images to translate, or to add noise to and start from (--strength)."""
    variants: Annotated[Positive, flag(needs="from_images")] = 1
    """Number of results for each image of --from_images."""
    mask: Annotated[Path | None, flag(needs="from_images", excludes="degrade")] = None
    """Mask for inpainting --from_images: white pixels are generated, all others are kept."""
    degrade: Annotated[bool, flag(needs="from_images")] = False
    """Degrade --from_images first, as in training, to test a model on intact pictures."""
    strength: Annotated[Strength | None, flag(needs="from_images"), default_is("0.6")] = None
    """Noise level in (0, 1] of --from_images."""
    output_dir: Annotated[Path | None, default_is("the run's folder/generated")] = None
    """Folder for the images. Images of earlier calls are kept, and the file numbers continue."""
    metadata: bool = True
    """Write seed, settings, the model's hash and the IPTC mark of generated pictures into the pictures."""
    like: Annotated[
        Path | None,
        flag(
            excludes="num_samples steps classes prompt prompts set grid seed from_images solver time_grid "
            "guidance_scale guidance autoguidance mixed_precision"
        ),
    ] = None
    """Generate the picture in this file again, by the settings that are written in it."""
    nearest: Annotated[
        tuple[Path] | tuple[()] | None,
        flag(stands_for="dataset_path"),
        tyro.conf.arg(metavar="[FOLDER]", help_behavior_hint="(default: no)"),
    ] = None
    """Also write a sheet of the training pictures nearest to each sample; FOLDER has them if they have moved."""
    save_pretrained: Annotated[Path | None, flag(excludes="autoguidance")] = None
    """Also save the model with its card in this folder, ready for the Hugging Face hub."""
    license: Annotated[str | None, flag(needs="save_pretrained")] = None
    """Licence on the model card, as the hub spells it, such as mit or cc-by-4.0."""


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


@dataclass(frozen=True)
class EvaluateConfig(SamplingConfig):
    """All flags of evaluate.py."""

    samples: MeasureConfig = field(default_factory=MeasureConfig)


@dataclass(frozen=True)
class ExportedConfig(Flags):
    """The model and its format."""

    checkpoint: Path = Path("runs/rectified-flow")
    """A run's folder, for its newest checkpoint, or a checkpoint; its averaged weights are used if there are any."""
    format: Part = ("onnx",)
    """onnx, page for a web page that samples in the browser, or a registered format, and its arguments."""
    output_dir: Annotated[Path | None, default_is("the run's folder/exported")] = None
    """Folder for the program and its model.json."""
    autoencoder: str | None = None
    """Folder or hub id of the autoencoder of a latent flow, if it has moved."""
    text_encoder: str | None = None
    """Folder or hub id of the text encoder of a flow with captions, if it has moved."""
    half: bool = False
    """Store weights in float16, half the size; the program still computes in float32."""
    open: Annotated[bool, flag(needs="format")] = False
    """Also serve the page on this machine until Ctrl-C, and open it in a browser."""
    metadata: Annotated[bool, flag(needs="format")] = True
    """Have the page write seed, settings and the mark of generated pictures into the pictures that it saves."""


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


@dataclass(frozen=True)
class WatchConfig:
    """All flags of watch."""

    watched: WatchedConfig = field(default_factory=WatchedConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)
