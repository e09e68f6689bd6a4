"""Words about the pictures of a run, for the terminal and for the sheet of its data: one sentence a fact.

The notes of the pictures (:attr:`rectified_flow.data.store.ImageDataset.notes`) have a sentence on each kind of files
that their source left out, and on each fault that was found while they were decoded. This module adds the facts that
depend on the run.
"""

from collections.abc import Collection, Iterator

import numpy as np

from rectified_flow.data.metadata import condition_name
from rectified_flow.data.store import ImageDataset
from rectified_flow.system.terminal import size_text

LISTED, NAMED = 12, 5
"""Largest number of classes that are all listed, and of those that are named if there are more."""
FEW = 10
"""Number of pictures below which a class is rare."""


def sentences(
    pictures: ImageDataset, used: Collection[str] = (), *, mirrored: bool = False, augment: float = 0.0
) -> list[str]:
    """Return the facts about the pictures of a run, one sentence each.

    Args:
        pictures: the pictures, or a dataset around them with their attributes.
        used: names of the conditions that the network takes.
        mirrored: whether training mirrors half of the pictures.
        augment: probability of each change of the augmentation.
    """
    changed = f", and other changes are made, each with probability {augment:g}" if augment else ""
    return [
        *_sizes(pictures),
        *_classes(pictures, is_used="labels" in used),
        *pictures.notes,
        *_sources(pictures),
        *_columns(pictures, used),
        ("half of the pictures are mirrored" if mirrored else "no picture is mirrored") + changed,
    ]


def _sizes(pictures: ImageDataset) -> Iterator[str]:
    """Yield the number of pictures, their sizes, and how many are enlarged."""
    framing, count = pictures.info.framing, f"{len(pictures):,} pictures of {pictures.info.source}"
    if framing is None:
        yield count
        return
    originals = pictures.originals
    widths, heights = ([original[side] for original in originals] for side in (1, 2))
    spans = f"{min(widths)} to {max(widths)} px wide and {min(heights)} to {max(heights)} px high"
    is_one = len({original[1:] for original in originals}) == 1
    yield f"{count}, all {widths[0]}x{heights[0]} px" if is_one else f"{count}, {spans}"
    if enlarged := [original for original in originals if framing.enlarges(original.width, original.height)]:
        size = size_text(*framing.stored_size)
        blurred = " and blurred" * (framing.resize != "nearest")
        yield f"{len(enlarged):,} smaller than {size} px, so enlarged{blurred}, such as {enlarged[0].name}"


def _classes(pictures: ImageDataset, *, is_used: bool) -> Iterator[str]:
    """Yield the number of pictures of each class, of the rarest if there are many classes, and whether they count."""
    names = pictures.class_names
    if not names:
        return
    counts = np.bincount(pictures.labels, minlength=len(names))
    rarest = counts.argsort(kind="stable")
    if len(names) <= LISTED:
        listed = ", ".join(f"{name} ({count:,})" for name, count in zip(names, counts, strict=True))
        yield f"{len(names)} {'class' if len(names) == 1 else 'classes'}: {listed}"
    else:
        some = ", ".join(f"{names[label]} ({counts[label]:,})" for label in rarest[-1 : -NAMED - 1 : -1])
        yield f"{len(names)} classes of {counts.min():,} to {counts.max():,} pictures: {some}, ..."
    if rare := [f"{names[label]} ({counts[label]})" for label in rarest if counts[label] < FEW]:
        shown = ", ".join(rare[:NAMED]) + ", ..." * (len(rare) > NAMED)
        yield f"{len(rare)} of {len(names)} classes with fewer than {FEW} pictures: {shown}"
    if not is_used:
        yield "the network does not get the classes"


def _sources(pictures: ImageDataset) -> Iterator[str]:
    """Yield where the sources of a translation are, and the notes on them."""
    if isinstance(pictures.source, ImageDataset):
        how = "paired at random" if pictures.is_unpaired else "paired by name"
        yield f"sources: {len(pictures.source):,} pictures of {pictures.source.info.source}, {how}"
        yield from (f"sources: {note}" for note in pictures.source.notes)


def _columns(pictures: ImageDataset, used: Collection[str]) -> Iterator[str]:
    """Yield which columns of the table beside the pictures the network gets, and which it does not get."""
    own = [f"{name} ({column.kind.column_type})" for name, column in pictures.columns.items() if name in used]
    if own:
        yield f"columns that the network gets: {', '.join(own)}"
    if others := [name for name in pictures.table if condition_name(name) not in used]:
        yield f"columns that the network does not get: {', '.join(others)}"
