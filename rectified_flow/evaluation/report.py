"""A report on the training pictures: their number, sizes and faults, and a sheet of some of them."""

from pathlib import Path

import numpy as np
from accelerate import PartialState
from tqdm.auto import tqdm

from rectified_flow.data.store import ImageDataset, OriginalInfo
from rectified_flow.distributed import on_main
from rectified_flow.evaluation.distances import count_near_duplicates
from rectified_flow.evaluation.features import average_colours, reference_features
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import prepare_folder, writing
from rectified_flow.system.outputs import claim
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
        tqdm.write(lines(describe_pictures(pictures, count_near_duplicates(colours))))
        shown = sorted(np.random.default_rng(0).permutation(len(pictures))[:SHOWN].tolist())
        with deterministic(Samples(0, shown)):
            data, _ = space.augment(pictures.read_batch(shown)["images"])
        sheet = to_grid(space.render(space.decode(space.encode(data))), legend=space.legend)
        path = prepare_folder("output_dir", output_dir) / SHEET_FILE
        with writing(path):
            claim(output_dir, [SHEET_FILE])
        write_picture(path, sheet)
        tqdm.write(line("sheet", f"{path}: {len(shown)} pictures as they are trained on"))

    on_main(state, report)


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
    sizes = "" if dataset.info.originals is None else f", {_range(dataset.info.originals)}"
    faults = [f"{count} {fault}" for count, fault in _find_faults(dataset).values() if count]
    return "; ".join([f"{len(dataset)}{sizes}", *faults])


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
