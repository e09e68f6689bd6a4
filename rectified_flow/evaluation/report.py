"""A summary of the training pictures: their number, sizes and faults."""

import numpy as np

from rectified_flow.data.store import ImageDataset
from rectified_flow.system.terminal import size_text

FEW = 10  # number of images below which a class is reported
NAMED = 5  # maximum number of names in a list


def summarize_pictures(dataset: ImageDataset) -> str:
    """Return the number, the sizes and the faults of pictures in one line."""
    info, names, texts = dataset.info, dataset.class_names, [str(len(dataset))]
    if info.framing is not None:
        sizes = [original[1:] for original in dataset.originals]
        (width, height), *others = {*sizes}
        widths, heights = zip(*sizes, strict=True)
        spans = f"{min(widths)} to {max(widths)} px wide, {min(heights)} to {max(heights)} px high"
        texts.append(spans if others else f"all {width}x{height} px")
        if enlarged := sum(info.framing.enlarges(*size) for size in sizes):
            texts.append(f"{enlarged} smaller than {size_text(*info.framing.stored_size)} px, so enlarged and blurred")
    if info.duplicates:
        texts.append(f"{info.duplicates} equal to an earlier picture")
    counts = np.bincount(dataset.labels, minlength=len(names)) if names else np.array([])
    rare = [f"{names[label]} ({counts[label]})" for label in counts.argsort(kind="stable") if counts[label] < FEW]
    if rare:
        texts.append(f"{len(rare)} of {len(names)} classes with fewer than {FEW} pictures: {name_some(rare)}")
    if info.skipped:
        texts.append(f"{len(info.skipped)} left out; the first is {info.skipped[0]}")
    return "; ".join(texts)


def name_some(names: list[str]) -> str:
    """Return the first :data:`NAMED` names, joined by commas."""
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
