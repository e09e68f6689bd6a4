"""Measure clouds by the number of steps of sampling, with and without transport between points.

A run of `train_point_clouds.py` is trained for each geometry, coupling of points and seed, or resumed. Each measurement
is a line of `steps.jsonl`, and is not repeated if the program starts again. The table has means over seeds of the
Wasserstein distance, the Chamfer distance and the share of recognised digits. The processor time of training is
recorded, too. Needs `pip install -e ".[points]"`.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

import set_transformer  # noqa: F401  registers the network
from cloud_distances import KINDS, Distances, draw_clouds, matched
from digits import Digits
from rectified_flow import load_flow
from rectified_flow.flows.solvers import Guidance
from riemannian import RiemannianFlow

WAYS = ((1, 1.0), (4, 1.0), (16, 1.0), (16, 2.0))
"""Euler steps and guidance scales."""
PROGRAM = Path(__file__).with_name("train_point_clouds.py")
CELL = (*KINDS, "as_asked")


@dataclass(frozen=True)
class Flags:
    """Flags of the program."""

    geometries: tuple[str, ...] = ("plane", "sphere", "torus")
    """Values of --geometry."""
    couplings: tuple[str, ...] = ("drawn", "independent")
    """Values of --point_coupling."""
    seeds: tuple[int, ...] = (0, 1)
    """Training seeds."""
    train_num_steps: int = 2000
    """Steps of each run."""
    points: int = 40
    """Largest number of points of a cloud."""
    width: int = 64
    """Channels of a point."""
    measured_clouds: int = 100
    """Number of held-out clouds."""
    output_dir: Path = Path("runs/cloud-steps")
    """Folder for the runs and the measurements."""


def main(flags: Flags) -> None:
    """Make all measurements that are missing, and print the table."""
    for seed in flags.seeds:
        for geometry in flags.geometries:
            for coupling in flags.couplings:
                measure(flags, {"geometry": geometry, "point_coupling": coupling, "seed": seed})
    print(table(read_rows(flags.output_dir)))


def measure(flags: Flags, run: dict[str, Any]) -> None:
    """Train a run and measure it, unless all of its lines are there."""
    known = [(row["steps"], row["guidance"]) for row in read_rows(flags.output_dir) if run.items() <= row.items()]
    missing = [way for way in WAYS if way not in known]
    if not missing:
        return
    folder = flags.output_dir / "-".join(map(str, run.values()))
    seconds = train(flags, run, folder)
    distances = Distances(Digits(run["geometry"], flags.points), flags.measured_clouds, every=1)
    others = distances.others
    costs = distances.costs(others["clouds"], others["weights"])
    of_others = dict(zip(CELL, [*map(matched, costs), distances.share_as_asked(others["clouds"], others)], strict=True))
    flow = load_flow(folder)
    assert isinstance(flow, RiemannianFlow)
    for steps, guidance in missing:
        how: dict[str, Any] = {"steps": steps, "solver": "euler", "guidance": Guidance(guidance)}
        clouds = distances.sample(flow, 0, range(distances.total), **how)
        measured = distances.numbers(clouds, distances.costs(clouds, distances.held_out["weights"]))
        of_real = {f"{name}_of_others": value for name, value in of_others.items()}
        row = run | {"steps": steps, "guidance": guidance} | measured | of_real | {"training_seconds": seconds}
        with (flags.output_dir / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    draw_clouds(folder / "clouds.png", distances.digits, distances.held_out, clouds)


def train(flags: Flags, run: dict[str, Any], folder: Path) -> float:
    """Train a run to its end, and return its processor time in seconds, of the part that this call trained."""
    given = run | {
        "points": flags.points,
        "width": flags.width,
        "train_num_steps": flags.train_num_steps,
        "measure_every": flags.train_num_steps,
        "measured_clouds": flags.measured_clouds,
        "num_samples": 0,
        "output_dir": folder,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, str(PROGRAM), *words], stdout=sys.stderr, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the measurements in a folder."""
    file = folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the measurements as a table in Markdown, as means over seeds."""
    heads = [
        f"{steps} Euler step" + "s" * (steps > 1) + f", guidance {scale:g}" * (scale != 1) for steps, scale in WAYS
    ]
    lines = [" | ".join(["| geometry, coupling of points", *heads, "other real clouds |"])]
    lines.append("|" + "---|" * (len(WAYS) + 2))
    for geometry, coupling in dict.fromkeys((row["geometry"], row["point_coupling"]) for row in rows):
        mine = [row for row in rows if (row["geometry"], row["point_coupling"]) == (geometry, coupling)]
        cells = [cell([row for row in mine if (row["steps"], row["guidance"]) == way]) for way in WAYS]
        seeds = len({row["seed"] for row in mine})
        name = f"{geometry}, {coupling} ({seeds} seed{'s' * (seeds > 1)})"
        lines.append(" | ".join([f"| {name}", *cells, f"{cell(mine, '_of_others')} |"]))
    return "\n".join(lines)


def cell(rows: Sequence[dict[str, Any]], suffix: str = "") -> str:
    """Return the means of the three numbers of a cell."""
    if not rows:
        return ""
    first, second, share = (fmean(row[name + suffix] for row in rows) for name in CELL)
    return f"{first:.4f} / {second:.4f} / {share:.0%}"


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
