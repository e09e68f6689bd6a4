"""Train a flow between sets of points on the sphere: handwritten digits of scikit-learn as clouds.

Previews show generated clouds during training. Needs `pip install -e ".[points]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_point_clouds:train", "train_point_clouds:CloudFlags", __doc__)

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from accelerate.utils import set_seed
from annotated_types import Interval

from digits import Digits
from rectified_flow import Trainer, TrainingConfig
from rectified_flow.cli.build import join
from rectified_flow.cli.config import ProgramConfig
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Probability, recorded
from set_transformer import HEAD, SetTransformer
from sphere import Points, SphereFlow


@dataclass(frozen=True)
class CloudConfig(Flags):
    """The clouds and the network."""

    points: Annotated[int, Interval(gt=0, le=4096)] = 48
    """Number of points of a cloud."""
    condition_dropout: Probability = 0.1
    """Share of clouds that are trained without their digit, for guidance."""
    width: Annotated[int, Interval(gt=0, le=4096)] = 96
    """Channels of a point."""
    layers: Annotated[int, Interval(gt=0, le=64)] = 3
    """Layers of attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % HEAD != 0:
            raise UsageError(f"--width is {self.width}; it must be a multiple of {HEAD}")


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
    digits = Digits(flags.clouds.points)
    network = SetTransformer(digits.conditions, flags.clouds.width, flags.clouds.layers)
    flow = SphereFlow(network, space=Points(), condition_dropout=flags.clouds.condition_dropout)
    return Trainer(flow, digits, flags.run, flags=recorded(flags)).train()
