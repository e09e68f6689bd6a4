"""Do labels of clusters of the pictures improve samples at 128 px, and how far must they be guided?

The clusters are found by k-means in the pictures reduced to 8 x 8, or in the latents of the package's autoencoder,
averaged to 4 x 4. All runs use the settings of `few_pictures`: latents, the package's starter and augmentation, and the
same number of images. Samples get the labels of training pictures, so that each cluster has its share.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from torch import Tensor

from rectified_flow import Small
from rectified_flow.flows.solvers import Guidance
from studies.few_pictures import Setting, files_of, train_on_links
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import load_trained, measure_samples, open_pictures

AT_ONCE = 64
Feature = Callable[[Tensor], Tensor]
FEATURES: Mapping[str, Feature] = {
    "colours": lambda pictures: F.adaptive_avg_pool2d(pictures, 8),
    "latents": lambda pictures: F.adaptive_avg_pool2d(Small().encode(pictures)[0], 4),
}
"""Features of pictures ``[n, 3, h, w]`` in [-1, 1], in which clusters are found."""
PLAIN = Setting("without labels of clusters")
LABELLED = Setting("labels of clusters", {"use_cfg": True})
SCALES = (1.0, 1.5, 2.0)


@torch.no_grad()
def clusters_of(row: Row, count: int, feature: Feature) -> NDArray[np.int64]:
    """Return the number of the cluster of each picture of a row."""
    pictures, features = open_pictures(row.data, row.image_size), []
    for first in range(0, len(pictures), AT_ONCE):
        numbers = range(first, min(len(pictures), first + AT_ONCE))
        values = feature(pictures.read_pictures(numbers).float() / 127.5 - 1)
        features.append(values.flatten(1).double())
    _, labels = kmeans2(torch.cat(features).numpy(), count, minit="++", seed=row.seed)
    return np.asarray(labels, dtype=np.int64)


def train_plain(row: Row) -> None:
    """Train without labels."""
    train_on_links(row, {Path(file.name): file for file in files_of(row)}, PLAIN)


def train_labelled(row: Row, count: int, feature: Feature) -> None:
    """Train with the clusters as classes."""
    labels, files = clusters_of(row, count, feature), files_of(row)
    folders = {Path(f"{label:02}") / file.name: file for label, file in zip(labels, files, strict=True)}
    train_on_links(row, folders, LABELLED)


def measure(row: Row, scales: tuple[float, ...]) -> Figures:
    """Return the figures of samples by scale of the guidance."""
    pictures = open_pictures(str(row.folder / "pictures"), row.image_size)  # with the labels
    ways: dict[str, dict[str, Any]] = {
        f"scale {scale:g}": {"steps": 16, "guidance": Guidance(scale)} for scale in scales
    }
    return measure_samples(row, load_trained(row), ways, pictures)


STUDY = Study(
    __doc__ or "",
    {
        "planned": Case(PLAIN.about, train_plain, partial(measure, scales=(1.0,))),
        **{
            f"{count} clusters of {name}": Case(
                LABELLED.about, partial(train_labelled, count=count, feature=feature), partial(measure, scales=SCALES)
            )
            for (name, feature), count in product(FEATURES.items(), (16, 64))
        },
    },
    Flags(image_size=128, budget=(24_000.0,), num_samples=500, figures=("frechet", "kernel", "copies")),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.clusters"))
