"""The flags of the programs that take runs: sample.py, evaluate.py, export.py and watch.py.

Imports no torch, see :mod:`rectified_flow.flags`.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rectified_flow.cli.train_flags import BYTES_PER_FEATURES, ProgramConfig
from rectified_flow.errors import require, require_finite, require_natural, require_positive
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.flags import check_paths, default_is
from rectified_flow.flows import Solver, TimeGrid
from rectified_flow.runs.config import LONGEST_EMA, SHORTEST_EMA, require_room_for_steps
from rectified_flow.system.machine import require_memory


@dataclass(frozen=True)
class ModelConfig:
    """The model to sample from."""

    checkpoint: Path = Path("runs/rectified-flow")
    """A run's folder, for its newest checkpoint, or a checkpoint; its averaged weights are used if there are any."""
    batch_size: int = 64
    """Pictures drawn at once by each process."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Precision of the network."""
    autoencoder: str | None = None
    """Folder or hub id of the autoencoder that a flow of latents was trained with, if it has moved since."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_positive(self, "batch_size")


@dataclass(frozen=True)
class SolverConfig:
    """From noise to pictures."""

    solver: Annotated[Solver | None, default_is("midpoint")] = None
    """How a rectified flow crosses an interval; adaptive chooses its own steps."""
    time_grid: TimeGrid = "uniform"
    """How the intervals are cut: all alike, or denser near the noise, or as in EDM."""
    guidance_scale: float = 1.0
    """Above 1, pictures show their class more clearly, and vary less; for a rectified flow with classes."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """First and last noise level at which guidance acts."""

    def __post_init__(self) -> None:
        require_finite(self)
        require_natural(self, "guidance_scale")
        scale, (first, last) = self.guidance_scale, self.guidance_interval
        require(first < last, f"--guidance_interval is {first:g} {last:g}; the first number must be the smaller one")
        require(
            scale != 1 or (first, last) == (0, 1),
            f"--guidance_interval {first:g} {last:g} needs a --guidance_scale other than 1",
        )


@dataclass(frozen=True)
class PicturesConfig:
    """The pictures to draw."""

    num_samples: int = 64
    """Number of pictures; picture 5 of a seed is the same in any number of them (but by --solver adaptive)."""
    steps: Annotated[int | None, default_is("16 for a rectified flow, 1 for a mean flow")] = None
    """Intervals from noise to picture."""
    classes: Annotated[str | None, default_is("drawn for each picture")] = None
    """Names or numbers of classes, separated by commas, that take turns; or all."""
    seed: int = 0
    """Seed of the noise and of all other draws."""
    ema_length: float | None = None
    """Use a power-function EMA of this length, as a share of the run, instead of the averaged weights; --power_ema."""
    from_images: Path | None = None
    """A picture, or a folder of them that take turns, to start from instead of noise alone."""
    noise_level: Annotated[float | None, default_is("0.6")] = None
    """How far towards noise those are taken first, from 0, where they stay as they are, to 1."""
    output_dir: Annotated[Path | None, default_is("generated, in the run's folder")] = None
    """Where the pictures go."""
    path: Literal["none", "strip", "gif"] = "none"
    """Also show how the first pictures come out of the noise."""
    save_pretrained: Path | None = None
    """Also write the model into this folder, with a card, ready for the Hugging Face hub."""
    license: str | None = None
    """The licence that the card names, as the hub writes it: mit, cc-by-4.0, and others."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        require_positive(self, "num_samples", "steps")
        require_room_for_steps("steps", self.steps or 1)
        check_seed(self.seed)
        level = self.noise_level
        require(level is None or 0 < level <= 1, f"--noise_level is {level}; it must be above 0 and at most 1")
        require(level is None or self.from_images is not None, "--noise_level needs --from_images: pass some")
        require(
            self.license is None or self.save_pretrained is not None,
            "--license names the licence on the card of --save_pretrained: pass a folder",
        )
        require(
            self.license is None or re.fullmatch(r"[a-z0-9.-]+", self.license) is not None,
            f"--license is {self.license!r}; the hub writes licences in small letters, such as mit or cc-by-4.0",
        )
        require(
            self.ema_length is None or SHORTEST_EMA <= self.ema_length <= LONGEST_EMA,
            f"--ema_length is {self.ema_length}; it must be from {SHORTEST_EMA} to {LONGEST_EMA}",
        )


