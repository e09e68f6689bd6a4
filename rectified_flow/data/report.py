"""Reports on the training pictures: their number, their sizes and faults that impair training."""

import numpy as np

from rectified_flow.data.store import ImageDataset, OriginalInfo
from rectified_flow.system.terminal import size_text

FEW = 10
"""Number of images below which a class is reported."""
NAMED = 5
"""Maximum number of names in a list."""


def describe_pictures(dataset: ImageDataset, near_duplicates: int) -> dict[str, str]:
    """Return a description of the pictures: their number, sizes and faults as texts by label.

    Args:
        dataset: images of a store.
        near_duplicates: number of images that are nearly equal to an earlier one.
    """
    texts = {"pictures": dataset.description}
    if dataset.info.originals is not None:
        texts["sizes"] = _range(dataset.info.originals)
    texts |= {label: f"{count} {fault}" for label, (count, fault) in _find_faults(dataset).items()}
    return texts | {"alike": f"{near_duplicates} nearly equal to an earlier picture, or its mirror image"}


def summarize_pictures(dataset: ImageDataset) -> str:
    """Return a summary of the pictures in one line: their number, sizes and faults."""
    originals = dataset.info.originals
    parts = [f"{len(dataset)}" if originals is None else f"{len(dataset)}, {_range(originals)}"]
    parts += [f"{count} {fault}" for count, fault in _find_faults(dataset).values() if count]
    return "; ".join(parts)


def name_some(names: list[str]) -> str:
    """Return the first :data:`NAMED` names, joined by commas."""
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)


def _range(originals: OriginalInfo) -> str:
    (least_width, width), (least_height, height) = originals.width, originals.height
    if (least_width, least_height) == (width, height):
        return f"all {width}x{height} px"
    return f"{least_width} to {width} px wide, {least_height} to {height} px high"


def _find_faults(dataset: ImageDataset) -> dict[str, tuple[int, str]]:
    """Return the number of pictures or classes with each fault, and a description of the fault, by label."""
    info, names = dataset.info, dataset.class_names
    faults = dict[str, tuple[int, str]]()
    if info.originals is not None and info.framing is not None:
        blurred = ", so enlarged and blurred" * (info.originals.enlarged > 0)
        size = size_text(*info.framing.stored_size)
        faults["enlarged"] = info.originals.enlarged, f"smaller than {size} px{blurred}"
        faults["duplicates"] = info.originals.duplicates, "equal to an earlier picture"
    if names:
        counts = np.bincount(dataset.labels, minlength=len(names))
        rarest_first = np.argsort(counts, kind="stable")
        rare = [f"{names[label]} ({counts[label]})" for label in rarest_first if counts[label] < FEW]
        listed = f": {name_some(rare)}" * bool(rare)
        faults["classes"] = len(rare), f"of {len(names)} classes with fewer than {FEW} pictures{listed}"
    if info.skipped:
        faults["broken"] = len(info.skipped), f"left out; the first is {info.skipped[0]}"
    return faults
