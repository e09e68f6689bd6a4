"""Which training settings give the best samples in a short run at 128 px that starts from the starter of the package?

A case is a deviation from the settings that the plan chooses for the pictures of a folder, without augmentation.
Budgets are numbers of images, so that other programs on the machine do not affect the rows.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from studies.few_pictures import Setting, away_from_starter, files_of, train_on_links
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import load_trained, measure_samples

SETTINGS: Mapping[str, Setting] = {
    "planned": Setting("the settings of the plan"),
    "dropout 0.1": Setting("dropout, which the plan does not use", {"dropout": 0.1}),
    "learning rate 1e-3": Setting("half of the plan's", {"learning_rate": 1e-3}),
    "learning rate 4e-3": Setting("twice the plan's", {"learning_rate": 4e-3}),
    "learning rate 8e-3": Setting("four times the plan's", {"learning_rate": 8e-3}),
    "batch 16": Setting("twice as many steps", {"batch_size": 16}),
    "batch 64": Setting("half as many steps, at a higher rate", {"batch_size": 64, "learning_rate": 2.8e-3}),
    "average 0.02": Setting("a shorter average", average=0.02),
    "average 0.1": Setting("a longer average", average=0.1),
    "noisier times": Setting("more training near noise", {"time_distribution": ("mean=0", "stratified=True")}),
    "much noisier times": Setting("more training near noise", {"time_distribution": ("mean=0.5", "stratified=True")}),
    "wide times": Setting("more training near both ends", {"time_distribution": ("std=1.6", "stratified=True")}),
}
GUIDED = ((1.5, (0.0, 1.0)), (1.5, (0.2, 0.8)), (2.0, (0.2, 0.7)))
"""Scales of the guidance away from the starter, and the times of each."""


def train_setting(row: Row, setting: Setting) -> None:
    """Train on the pictures of a folder without augmentation."""
    unaugmented = Setting(setting.about, {**setting.flags, "augment": 0}, setting.average)
    train_on_links(row, {Path(file.name): file for file in files_of(row)}, unaugmented)


def measure(row: Row) -> Figures:
    """Return the figures of samples in 16 calls; for the plan's settings, also of guided samples."""
    flow, ways = load_trained(row), dict[str, dict[str, Any]]({"16 calls": {"steps": 16}})
    if row.case == "planned" and flow.space.medium.codec:
        for scale, interval in GUIDED:
            guidance = away_from_starter(row, scale, interval)
            ways[f"guided by {scale:g}, {interval[0]:g} to {interval[1]:g}"] = {"steps": 16, "guidance": guidance}
    return measure_samples(row, flow, ways)


STUDY = Study(
    __doc__ or "",
    {name: Case(setting.about, partial(train_setting, setting=setting), measure) for name, setting in SETTINGS.items()},
    Flags(image_size=128, budget=(24_000.0,), num_samples=500, figures=("frechet", "kernel", "copies")),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.fine_tuning"))
