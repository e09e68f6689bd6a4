"""Properties of images that a user needs to know before a network learns them."""

from collections.abc import Sequence

import numpy as np

from rectified_flow.data.store import ImageDataset, OriginalInfo
from rectified_flow.system.terminal import size_text

FEW = 10
"""Number of images below which a class is named."""
NAMED = 5
"""Largest number of names in a list."""


def describe_pictures(dataset: ImageDataset, near_duplicates: int | None = None) -> dict[str, str]:
    """Describe number, sizes, enlarged and equal images, rare classes and broken files, a text by label.

    Args:
        dataset: images of a store.
        near_duplicates: number of images that nearly equal another one, if they were counted.
    """
    info, texts = dataset.info, {"pictures": dataset.description}
    if info.originals is not None and info.framing is not None:
        size, originals = size_text(*info.framing.stored_size), info.originals
        texts["sizes"] = _range(originals)
        texts["enlarged"] = f"{originals.enlarged} smaller than {size} px" + _blurred(originals)
        texts["duplicates"] = f"{originals.duplicates} equal to an earlier picture"
    if near_duplicates is not None:
        texts["alike"] = f"{near_duplicates} nearly equal to an earlier picture, or its mirror image"
    if dataset.class_names:
        rare = _rare_classes(dataset)
        texts["classes"] = f"{len(dataset.class_names)}, {len(rare)} with fewer than {FEW} pictures{_listed(rare)}"
    if info.skipped:
        texts["broken"] = f"{len(info.skipped)} left out; the first is {info.skipped[0]}"
    return texts


def summarize_pictures(dataset: ImageDataset) -> str:
    """Describe the sizes and the possible faults of the images in a line."""
    originals, rare, parts = dataset.info.originals, _rare_classes(dataset), [f"{len(dataset)}"]
    if originals is not None:
        parts[0] += f", {_range(originals)}"
        if originals.enlarged:
            parts.append(f"{originals.enlarged} smaller than needed{_blurred(originals)}")
        if originals.duplicates:
            parts.append(f"{originals.duplicates} equal to an earlier one")
    if rare:
        parts.append(f"{len(rare)} class{'es' * (len(rare) > 1)} with fewer than {FEW}{_listed(rare)}")
    return "; ".join(parts)


def _range(originals: OriginalInfo) -> str:
    widths, heights = originals.width, originals.height
    if len({*widths}) == len({*heights}) == 1:
        return f"all {widths[0]}x{heights[0]} px"
    return f"{widths[0]} to {widths[1]} px wide, {heights[0]} to {heights[1]} px high"


def _blurred(originals: OriginalInfo) -> str:
    return ", so enlarged and blurred" * (originals.enlarged > 0)


def _rare_classes(dataset: ImageDataset) -> list[str]:
    """Return the names and sizes of rare classes, the rarest first."""
    names = dataset.class_names
    if not names:
        return []
    counts = np.bincount(dataset.labels, minlength=len(names))
    return [f"{names[label]} ({counts[label]})" for label in np.argsort(counts, kind="stable") if counts[label] < FEW]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
    return f": {shown}" if names else ""
