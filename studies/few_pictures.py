"""On 30 to 500 pictures at 128 px, how many samples are copies, and how near are samples to held-out pictures?

A case is a setting and a number of pictures. All runs use the settings that the plan chooses for one hour, on latents
of the package's autoencoder. Budgets are numbers of images: the plan limits a run to 500 passes, or to 200 without
augmentation, but not below 15,000 and 6,000 images. The remaining pictures of the folder are held out.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow import Evaluator, RectifiedFlow
from rectified_flow.cli.settings import command_line, read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import STARTERS, TrainConfig
from rectified_flow.data.stream import permuted
from rectified_flow.evaluation.evaluator import Comparison
from rectified_flow.flows.solvers import Guidance
from rectified_flow.runs import checkpoint
from rectified_flow.system.pictures import to_grid, write_picture
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import FEATURES, find_folder, load_trained, open_pictures, write_trained

COUNTS = (30, 60, 125, 250, 500)
SCALE = 1.5  # scale of the guidance away from the starter, the "domain guidance" of arXiv:2504.01521
KERNEL = f"heldout_{FEATURES}_kernel_distance"
PLANNED: Mapping[str, Any] = {
    "autoencoder": "small",
    "optimizer": "muon",
    "learning_rate": 2e-3,
    "lr_decay": "cosine",
    "dim": 48,
    "dim_mults": (1, 2),
    "network": ("Unet", "blocks_per_level=1", "attention_sides=[8]"),
    "dropout": 0,
    "time_distribution": "stratified=True",
    "mixed_precision": "no",
    "augment": 0.15,
    "init_from": "starter",
    "holdout": 0,
    "batch_size": 32,
    "num_samples": 36,
}
"""Settings that the plan chooses for these pictures for one hour on a CPU, except for the length."""


@dataclass(frozen=True)
class Setting:
    """A deviation from the plan."""

    about: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    average: float = 0.05
    """Time constant of the average of the weights, as a share of the steps."""


SETTINGS = {
    "planned": Setting("augmentation and the starter's weights"),
    "no augmentation": Setting("expected: more copies", {"augment": 0}),
    "random weights": Setting("expected: larger kernel distance, equally many copies", {"init_from": "none"}),
    "neither": Setting("no augmentation, and random weights", {"augment": 0, "init_from": "none"}),
    "augment 0.3": Setting("expected: fewer copies", {"augment": 0.3}),
    "dropout 0.1": Setting("expected: fewer copies", {"dropout": 0.1}),
}


def split(row: Row, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training pictures, and of the held-out pictures."""
    total = len(open_pictures(row.data, row.image_size))
    order = permuted(np.arange(total), total, [1 + row.seed])
    return order[:count], order[count:]


def files_of(row: Row) -> list[Path]:
    """Return the files of the pictures of a row, in the order of their dataset."""
    source = find_folder(row.data)
    if source is None:
        raise RuntimeError(f"{row.data} is not a folder of pictures")
    return [source / each for each in open_pictures(row.data, row.image_size).names]


def train_planned(row: Row, name: str, count: int) -> None:
    """Train on some pictures of a folder; see :func:`train_on_links`."""
    files = files_of(row)
    train_on_links(row, {Path(files[number].name): files[number] for number in split(row, count)[0]}, SETTINGS[name])


def train_on_links(row: Row, files: Mapping[Path, Path], setting: Setting) -> None:
    """Train on pictures with the training program; an interrupted run resumes.

    Args:
        row: the row.
        files: the files of the pictures, by the names under which the run finds them.
        setting: the deviation from the plan.

    Raises:
        RuntimeError: if the run was interrupted; its checkpoint is saved.
    """
    folder = row.folder / "pictures"
    for name, file in files.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(file.absolute())
    flags = {**PLANNED, **setting.flags}
    steps = ceil(row.budget / flags["batch_size"])
    flags |= {"train_num_steps": steps, "lr_warmup_steps": max(1, steps // 50), "sample_every": steps}
    flags |= {"ema_decay": 1 - 1 / max(10, setting.average * steps), "save_every": max(1, steps // 6)}
    flags |= {"dataset_path": folder, "image_size": row.image_size, "output_dir": row.folder / "run", "seed": row.seed}
    settings = read_settings(TrainConfig, "", command_line(flags))
    if not train(settings):
        raise RuntimeError(f"{row.folder} was interrupted, and its checkpoint is saved")
    write_trained(row, steps * flags["batch_size"], 0.0)


def measure(row: Row, count: int) -> Figures:
    """Return figures of samples with and without guidance; save the likeliest copies and their nearest pictures."""
    flow, pictures = load_trained(row), open_pictures(row.data, row.image_size)
    seen, unseen = (pictures.subset(part) for part in split(row, count))
    how: dict[str, Any] = {"num_samples": row.num_samples, "seed": row.seed, "batch_size": 50}
    evaluator = Evaluator(seen, FEATURES, held_out=unseen, medium=flow.space.medium, **how)
    ways: dict[str, dict[str, Any]] = {"16 calls": {"steps": 16}}
    if flow.space.medium.codec:
        ways["guided by the starter"] = {"steps": 16, "guidance": away_from_starter(row)}
    figures = {}
    for name, options in ways.items():
        comparison = Comparison(evaluator, flow, options)
        numbers = evaluator.measure(comparison)
        rows = evaluator.beside_neighbours(comparison)
        write_picture(row.folder / f"{name}.png", to_grid(rows.flatten(0, 1), columns=rows.shape[1]))
        figures[name] = {short: float(numbers[long]) for short, long in NAMES.items() if long in numbers}
    return figures


def away_from_starter(row: Row, scale: float = SCALE, interval: tuple[float, float] = (0.0, 1.0)) -> Guidance:
    """Return the guidance of a trained row away from the starter at the times of an interval."""
    starter: RectifiedFlow = load_trained(row)
    checkpoint.load_matching(starter.network, checkpoint.resolve(STARTERS / "small"))
    return Guidance(autoguidance=scale, interval=interval, earlier=starter.exact_velocity)


NAMES = {
    "frechet": f"{FEATURES}_frechet_distance",
    "kernel": KERNEL,
    "copies": "copies",
    "chance": "copies_by_chance",
}
"""Figures of samples, and their names in an evaluation."""


STUDY = Study(
    __doc__ or "",
    {
        f"{name}, {count}": Case(
            setting.about, partial(train_planned, name=name, count=count), partial(measure, count=count)
        )
        for (name, setting), count in product(SETTINGS.items(), COUNTS)
    },
    Flags(image_size=128, budget=(24_000.0,), num_samples=500, figures=("kernel", "copies", "chance")),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.few_pictures"))
