"""Which settings give the best samples after minutes of one core, and does that change with the time?

A case changes settings of ``now``, which are those of a short run before this study, or of ``muon``. Samples of eight
midpoint steps (16 network calls) are judged, and samples with autoguidance by the averaged weights at 35% of the run,
of four midpoint steps (16 calls, too, as each step needs both networks).
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
from studies.training import autoguided, load_trained, measure_samples, open_pictures, train_flow

Settings = Mapping[str, Any]
SCALE = 2.0
"""Scale of autoguidance."""
AUTOGUIDED = ("now", "muon")
"""Cases of which samples with autoguidance are judged, too."""
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


def train(row: Row, run: Settings, flow: Settings, network: Settings, space: Settings, clusters: int) -> None:
    """Train with settings that replace those of a short run."""
    size, data = row.image_size, open_pictures(row.data, row.image_size)
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
    train_flow(row, built, items, minutes=row.budget, keeps_guide=True, **run)


def measure(row: Row, clusters: int) -> Figures:
    """Return the figures without and with guidance."""
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


def case(about: str, clusters: int = 0, **settings: Any) -> Case:
    """Return a case; a setting is one of the run unless its name begins with ``flow_``, ``network_`` or ``space_``."""
    groups: dict[str, dict[str, Any]] = {"run": {}, "flow": {}, "network": {}, "space": {}}
    for name, value in settings.items():
        group, _, rest = name.partition("_")
        if group in groups:
            groups[group][rest] = value
        else:
            groups["run"][name] = value
    settings_of = partial(train, clusters=clusters, **groups)  # type: ignore[arg-type]
    return Case(about, settings_of, partial(measure, clusters=clusters))


MUON: Settings = {"optimizer": "muon", "decay": "cosine", "lr_warmup_steps": 20}
NARROW: Settings = {**MUON, "network_dim": 24}

STUDY = Study(
    __doc__ or "",
    {
        "now": case("the reference"),
        "cosine": case("a little nearer than now: gradients are noisy at the end", decay="cosine"),
        "muon": case("much nearer than now", **MUON),
        "muon, no attention": case("more steps, but behind", **MUON, network_attention_sides=()),
        "muon, batch 16": case("nearer than muon at long budgets", **MUON, batch_size=16),
        "muon, dim 16": case("nearer than muon at the shortest", **MUON, network_dim=16),
        "muon, dim 24": case("nearer than muon at the shortest", **NARROW),
        "muon, dim 48": case("nearer than muon at long budgets", **MUON, network_dim=48),
        "narrow, rate 4e-3": case("near narrow, which is muon of dim 24", **NARROW, learning_rate=4e-3),
        "narrow, linear": case("near narrow", **{**NARROW, "decay": "linear"}),
        "narrow, cooldown": case("near narrow, and its length can be changed late", **{**NARROW, "decay": "cooldown"}),
        "narrow, two blocks": case("nearer than narrow at long budgets", **NARROW, network_blocks_per_level=2),
        "narrow, 3 iterations": case("near narrow", **NARROW, optimizer_options=("iterations=3",)),
        "narrow, average 0.99": case("near narrow, as the rate falls", **NARROW, ema_decay=0.99),
        "narrow, flips": case("near narrow", **NARROW, space_horizontal_flip=True),
        "narrow, ot": case("straighter paths: nearer in 16 calls", **NARROW, flow_coupling="ot"),
        "narrow, bf16": case("more steps where the processor has bf16", **NARROW, mixed_precision="bf16"),
        "narrow, 16 clusters": case("nearer than narrow when guided by clusters", clusters=16, **NARROW),
    },
    Flags(data=("synthetic-flowers", "fluent-emoji"), budget=(4.0,), num_samples=512),
)

if __name__ == "__main__":
    sys.exit(run("studies.short_runs"))
