"""Draw sample grids of several runs side by side, from the same noise, to compare one step with several.

A column is STEPS:RUN, where RUN is a checkpoint or a run folder. A rectified flow uses the Euler solver, which has one
network call per step, as in mean flow: `python benchmarks/one_step.py --columns 1:runs/mean 16:runs/rectified`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor
from torchvision.utils import make_grid, save_image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow


@dataclass(frozen=True)
class Flags:
    columns: tuple[str, ...]
    """STEPS:RUN of each grid, from left to right."""
    output: Path = Path("one-step.png")
    """Image file to write."""
    num_samples: int = 36
    """Images per grid."""
    seed: int = 0
    """Seed of the noise."""


def draw(column: str, flags: Flags) -> Tensor:
    """The grid ``[3, h, w]`` of one column."""
    steps, run = column.split(":", 1)
    flow = load_flow(run)
    how = {"solver": "euler"} if isinstance(flow, RectifiedFlow) else {}
    images = flow.sample(
        flags.num_samples, steps=int(steps), generator=torch.Generator().manual_seed(flags.seed), **how
    )
    return make_grid(images, nrow=round(flags.num_samples**0.5), padding=2, pad_value=1)


def main(flags: Flags) -> None:
    grids = [draw(column, flags) for column in flags.columns]
    gap = torch.ones(3, grids[0].shape[1], 12)
    save_image(torch.cat([part for grid in grids for part in (grid, gap)][:-1], dim=2), flags.output)
    print(flags.output)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
