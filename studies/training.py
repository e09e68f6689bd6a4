"""The trainings of studies: a flow trained until its budget is spent, and the figures of its samples."""

import json
from collections.abc import Callable, Mapping
from math import cos, pi
from os import environ
from pathlib import Path
from typing import Any, Final, Literal

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Dataset
from torchvision.utils import save_image

from rectified_flow import (
    Callback,
    Evaluator,
    ImageDataset,
    RectifiedFlow,
    Trainer,
    TrainingConfig,
    Unet,
    load_flow,
    open_dataset,
)
from rectified_flow.flows.flow import sample_batches
from studies.harness import CLOCKS, Figures, Row

FEATURES: Final = "efficientnet_lite0"
NAMES = {
    "frechet": f"{FEATURES}_frechet_distance",
    "kernel": f"{FEATURES}_kernel_distance",
    "colours_frechet": "colours_8x8_frechet_distance",
    "colours_kernel": "colours_8x8_kernel_distance",
    **{name: name for name in ("precision", "recall", "copies")},
}
"""Figures of samples, and their names in an evaluation."""
ENDLESS = 10**9
Decay = Literal["none", "cosine"]
DECAYS: Mapping[Decay, Callable[[float], float]] = {
    "none": lambda share: 1.0,
    "cosine": lambda share: 0.5 + 0.5 * cos(pi * share),
}
"""Factor of the learning rate by the spent share of the budget."""
GRID = 36
"""Samples in the picture beside a run."""
SHORT_RUN: Mapping[str, Any] = {
    "batch_size": 8,
    "learning_rate": 2e-3,
    "lr_warmup_steps": 100,
    "ema_decay": 0.995,
    "mixed_precision": "no",
}
"""Flags of a run of minutes; docs/measurements/quality.md has how they were chosen."""
CHOSEN: Mapping[str, Any] = {
    "optimizer": ("muon",),
    "decay": "cosine",
    "lr_warmup_steps": 20,
    "mixed_precision": "bf16",
    "network_dim": 24,
}
"""Settings for a run of minutes, better than :data:`SHORT_RUN`; docs/measurements/budget.md has the comparison."""
AVERAGED = 0.08
"""Length of the average of a run with :data:`CHOSEN`, as a share of its steps."""


def open_pictures(data: str, image_size: int, split: str = "train") -> ImageDataset:
    """Open a dataset by a value of ``--dataset``, a folder, or the name of a folder in ``$STUDIES_DATA``."""
    return open_dataset(data, find_folder(data), image_size=image_size, split=split)


def find_folder(data: str) -> Path | None:
    """Return the folder of a dataset, which may be in ``$STUDIES_DATA``; None for a value of ``--dataset``."""
    folders = [Path(data), *(Path(folder) / data for folder in [environ.get("STUDIES_DATA")] if folder)]
    return next((each for each in folders if each.is_dir()), None)


def build_unet(size: int, **settings: Any) -> Unet:
    """Build the Unet of a run of minutes; for images of twice the side, it has one level more."""
    mults = (1, 2, 3) if size <= 32 else (1, 1, 2, 3)
    return Unet(**{"dim_mults": mults, "image_size": size, "attention_sides": (8,), "blocks_per_level": 1, **settings})


class Budget(Callback):
    """Ends a run when its budget is spent; a resumed run continues with the seconds of its checkpoint.

    Args:
        row: the row, whose clock is read.
        minutes: the budget, or None for a run whose number of steps is its budget.
        seconds: seconds that were spent before the first step, for example on paths of a teacher.
    """

    def __init__(self, row: Row, minutes: float | None, seconds: float = 0.0) -> None:
        self.clock, self.file = CLOCKS[row.clock], row.folder / "seconds.jsonl"
        self.limit = None if minutes is None else 60 * minutes
        self.before, self.began = seconds, self.clock()
        self.prepared = seconds

    @property
    def seconds(self) -> float:
        """The seconds spent, over all starts of the run."""
        return self.before + self.clock() - self.began

    def fraction(self, updates: float, total: int) -> float:
        """Return the share of the budget that is spent."""
        return min(1.0, updates / total if self.limit is None else self.seconds / self.limit)

    def on_start(self, trainer: Trainer) -> None:
        """Restore the seconds of the checkpoint that the run resumes from."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        known = dict(json.loads(line) for line in lines)
        self.before, self.began = known.get(trainer.state.step, self.prepared), self.clock()
        if trainer.state.step > 0:  # a run has at least one step, and so a checkpoint
            self._end_if_spent(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """End the run after this step if the budget is spent."""
        self._end_if_spent(trainer)

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write down the seconds up to this checkpoint."""
        with self.file.open("a") as file:
            file.write(json.dumps([trainer.state.step, self.seconds]) + "\n")

    def _end_if_spent(self, trainer: Trainer) -> None:
        if self.limit is not None and self.seconds >= self.limit:
            trainer.end_here()


