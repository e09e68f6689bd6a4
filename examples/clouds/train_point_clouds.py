"""Train a flow between sets of points: digits as clouds, in the plane, on the sphere or on the flat torus.

The clouds are drawn from scikit-learn's handwritten digits, which need no download. Points of the noise are paired with
points of the digits by optimal transport. During training, the distance between generated and held-out clouds is
measured, and the share of clouds that a classifier recognises as the requested digit. Needs
`pip install -e ".[points]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_point_clouds:train", "train_point_clouds:CloudFlags", __doc__)

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from accelerate.utils import set_seed
from annotated_types import Interval

from cloud_distances import Distances
from digits import DIGITS, Digits
from point_clouds import Points
from rectified_flow import Trainer, TrainingConfig, UsageError
from rectified_flow.cli.build import join
from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.flags import Flags, Fraction, NonNegative, Positive, Probability, recorded
from riemannian import PointCoupling, RiemannianFlow
from set_transformer import HEAD, SetTransformer

CONDITIONS = {"none": (), "label": ("labels",), "moments": ("moments",), "both": ("labels", "moments")}


@dataclass(frozen=True)
class CloudConfig(Flags):
    """The clouds and the network."""

    geometry: Literal["plane", "sphere", "torus"] = "plane"
    """Where the points are."""
    points: Annotated[int, Interval(ge=2, le=4096)] = 48
    """Largest number of points of a cloud; the smallest is half of it."""
    point_coupling: PointCoupling = "drawn"
    """Coupling of the points of a cloud with those of its noise, by entropic optimal transport unless independent."""
    coupling: Literal["independent", "ot"] = "independent"
    """Coupling of clouds with noise: independent, or the best match within each digit of the global batch."""
    condition: Literal["none", "label", "moments", "both"] = "label"
    """Conditions of a cloud: its digit, the vector of its moments (width, height and slant), or both."""
    missing_conditions: Fraction = 0.0
    """Share of the training clouds whose digit is unknown, and likewise of those whose moments are."""
    condition_dropout: Probability = 0.1
    """Share of clouds that are trained without their conditions, for guidance."""
    width: Annotated[int, Interval(gt=0, le=4096)] = 96
    """Channels of a point."""
    layers: Annotated[int, Interval(gt=0, le=64)] = 3
    """Layers of attention."""
    guidance_scale: NonNegative = 1.0
    """Guidance scale of the measured clouds."""
    measure_every: Positive = 500
    """Steps between measurements."""
    measured_clouds: Annotated[int, Interval(gt=0, le=500)] = 100
    """Measured clouds, a multiple of 10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % HEAD != 0:
            raise UsageError(f"--width is {self.width}; it must be a multiple of {HEAD}")
        if self.measured_clouds % DIGITS != 0:
            raise UsageError(f"--measured_clouds is {self.measured_clouds}; it must be a multiple of {DIGITS}")
        if self.condition == "none" and self.guidance_scale != 1:
            raise UsageError("--guidance_scale needs conditions: pass --condition label, moments or both")


@dataclass(frozen=True)
class CloudFlags:
    """All flags of the program."""

    clouds: CloudConfig = field(default_factory=CloudConfig)
    run: TrainingConfig = field(
        default_factory=partial(
            TrainingConfig,
            batch_size=64,
            train_num_steps=4000,
            learning_rate=1e-3,
            lr_warmup_steps=100,
            lr_decay="cosine",
            ema_decay=0.995,
            output_dir=Path("runs/point-clouds"),
        )
    )
    program: ProgramConfig = field(default_factory=ProgramConfig)


def train(flags: CloudFlags) -> bool:
    """Train, and return whether the run finished."""
    join(flags)
    set_seed(flags.run.seed)
    clouds = flags.clouds
    digits = Digits(clouds.geometry, clouds.points, clouds.missing_conditions)
    distances = Distances(digits, clouds.measured_clouds, clouds.measure_every, clouds.guidance_scale)
    conditions = {name: digits.kinds[name] for name in CONDITIONS[clouds.condition]}
    flow = RiemannianFlow(
        SetTransformer(digits.geometry, conditions, clouds.width, clouds.layers),
        space=Points(digits.geometry),
        point_coupling=clouds.point_coupling,
        coupling=clouds.coupling,
        condition_dropout=clouds.condition_dropout,
    )
    return Trainer(flow, distances.training, flags.run, callbacks=[distances], flags=recorded(flags)).train()
