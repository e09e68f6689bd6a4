"""Which training settings suit a short run at 128 px that starts from the weights of the package?

A case is a deviation from the settings that the plan chooses for the pictures of a folder, without augmentation.
Budgets are numbers of images, so that other programs on the machine do not affect the rows.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from studies.few_pictures import Setting, files_of, train_on_links
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


def train_setting(row: Row, setting: Setting) -> None:
    """Train on the pictures of a folder without augmentation."""
    unaugmented = Setting(setting.about, {**setting.flags, "augment": 0}, setting.average)
    train_on_links(row, {Path(file.name): file for file in files_of(row)}, unaugmented)


def measure(row: Row) -> Figures:
    """Return the figures of samples in 16 calls."""
    return measure_samples(row, load_trained(row), {"16 calls": {"steps": 16}})


STUDY = Study(
    __doc__ or "",
    {name: Case(setting.about, partial(train_setting, setting=setting), measure) for name, setting in SETTINGS.items()},
    Flags(image_size=128, budget=(24_000.0,), num_samples=500, figures=("frechet", "kernel", "copies")),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.fine_tuning"))