def train_flow(
    row: Row,
    flow: nn.Module,
    data: Dataset[Any],
    *,
    minutes: float | None = None,
    images: int | None = None,
    prepared: float = 0.0,
    decay: Decay = "none",
    **settings: Any,
) -> None:
    """Train a flow until its budget is spent, from the newest checkpoint if there is one.

    Args:
        row: its folder holds the run.
        flow: the flow to train.
        data: the training data.
        minutes: the budget of this training, by the row's clock.
        images: the budget as a number of images, instead.
        prepared: seconds of the budget that were spent before.
        decay: decay of the learning rate over the budget, a key of :data:`DECAYS`.
        settings: fields of :class:`TrainingConfig` that differ from :data:`SHORT_RUN`.

    Raises:
        RuntimeError: if the run was asked to stop; it is saved.
    """
    set_seed(row.seed)
    values = {"num_samples": 0, "save_every": 100, "keep_checkpoints": 1, "log_every": 32, **SHORT_RUN, **settings}
    values["train_num_steps"] = ENDLESS if images is None else images // values["batch_size"]
    config = TrainingConfig(seed=row.seed, output_dir=row.folder / "run", **values)
    budget = Budget(row, minutes, prepared)

    def schedule(updates: float, total: int) -> float:
        warmup = min(1.0, (updates + 1) / max(1, config.lr_warmup_steps))
        return warmup * DECAYS[decay](budget.fraction(updates, total))

    trainer = Trainer(flow, data, config, lr_schedule=schedule, callbacks=[budget])
    if not trainer.train():
        raise RuntimeError(f"{row.folder} was asked to stop, and is saved")
    write_trained(row, trainer.state.images_seen, budget.seconds)


def train_images(row: Row, flow: nn.Module, data: Dataset[Any], run: Mapping[str, Any]) -> None:
    """Train a flow on the images of a row's budget, with an average over a share of the steps."""
    steps = row.budget / run.get("batch_size", SHORT_RUN["batch_size"])
    train_flow(row, flow, data, images=int(row.budget), **{**run, "ema_decay": 1 - 1 / (AVERAGED * steps)})


def grouped(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings by the part that their names begin with: ``flow_``, ``network_``, or else the run."""
    groups: dict[str, dict[str, Any]] = {"run": {}, "flow": {}, "network": {}}
    for name, value in settings.items():
        part, _, rest = name.partition("_")
        if part in groups:
            groups[part][rest] = value
        else:
            groups["run"][name] = value
    return groups


def write_trained(row: Row, images: float, seconds: float) -> None:
    """Write down that a training has ended, with the sums over the trainings before it."""
    before = row.before
    known = (before.trained if before else None) or {"images": 0, "seconds": 0}
    document = {"images": images + known["images"], "seconds": round(seconds + known["seconds"], 1)}
    (row.folder / "trained.json").write_text(json.dumps(document))


def once(row: Row, name: str, build: Callable[[], Any]) -> tuple[Any, float]:
    """Return tensors that are built once for a row, and the seconds that it took."""
    file = row.folder / f"{name}.pt"
    if not file.exists():
        began = CLOCKS[row.clock]()
        value = build()
        torch.save((value, CLOCKS[row.clock]() - began), file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
    value, seconds = torch.load(file, weights_only=True)
    return value, seconds


def load_trained(row: Row) -> Any:
    """Return the flow of a trained row, with averaged weights."""
    return load_flow(row.folder / "run")


def calls_of(flow: Any, counts: tuple[int, ...] = (1, 2, 4, 16)) -> dict[str, dict[str, Any]]:
    """Return the options of ``flow.sample`` for numbers of network calls, by name; rectified flows use Euler steps."""
    solver = {"solver": "euler"} if isinstance(flow, RectifiedFlow) else {}
    return {f"{count} call{'s' * (count > 1)}": {"steps": count, **solver} for count in counts}


def measure_samples(
    row: Row,
    flow: Any,
    ways: Mapping[str, Mapping[str, Any]],
    data: ImageDataset | None = None,
    evaluator_class: type[Evaluator] = Evaluator,
) -> Figures:
    """Return the figures of samples for each way to draw them, and write a grid of each beside the run."""
    pictures = open_pictures(row.data, row.image_size) if data is None else data
    how: dict[str, Any] = {"num_samples": row.num_samples, "seed": row.seed, "batch_size": 50}
    evaluator = evaluator_class(pictures, FEATURES, metrics=("frechet", "kernel", "copies", "manifold"), **how)
    figures = {}
    for name, options in ways.items():
        generated = evaluator.generate(flow, **options)
        numbers = evaluator.compute(generated)
        figures[name] = {short: float(numbers[long]) for short, long in NAMES.items()}
        [(_, grid)] = sample_batches(flow, range(GRID), **options)
        save_image(grid / 255, row.folder / f"{name}.png", nrow=round(GRID**0.5), pad_value=1)
    return figures


def measure_calls(row: Row) -> Figures:
    """Return the figures of a trained row for several numbers of network calls."""
    flow = load_trained(row)
    return measure_samples(row, flow, calls_of(flow))
