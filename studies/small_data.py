"""When does a training on 64 to 4,000 pictures memorise, and which settings delay it?

A case is a setting and a number of pictures. A row is measured several times on the way: the loss on held-out pictures
beside the loss on training pictures, the kernel distance to held-out pictures, and the share of copies. Budgets are
images, as passes over the pictures decide when a network memorises.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rectified_flow import EvaluationHook, Evaluator, ImageDataset, MeanFlow, Pixels, RectifiedFlow, Unet
from rectified_flow.data.stream import permuted
from rectified_flow.evaluation.heldout import HeldOutPictures
from rectified_flow.training.evaluations import HeldOutHook
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import FEATURES, load_trained, open_pictures, train_flow

COUNTS, UNSEEN, BATCH, EVALUATIONS = (64, 200, 500, 1400, 4000), 200, 8, 8
KERNEL = f"heldout_{FEATURES}_kernel_distance"


@dataclass(frozen=True)
class Setting:
    """One deviation from the plain training: arguments of ``Pixels`` and ``Unet``, and flags of the run."""

    about: str
    pixels: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    related: bool = False
    mean_flow: bool = False


AUGMENTED = {"augmentation": 0.15}
SETTINGS = {
    "plain": Setting("memorises: the held-out loss rises after some hundred passes"),
    "no flips": Setting("memorises twice as early", pixels={"horizontal_flip": False}),
    "dropout": Setting("memorises later", network={"dropout": 0.1}),
    "augment 0.15": Setting("hardly memorises, and is nearer to held-out pictures", AUGMENTED),
    "augment 0.4": Setting("slower, no nearer", {"augmentation": 0.4}),
    "augment 0.15, dropout": Setting("no better than augmentation alone", AUGMENTED, {"dropout": 0.1}),
    "half the channels": Setting("memorises later, and is farther", network={"dim": 12}),
    "rate falls to 0": Setting("nearer at the end, as gradients are noisy", run={"decay": "cosine"}),
    "related": Setting("much nearer from the start, and memorises as early", related=True),
    "related, augment 0.15": Setting("the best", AUGMENTED, related=True),
    "mean flow": Setting("memorises as early in passes", mean_flow=True),
    "mean flow, augment 0.15": Setting("hardly memorises either", AUGMENTED, mean_flow=True),
}


def split(row: Row, count: int) -> tuple[ImageDataset, ImageDataset]:
    """Return the pictures to train on, and held-out ones: a dataset's test split, or some of the drawn flowers."""
    if row.data != "synthetic-flowers":
        everything, unseen = (open_pictures(row.data, row.image_size, each) for each in ("train", "test"))
        seen = np.arange(len(everything))
    else:
        everything = open_pictures(row.data, row.image_size)
        order = permuted(np.arange(len(everything)), len(everything), 1)
        seen, unseen = order[UNSEEN:], everything.subset(order[:UNSEEN])
    chosen = permuted(np.arange(min(count, len(seen))), len(seen), 2 + row.seed)
    return everything.subset(seen[chosen]), unseen


def related(row: Row) -> Row:
    """Return the plain row on the other dataset, of as many pictures as it has, from which a row starts."""
    data, count = ("fluent-emoji", 1400) if row.data == "synthetic-flowers" else ("synthetic-flowers", 4000)
    return replace(row, data=data, case=f"plain, {count}")


def train(row: Row, name: str, count: int) -> None:
    """Train, with measurements on the way."""
    setting, (seen, unseen), size = SETTINGS[name], split(row, count), row.image_size
    space = Pixels((3, size, size), **{"horizontal_flip": True, **setting.pixels})
    options = {"dim": 24, "dim_mults": (1, 2, 3), "attention_sides": (8,), "blocks_per_level": 1, **setting.network}
    network = Unet(image_size=size, conditions=space.conditions, **options)
    if setting.related:
        network.load_state_dict(load_trained(related(row)).network.state_dict(), strict=False)
    flow = MeanFlow(network, space=space) if setting.mean_flow else RectifiedFlow(network, space=space)
    every = max(1, int(row.budget) // BATCH // EVALUATIONS)
    evaluator = Evaluator(seen, FEATURES, num_samples=row.num_samples, held_out=unseen)
    hooks = (HeldOutHook(HeldOutPictures(seen, unseen, seed=0), every), EvaluationHook(evaluator, every))
    options = {"batch_size": BATCH, "sample_steps": 4, "save_every": every, **setting.run}
    train_flow(row, flow, seen, images=int(row.budget), callbacks=hooks, **options)


def measure(row: Row) -> Figures:
    """Return the figures where they were best, and at the end."""
    return summarize(*(read_lines(row.folder / "run" / f"{name}.jsonl") for name in ("heldout", "evaluations")))


def summarize(losses: list[dict[str, Any]], distances: list[dict[str, Any]]) -> Figures:
    """Return the figures of measurements on the way, each with its ``step``."""
    best = min(losses, key=lambda each: each["heldout_loss"])
    near = min(distances, key=lambda each: each[KERNEL])
    ways = {"least loss": best, "nearest": near, "end": {**losses[-1], **distances[-1]}}
    ways |= {f"step {loss['step']}": {**loss, **each} for loss, each in zip(losses, distances, strict=False)}
    names = {"loss": "heldout_loss", "seen": "seen_loss", "gap": "gap", "kernel": KERNEL, "copies": "copies"}
    names["frechet"] = f"{FEATURES}_frechet_distance"
    return {
        way: {"step": line["step"], **{short: line[long] for short, long in names.items() if long in line}}
        for way, line in ways.items()
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


STUDY = Study(
    __doc__ or "",
    {
        f"{name}, {count}": Case(
            setting.about, partial(train, name=name, count=count), measure, related if setting.related else None
        )
        for (name, setting), count in product(SETTINGS.items(), COUNTS)
    },
    Flags(budget=(32768.0,), num_samples=128, figures=("loss", "kernel", "copies")),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.small_data"))