@dataclass(frozen=True)
class SampleConfig:
    """All flags of sample.py."""

    model: ModelConfig = field(default_factory=ModelConfig)
    pictures: PicturesConfig = field(default_factory=PicturesConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)

    def __post_init__(self) -> None:
        check_adaptive(self.solver, self.pictures.steps)


@dataclass(frozen=True)
class MeasureConfig:
    """The comparison to make."""

    num_samples: int = 10_000
    """Pictures to draw for each number; fewer make the Fréchet distance larger, so compare equal numbers only."""
    steps: Annotated[tuple[int, ...], default_is("16 for a rectified flow, 1 for a mean flow")] = ()
    """Intervals from noise to picture, an evaluation for each."""
    feature_network: FeatureNetwork = "inception"
    """Features that pictures are compared by: inception, for FID and KID, or efficientnet_lite0, which needs no
    download."""
    ema_lengths: Annotated[tuple[float, ...], default_is("none")] = ()
    """Evaluate power-function EMAs of these lengths (shares of the run), not the averaged weights; --power_ema."""
    seed: int = 0
    """Seed of the pictures, and of the subsets of the kernel distance."""
    dataset_path: Path | None = None
    """Folder of the training pictures, if it has moved since."""
    cache_dir: Path | None = None
    """Where decoded images are kept, if it has moved since."""
    output_dir: Annotated[Path | None, default_is("the run's folder")] = None
    """Where evaluation.json goes."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        check_seed(self.seed)
        require(self.num_samples >= 2, f"--num_samples is {self.num_samples}; a distance needs at least 2")
        require_memory(self.num_samples * BYTES_PER_FEATURES, f"--num_samples {self.num_samples}", "draw fewer")
        require(all(steps > 0 for steps in self.steps), f"--steps is {self.steps}; all must be above 0")
        for steps in self.steps:
            require_room_for_steps("steps", steps)
        for name in ("steps", "ema_lengths"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"--{name} {values} contains duplicates")
        require(
            all(SHORTEST_EMA <= length <= LONGEST_EMA for length in self.ema_lengths),
            f"--ema_lengths is {self.ema_lengths}; all must be from {SHORTEST_EMA} to {LONGEST_EMA}",
        )


@dataclass(frozen=True)
class EvaluateConfig:
    """All flags of evaluate.py."""

    model: ModelConfig = field(default_factory=ModelConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)

    def __post_init__(self) -> None:
        check_adaptive(self.solver, self.measure.steps)


@dataclass(frozen=True)
class ExportedConfig:
    """The model to export, and how."""

    checkpoint: Path = Path("runs/rectified-flow")
    """A run's folder, for its newest checkpoint, or a checkpoint; its averaged weights are used if there are any."""
    format: Literal["onnx", "torch", "page"] = "onnx"
    """A program in ONNX, one of torch.export, or a web page that draws pictures in the browser."""
    output_dir: Annotated[Path | None, default_is("exported, in the run's folder")] = None
    """Where the program and its model.json go."""
    half: bool = False
    """Store weights in float16, in half the room; the program still computes in float32."""

    def __post_init__(self) -> None:
        check_paths(self)


@dataclass(frozen=True)
class ExportConfig:
    """All flags of export.py."""

    model: ExportedConfig = field(default_factory=ExportedConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


@dataclass(frozen=True)
class WatchedConfig:
    """The runs to watch, and where."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = (Path("runs"),)
    """Folders of runs (--output_dir), or folders that hold them."""
    host: str = "127.0.0.1"
    """Address to serve the page at; 0.0.0.0 shows it to everyone who can reach this machine."""
    port: int = 8765
    """Port of the page; where it is taken, one of the next."""
    open: bool = False
    """Open the page in a browser."""

    def __post_init__(self) -> None:
        check_paths(self)
        require(0 <= self.port < 65536, f"--port is {self.port}; it must be from 0 to 65535")


@dataclass(frozen=True)
class WatchConfig:
    """All flags of watch.py."""

    watched: WatchedConfig = field(default_factory=WatchedConfig)
    program: ProgramConfig = field(default_factory=ProgramConfig)


def check_seed(seed: int) -> None:
    """Raise a UsageError unless ``seed`` fits into 32 bits."""
    require(0 <= seed < 2**32, f"--seed is {seed}; it must be at least 0 and below 2**32")


def check_adaptive(solver: SolverConfig, steps: object) -> None:
    """Raise a UsageError if ``--steps`` is given to the solver that chooses its own."""
    require(solver.solver != "adaptive" or not steps, "--steps and --solver adaptive exclude each other; give one")
