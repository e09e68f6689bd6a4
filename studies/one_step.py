"""How near do samples of one and a few calls come to the data after equal time, by each way to learn a flow map?"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from rectified_flow import DistilledFlow, MeanFlow, Pixels, RectifiedFlow, Unet
from studies.harness import Case, Flags, Row, Study, run
from studies.peer import PEER, PeerMeanFlow, measure_peer, train_peer
from studies.training import load_trained, measure_calls, once, open_pictures, train_flow

RECTIFIED, SHARE = "rectified flow", 0.75
"""The case that the others start from, and its share of their budgets."""
PATHS, PATH_STEPS = 256, 16
AFTER: Mapping[str, Any] = {"learning_rate": 1e-3, "decay": "cosine"}
"""Half the rate of the rectified flow, falling to 0: its rate would spoil the velocity that is already learned."""


class Paths(Dataset[Any]):
    """Data that a teacher generated, uint8 ``[n, 3, h, w]``, and the paths to them, float16 ``[n, steps, 3, h, w]``."""

    def __init__(self, images: Tensor, paths: Tensor, whole: bool) -> None:
        self.images, self.paths, self.whole = images, paths, whole

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        path = {"path": self.paths[index]} if self.whole else {"noise": self.paths[index, 0]}
        return {"images": self.images[index], **path}


def draw_paths(flow: RectifiedFlow, seed: int) -> tuple[Tensor, Tensor]:
    """Return generated images and the points of their paths, the noise first and without the ends."""
    torch.manual_seed(seed)
    images, paths = list[Tensor](), list[Tensor]()
    for _ in range(PATHS // 32):
        points: list[Tensor] = []
        watch = lambda _t, x, points=points: points.append(x.half().cpu())  # noqa: E731
        drawn = flow.sample(32, steps=PATH_STEPS, solver="euler", watch=watch)
        images.append((255 * drawn).round().byte().cpu())
        paths.append(torch.stack(points[:-1], dim=1))
    return torch.cat(images), torch.cat(paths)


def before(row: Row) -> Row:
    """Return the row of the rectified flow from which a row starts."""
    return replace(row, case=RECTIFIED, budget=SHARE * row.budget)


def train_rectified(row: Row) -> None:
    """Train from nothing."""
    size = row.image_size
    network = Unet(24, (1, 2, 3), image_size=size, attention_sides=(size // 4,), blocks_per_level=1, dropout=0)
    flow = RectifiedFlow(network, space=Pixels((3, size, size), horizontal_flip=True))
    train_flow(row, flow, open_pictures(row.data, size), minutes=row.budget)


def train_after(row: Row, build: Callable[..., nn.Module], paths: bool | None = None, **settings: Any) -> None:
    """Train from the weights of the rectified flow, on the pictures or on its paths (``False``: on their two ends)."""
    flow, prepared = load_trained(before(row)), 0.0
    data: Dataset[Any] = open_pictures(row.data, row.image_size)
    if paths is not None:
        (images, points), prepared = once(row, "paths", lambda: draw_paths(flow, row.seed + 1))
        data = Paths(images, points, whole=paths)
    space = Pixels((3, row.image_size, row.image_size), horizontal_flip=paths is None)
    train_flow(
        row, build(flow.network, space=space, **settings), data, minutes=row.own_budget, prepared=prepared, **AFTER
    )


def start_after(about: str, build: Callable[..., nn.Module], **settings: Any) -> Case:
    """Return a case that starts from the rectified flow."""
    return Case(about, partial(train_after, build=build, **settings), measure_calls, before, SHARE)


STUDY = Study(
    __doc__ or "",
    {
        RECTIFIED: Case("the reference: best in 16 calls, far behind in one", train_rectified, measure_calls),
        "mean flow": start_after("better in one call, alike in 16", MeanFlow),
        "mean flow, a quarter of the rows": start_after("better in 16 calls", MeanFlow, mean_fraction=0.25),
        "from a teacher": start_after("the best in one call", DistilledFlow, paths=True),
        "reflow": start_after("near the teacher's in one call, behind in 16", RectifiedFlow, paths=False),
        f"{PEER}, mean flow": Case(
            "behind: its defaults are for long runs",
            partial(train_peer, kind=PeerMeanFlow, dim=12),
            partial(measure_peer, kind=PeerMeanFlow, dim=12, steps=(1, 2, 4, 16)),
        ),
    },
    Flags(budget=(4, 12, 60, 240)),
)

if __name__ == "__main__":
    sys.exit(run("studies.one_step"))
