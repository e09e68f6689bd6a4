"""The cost of optimal transport between clouds of points: many pairs in one call, beside POT with one pair a call.

Both stop at the same error of the weights. The second table compares a training step of a flow between clouds with its
share of transport. Needs `pip install -e ".[dev]"`.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import ot
import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples/clouds"))

from geometry import Euclidean
from point_clouds import Points
from riemannian import PointCoupling, RiemannianFlow, equal_shares
from set_transformer import SetTransformer
from transport import sinkhorn

TOLERANCE = 1e-2


@dataclass(frozen=True)
class Flags:
    pairs: int = 64
    """Pairs of clouds in a call."""
    points: int = 256
    """Points of a cloud."""
    rounds: int = 3
    """Rounds of all contenders, in turns."""
    regularisations: tuple[float, ...] = (0.1, 0.02, 0.01)
    """As multiples of the mean cost."""


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def one_by_one(cost: Tensor, regularisation: float) -> None:
    """POT's, which stops by the root of the sum of squares: the same, where the errors are alike."""
    for each in cost:
        c = each.double().numpy()
        w = np.full(len(c), 1 / len(c))
        reg = regularisation * c.mean()
        ot.sinkhorn(
            w, w, c, reg, method="sinkhorn_log", stopThr=TOLERANCE / len(c) ** 0.5, numItermax=10_000, warn=False
        )


def main(flags: Flags) -> None:
    torch.manual_seed(0)
    plane = Euclidean(2)
    x, y = torch.randn(2, flags.pairs, flags.points, 2)
    cost, w = plane.squared_distance(x[:, :, None], y[:, None]), equal_shares(x)
    print(f"{flags.pairs} pairs of {flags.points} points, {torch.get_num_threads()} threads\n")
    print("| regularisation | seconds, one call | seconds, POT | ratio | error of the weights |")
    print("|---|---|---|---|---|")
    for regularisation in flags.regularisations:
        ours, theirs = [], []
        for _ in range(flags.rounds):
            ours.append(seconds(partial(sinkhorn, cost, w, w, regularisation=regularisation, tolerance=TOLERANCE)))
            theirs.append(seconds(partial(one_by_one, cost, regularisation)))
        plan = sinkhorn(cost, w, w, regularisation=regularisation, tolerance=TOLERANCE)
        error = (plan.sum(dim=2) - w).abs().sum(dim=1).max().item()
        one, other = np.median(ours), np.median(theirs)
        print(f"| {regularisation} | {one:.2f} | {other:.2f} | {other / one:.1f} | {error:.1e} |")
    print("\n| coupling of points | seconds of a step | share of transport |\n|---|---|---|")
    couplings: tuple[PointCoupling, ...] = ("independent", "drawn", "barycentric")
    steps = {each: step_of(each) for each in couplings}
    times: dict[str, list[float]] = {each: [] for each in couplings}
    for _ in range(flags.rounds):
        for each, step in steps.items():
            times[each].append(seconds(partial(step, x)))
    least = float(np.median(times["independent"]))
    for name, values in times.items():
        middle = float(np.median(values))
        print(f"| {name} | {middle:.2f} | {1 - least / middle:.0%} |")


def step_of(coupling: PointCoupling) -> Callable[[Tensor], None]:
    """Forward and backward pass of the example's flow."""
    network = SetTransformer(Euclidean(2), {}, 96, 3)
    flow = RiemannianFlow(network, space=Points(Euclidean(2)), point_coupling=coupling)
    return lambda x: flow(clouds=x).backward()


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
