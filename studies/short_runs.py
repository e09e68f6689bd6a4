"""Which settings give the best samples after a few minutes of training on one CPU core?

A case changes settings of ``now``, the settings of short runs before this study, of ``muon``, of ``narrow`` (which is
``muon, dim 24``), or of ``chosen``, which trains ``narrow`` in bf16 with a shorter average. Samples take eight midpoint
steps (16 network calls). Samples with autoguidance take four steps, which are 16 calls, too, since each step evaluates
two networks; the guide has the averaged weights at 35% of the run.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow import ImageDataset, Labels, Pixels, RectifiedFlow, Unet
from rectified_flow.evaluation.features import average_colours
from rectified_flow.flows.solvers import Guidance
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import SHORT_RUN, autoguided, grouped, load_trained, measure_samples, open_pictures, train_flow

Settings = Mapping[str, Any]
SCALE = 2.0
"""Scale of autoguidance."""
AUTOGUIDED = ("now", "muon")
"""Cases of which samples with autoguidance are judged, too."""
BATCH_SIZE = SHORT_RUN["batch_size"]
STEPS_PER_MINUTE = 300
"""Steps of ``chosen`` in a minute, by which the length of its average is set."""
AVERAGED = 0.08
"""Length of the average of ``chosen``, as a share of the steps."""
CLUSTER_SCALE = 1.5
"""Scale of the guidance by clusters."""


class Clustered(Dataset[Any]):
    """Pictures with the number of their cluster as their label: k-means of their colours on a grid of 8 x 8."""

    def __init__(self, pictures: ImageDataset, clusters: int, seed: int) -> None:
        self.pictures = pictures
        images = pictures.read_pictures(range(len(pictures)))
        features = average_colours().of(images).numpy()
        _, labels = kmeans2(features, clusters, minit="++", seed=seed)
        self.labels = torch.from_numpy(labels).long()

    def __len__(self) -> int:
        return len(self.pictures)

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return images and labels."""
        return {"images": self.pictures.read_batch(indices)["images"], "labels": self.labels[list(indices)]}


def train(
    row: Row, run: Settings, flow: Settings, network: Settings, space: Settings, clusters: int, counts_images: bool
) -> None:
    """Train with settings that replace those of a short run; the budget is in minutes, or else in images."""
    size, data = row.image_size, open_pictures(row.data, row.image_size)
    budget = {"images": int(row.budget)} if counts_images else {"minutes": row.budget}
    if run.get("ema_decay", 0) is None:
        steps = row.budget / BATCH_SIZE if counts_images else row.budget * STEPS_PER_MINUTE
        run = {**run, "ema_decay": 1 - 1 / (AVERAGED * steps)}
    items: Dataset[Any] = Clustered(data, clusters, row.seed) if clusters else data
    unet = Unet(
        **{
            "dim": 32,
            "dim_mults": (1, 2, 3) if size <= 32 else (1, 1, 2, 3),
            "image_size": size,
            "attention_sides": (8,),
            "blocks_per_level": 1,
            "dropout": 0.0,
            "conditions": {"labels": Labels(clusters)} if clusters else {},
            **network,
        }
    )
    dropout = 0.1 if clusters else 0.0
    built = RectifiedFlow(unet, space=Pixels((3, size, size), **space), condition_dropout=dropout, **flow)
    train_flow(row, built, items, keeps_guide=row.case in AUTOGUIDED, **budget, **run)


def measure(row: Row, clusters: int) -> Figures:
    """Measure samples without guidance and with it."""
    labels = {}
    if clusters:
        drawn = Clustered(open_pictures(row.data, row.image_size), clusters, row.seed).labels
        labels = {"conditions": {"labels": drawn[torch.randperm(len(drawn))[: row.num_samples]]}}
    plain: dict[str, dict[str, Any]] = {"16 calls": {"steps": 8, **labels}}
    if clusters:
        plain["by clusters"] = {"steps": 4, "guidance": Guidance(CLUSTER_SCALE), **labels}
    figures = measure_samples(row, load_trained(row), plain)
    if row.case in AUTOGUIDED:
        figures = {**figures, **measure_samples(row, autoguided(row, SCALE), {"autoguided": {"steps": 4, **labels}})}
    return figures


def case(about: str, clusters: int = 0, counts_images: bool = False, **settings: Any) -> Case:
    """Return a case of settings, see :func:`studies.training.grouped`."""
    train_case = partial(train, clusters=clusters, counts_images=counts_images, **grouped(settings))  # type: ignore[arg-type]
    return Case(about, train_case, partial(measure, clusters=clusters))


MUON: Settings = {"optimizer": ("muon",), "decay": "cosine", "lr_warmup_steps": 20}
NARROW: Settings = {**MUON, "network_dim": 24}
CHOSEN: Settings = {**NARROW, "mixed_precision": "bf16", "ema_decay": None}

STUDY = Study(
    __doc__ or "",
    {
        "now": case("the reference"),
        "cosine": case("a slightly lower distance than now, as gradients are noisy at the end", decay="cosine"),
        "muon": case("a much lower distance than now", **MUON),
        "muon, no attention": case("more steps, but a higher distance", **MUON, network_attention_sides=()),
        "muon, batch 16": case("a lower distance than muon at long budgets", **MUON, batch_size=16),
        "muon, dim 16": case("a lower distance than muon at short budgets", **MUON, network_dim=16),
        "muon, dim 24": case("a lower distance than muon at short budgets", **NARROW),
        "muon, dim 48": case("a lower distance than muon at long budgets", **MUON, network_dim=48),
        "narrow, average 0.99": case("like narrow, as the rate falls", **NARROW, ema_decay=0.99),
        "narrow, bf16": case("more steps where the processor has bf16", **NARROW, mixed_precision="bf16"),
        "chosen": case("the best of the above together", **CHOSEN),
        "chosen, dim 16": case("a lower distance than chosen at short budgets", **{**CHOSEN, "network_dim": 16}),
        "chosen, dim 32": case("a lower distance than chosen at long budgets", **{**CHOSEN, "network_dim": 32}),
        "chosen, dim 48": case("a lower distance than chosen at long budgets", **{**CHOSEN, "network_dim": 48}),
        "chosen, dim 64": case("a lower distance than chosen at long budgets", **{**CHOSEN, "network_dim": 64}),
        "chosen, two blocks": case("a lower distance at long budgets", **CHOSEN, network_blocks_per_level=2),
    },
    Flags(data=("synthetic-flowers", "fluent-emoji"), budget=(4.0,), num_samples=512),
)

if __name__ == "__main__":
    sys.exit(run("studies.short_runs"))
