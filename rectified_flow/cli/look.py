"""``--look``: what the training pictures are, and some of them as the network will see them."""

from pathlib import Path

import numpy as np
from accelerate import PartialState
from tqdm.auto import tqdm

from rectified_flow.data.report import describe_pictures
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.evaluation.features import average_colours
from rectified_flow.evaluation.reference import reference_features
from rectified_flow.evaluation.similarity import count_near_duplicates
from rectified_flow.files import prepare_folder
from rectified_flow.pictures import to_grid, write_picture
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.report import line, lines
from rectified_flow.spaces.pixels import Pixels

SHEET_FILE = "look.png"
SHOWN = 64


def look(output_dir: Path, pictures: ImageDataset, space: Pixels) -> None:
    """Print the report of ``pictures``, and write a sheet of some as training draws them. Collective.

    Raises:
        UsageError: if ``output_dir`` cannot be written.
        RunError: if the disk is full.
    """
    state = PartialState()
    colours = reference_features(pictures, average_colours(), state)
    on_main(state, lambda: _look(output_dir, pictures, space, count_near_duplicates(colours)))


def _look(output_dir: Path, pictures: ImageDataset, space: Pixels, near_duplicates: int) -> None:
    tqdm.write(lines(describe_pictures(pictures, near_duplicates)))
    chosen = spread(pictures.labels, SHOWN)
    with deterministic(Samples(0, chosen)):
        data, _ = space.augment(pictures.read_batch(chosen)["images"])
    drawn = space.draw(space.decode(space.encode(data)))
    path = write_picture(prepare_folder("output_dir", output_dir) / SHEET_FILE, to_grid(drawn))
    tqdm.write(line("sheet", f"{path}: {len(chosen)} pictures as they are trained on"))


def spread(labels: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", count: int) -> list[int]:
    """At most ``count`` rows, in order: of each label as many as of any other, or all, evenly over its rows."""
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    most = min(count, len(labels))
    shares = np.zeros(len(rows), dtype=int)
    while shares.sum() < most:
        left = np.flatnonzero(shares < [len(each) for each in rows])
        shares[left[_evenly(len(left), min(len(left), most - shares.sum()))]] += 1
    chosen = [each[_evenly(len(each), share)] for each, share in zip(rows, shares, strict=True) if share]
    return sorted(np.concatenate(chosen).tolist())


def _evenly(total: int, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """``count`` numbers below ``total``, at equal distances."""
    return np.arange(count) * total // count
