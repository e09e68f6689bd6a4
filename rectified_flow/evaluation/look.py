"""A report of the training pictures, with a sheet of some of them."""

from pathlib import Path

import numpy as np
from accelerate import PartialState
from tqdm.auto import tqdm

from rectified_flow.data.report import describe_pictures
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.evaluation.distances import count_near_duplicates
from rectified_flow.evaluation.features import average_colours, reference_features
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.runs.folder import is_run
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.files import prepare_folder, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.system.terminal import line, lines

SHEET_FILE, SHOWN = "look.png", 64
"""File of the sheet, and the largest number of pictures on it."""


def look(output_dir: Path, pictures: ImageDataset, space: Pixels) -> None:
    """Print the report of ``pictures``, and write a sheet of some as training augments them. Collective.

    Raises:
        UsageError: if ``output_dir`` cannot be written.
        RunError: if the disk is full.
    """
    state = PartialState()
    colours = reference_features(pictures, average_colours())

    def report() -> None:
        tqdm.write(lines(describe_pictures(pictures, count_near_duplicates(colours))))
        shown = spread(pictures.labels, SHOWN)
        with deterministic(Samples(0, shown)):
            data, _ = space.augment(pictures.read_batch(shown)["images"])
        sheet = to_grid(space.render(space.decode(space.encode(data))))
        path = prepare_folder("output_dir", output_dir) / SHEET_FILE
        with writing(path):
            claim(output_dir, [SHEET_FILE], ours=is_run(output_dir))
        write_picture(path, sheet)
        tqdm.write(line("sheet", f"{path}: {len(shown)} pictures as they are trained on"))

    on_main(state, report)


def spread(labels: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", count: int) -> list[int]:
    """Return at most ``count`` random rows, sorted, with a number of rows per label that is as equal as possible."""
    shuffled = np.random.default_rng(0).permutation(len(labels))
    turns = np.empty(len(labels), dtype=int)  # number of earlier rows with the same label
    for label in np.unique(labels):
        rows = shuffled[labels[shuffled] == label]
        turns[rows] = np.arange(len(rows))
    by_turn = shuffled[np.argsort(turns[shuffled], kind="stable")]
    return sorted(by_turn[:count].tolist())
