"""Measure the share of a training step that its couplings take, in processor time.

Steps with and without couplings take turns, so that a change of the machine's speed reaches all of them. The table has
medians. Needs `pip install -e ".[points]"`.
"""

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import tyro
from torch import Tensor

from digits import DIGITS, Digits
from point_clouds import Points
from rectified_flow.randomness import BatchRows, deterministic
from riemannian import RiemannianFlow
from set_transformer import SetTransformer

COUPLINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "points, `barycentric`": {"point_coupling": "barycentric"},
    "points, `drawn`": {"point_coupling": "drawn"},
    "whole clouds, `--coupling ot`": {"coupling": "ot"},
}


@dataclass(frozen=True)
class Flags:
    """Flags of the program."""

    geometries: tuple[str, ...] = ("plane", "sphere", "torus")
    """Values of --geometry."""
    points: int = 40
    """Largest number of points of a cloud."""
    width: int = 64
    """Channels of a point."""
    layers: int = 3
    """Layers of attention."""
    batch_size: int = 64
    """Clouds of a step."""
    rounds: int = 20
    """Steps of each kind."""


def main(flags: Flags) -> None:
    """Print the table."""
    print(f"{torch.get_num_threads()} threads, batch {flags.batch_size}, up to {flags.points} points\n")
    print("| geometry, coupling | processor time of a step [ms] | share of the coupling |\n|---|---|---|")
    for geometry in flags.geometries:
        digits = Digits(geometry, flags.points)
        clouds = digits.split(DIGITS)[0]
        order = torch.randperm(len(clouds), generator=torch.Generator().manual_seed(0))
        batch = clouds.read_batch(order[: flags.batch_size].tolist())
        flows = {name: build(digits, flags, settings) for name, settings in COUPLINGS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in flows}
        for number in range(flags.rounds + 1):
            for name, flow in flows.items():
                taken = step(flow, batch, number)
                seconds[name] += [taken] * (number > 0)  # the first round warms up
        plain = median(seconds["none"])
        for name, values in seconds.items():
            print(
                f"| {geometry}, {name} | {1000 * median(values):.0f} | {1 - plain / median(values):.0%} |", flush=True
            )


def build(digits: Digits, flags: Flags, settings: dict[str, Any]) -> RiemannianFlow:
    """Return a flow of the example."""
    network = SetTransformer(digits.geometry, {"labels": digits.kinds["labels"]}, flags.width, flags.layers)
    return RiemannianFlow(network, space=Points(digits.geometry), **settings)


def step(flow: RiemannianFlow, batch: dict[str, Tensor], number: int) -> float:
    """Return the processor time of a forward and a backward pass [s]."""
    began = time.process_time()
    with deterministic(BatchRows(0, number, len(batch["clouds"]), slice(None))):
        flow(**batch).backward()
    return time.process_time() - began


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
