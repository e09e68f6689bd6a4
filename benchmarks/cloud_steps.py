"""Clouds by number of steps, with and without transport between points.

Runs of the example are trained, or go on where they were stopped. Each cell has the Wasserstein and the Chamfer
distance to held-out clouds and the share of digits as asked, as means over seeds. The clouds with guidance are drawn
beside each run. Needs `pip install -e ".[points]"`.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples/clouds"))

import train_point_clouds
from cloud_distances import Distances, draw_clouds, matched
from digits import Digits
from rectified_flow import randomness
from rectified_flow.flows.solvers import Guidance
from rectified_flow.load import load_flow
from riemannian import RiemannianFlow

WAYS = ((1, 1.0), (4, 1.0), (16, 1.0), (16, 2.0))
"""Euler steps, and guidance."""


@dataclass(frozen=True)
class Flags:
    geometries: tuple[str, ...] = ("plane", "sphere", "torus")
    """Values of --geometry."""
    couplings: tuple[str, ...] = ("independent", "drawn")
    """Values of --point_coupling."""
    seeds: tuple[int, ...] = (0, 1)
    """Training seeds."""
    train_num_steps: int = 2000
    """Steps of each run."""
    points: int = 40
    """Points of a cloud, at most."""
    width: int = 64
    """Channels of a point."""
    output_dir: Path = Path("runs/cloud-steps")
    """Folder for runs."""


def main(flags: Flags) -> None:
    print(
        "| geometry, coupling of points | " + " | ".join(f"{steps} steps, guidance {g:g}" for steps, g in WAYS) + " |"
    )
    print("|---|" + "---|" * len(WAYS))
    for geometry in flags.geometries:
        for coupling in flags.couplings:
            rows = [measure(train(flags, geometry, coupling, seed), geometry, flags) for seed in flags.seeds]
            cells = [f"{w:.3f} / {c:.3f} / {share:.0%}" for w, c, share in np.mean(rows, axis=0)]
            print(f"| {geometry}, {coupling} | " + " | ".join(cells) + " |", flush=True)


def train(flags: Flags, geometry: str, coupling: str, seed: int) -> Path:
    """Train one run, unless it is finished; returns its folder."""
    folder = flags.output_dir / f"{geometry}-{coupling}-{seed}"
    given = {
        "geometry": geometry,
        "point_coupling": coupling,
        "seed": seed,
        "points": flags.points,
        "width": flags.width,
        "train_num_steps": flags.train_num_steps,
        "measure_every": flags.train_num_steps,
        "output_dir": folder,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(train_point_clouds.__file__), *words], stdout=sys.stderr, check=True)
    return folder


def measure(folder: Path, geometry: str, flags: Flags) -> list[tuple[float, float, float]]:
    """Wasserstein and Chamfer distance and the share as asked, for each way to draw."""
    digits = Digits(geometry, flags.points)
    distances = Distances(digits, 100, 500)
    flow, real = load_flow(folder, RiemannianFlow), distances.held_out
    rows = []
    for steps, guidance in WAYS:
        with randomness.deterministic(randomness.Samples(0, range(distances.total))), torch.no_grad():
            clouds = flow.sample(
                weights=real["weights"],
                labels=real["labels"],
                steps=steps,
                solver="euler",
                guidance=Guidance(guidance),
            )
        wasserstein, chamfer = (matched(costs) for costs in distances.costs(clouds, real["weights"]))
        rows.append((wasserstein, chamfer, distances.share_as_asked(clouds)))
    draw_clouds(folder / "clouds.png", digits, real, clouds)
    return rows


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
