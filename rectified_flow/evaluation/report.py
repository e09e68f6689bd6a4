"""A report on the training pictures: their number, sizes and faults, and a sheet of some of them."""

from pathlib import Path

import numpy as np
from accelerate import PartialState
from tqdm.auto import tqdm

from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import on_main
from rectified_flow.evaluation.distances import count_near_duplicates
from rectified_flow.evaluation.features import average_colours, reference_features
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import prepare_folder
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.system.terminal import line, lines, size_text

SHEET_FILE, SHOWN = "look.png", 64  # file of the sheet, and the largest number of pictures on it
FEW = 10  # number of images below which a class is reported
NAMED = 5  # maximum number of names in a list


def look(output_dir: Path, pictures: ImageDataset, space: Space) -> None:
    """Print the report of ``pictures``, and write a sheet of some as training augments them. Collective.

    Raises:
        UsageError: if ``output_dir`` cannot be written.
        RunError: if the disk is full.
    """
    state = PartialState()
    colours = reference_features(pictures, average_colours())

    def report() -> None:
        alike = f"{count_near_duplicates(colours)} nearly equal to an earlier picture, or its mirror image"
        tqdm.write(lines({"pictures": pictures.description, **describe_pictures(pictures), "alike": alike}))
        shown = sorted(np.random.default_rng(0).permutation(len(pictures))[:SHOWN].tolist())
        with deterministic(Samples(0, shown)):
            data, _ = space.augment(pictures.read_batch(shown)["images"])
        sheet = to_grid(space.render(space.decode(space.encode(data))), legend=space.legend)
        path = write_picture(prepare_folder("output_dir", output_dir) / SHEET_FILE, sheet)
        tqdm.write(line("sheet", f"{path}: {len(shown)} pictures as they are trained on"))

    on_main(state, report)


def describe_pictures(dataset: ImageDataset) -> dict[str, str]:
    """Return the sizes and the faults of pictures as texts by label; a fault that no picture has is left out."""
    info, names, texts = dataset.info, dataset.class_names, dict[str, str]()
    if info.framing is not None:
        sizes = [original[1:] for original in dataset.originals]
        (width, height), *others = {*sizes}
        widths, heights = zip(*sizes, strict=True)
        spans = f"{min(widths)} to {max(widths)} px wide, {min(heights)} to {max(heights)} px high"
        texts["sizes"] = spans if others else f"all {width}x{height} px"
        if enlarged := sum(info.framing.enlarges(*size) for size in sizes):
            size = size_text(*info.framing.stored_size)
            texts["enlarged"] = f"{enlarged} smaller than {size} px, so enlarged and blurred"
    if info.duplicates:
        texts["duplicates"] = f"{info.duplicates} equal to an earlier picture"
    if names:
        counts = np.bincount(dataset.labels, minlength=len(names))
        rarest_first = np.argsort(counts, kind="stable")
        rare = [f"{names[label]} ({counts[label]})" for label in rarest_first if counts[label] < FEW]
        if rare:
            found = f"{len(rare)} of {len(names)} classes with fewer than {FEW} pictures"
            texts["classes"] = f"{found}: {name_some(rare)}"
    if info.skipped:
        texts["broken"] = f"{len(info.skipped)} left out; the first is {info.skipped[0]}"
    return texts


def summarize_pictures(dataset: ImageDataset) -> str:
    """Return a summary of the pictures in one line: their number, sizes and faults."""
    return "; ".join([str(len(dataset)), *describe_pictures(dataset).values()])


def name_some(names: list[str]) -> str:
    """Return the first :data:`NAMED` names, joined by commas."""
    return ", ".join(names[:NAMED]) + ", ..." * (len(names) > NAMED)
