"""What helps where pictures are few? Trainings on some hundreds of pictures, and what becomes of them.

Each case trains a small flow on ``n`` small pictures with one setting changed. At intervals it is compared
with pictures that it was not trained on: the loss on them beside that on training pictures, the kernel distance to
them, and the share of copies. Results are appended to small_data.jsonl as cases end, and ``--table`` prints them. A
study that was stopped continues where it was. Needs `pip install -e ".[evaluation]"`.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from accelerate import PartialState
from accelerate.utils import set_seed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from score_augmentation import TOLD, ScoreAugmented

from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import permuted
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.heldout import HeldOutPictures
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import Line, Panel, draw_panels
from rectified_flow.training.evaluations import EvaluationHook, HeldOutHook
from rectified_flow.training.trainer import Trainer

BATCH = 8
NETWORK: Mapping[str, Any] = {"dim": 24, "dim_mults": (1, 2, 3), "attention_sides": (8,), "blocks_per_level": 1}
RESULTS = Path(__file__).parent.parent / "studies/results" / "small_data.jsonl"
KERNEL = "efficientnet_lite0_kernel_distance"
UNSEEN = 200
"""Pictures of the drawn flowers that no case is trained on; of the emoji, the test split."""


@dataclass(frozen=True)
class Setting:
    """One deviation from the plain training.

    Args:
        expected: what it was expected to do, written down before it ran.
        pixels: arguments of :class:`Pixels`.
        network: arguments of the Unet.
        run: flags of the run.
        related: start from a training on the other set.
        score_augmentation: probability of each change to noisy pictures and targets alike.
        mean_flow: train a mean flow.
    """

    expected: str
    pixels: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    related: bool = False
    score_augmentation: float = 0.0
    mean_flow: bool = False


AUGMENTED = {"augmentation": 0.15}
SETTINGS = {
    "plain": Setting("memorises: the held-out loss rises after some hundred passes"),
    "no flips": Setting("memorises twice as early", pixels={"horizontal_flip": False}),
    "dropout": Setting("memorises later", network={"dropout": 0.1}),
    "augment 0.15": Setting("hardly memorises, and is nearer to held-out pictures", AUGMENTED),
    "augment 0.4": Setting("slower, no nearer", {"augmentation": 0.4}),
    "augment 0.15, dropout": Setting("no better than augmentation alone", AUGMENTED, {"dropout": 0.1}),
    "score augmentation 0.3": Setting(
        "as augment 0.15, and nearer: the network sees as many transformed pictures", score_augmentation=0.3
    ),
    "half the channels": Setting("memorises later, and is farther", network={"dim": 12}),
    "rate falls to 0": Setting("nearer at the end, as gradients are noisy", run={"lr_decay": "cosine"}),
    "related": Setting("much nearer from the start, and memorises as early", related=True),
    "related, augment 0.15": Setting("the best", AUGMENTED, related=True),
    "mean flow": Setting(
        "memorises as early in passes: half of its rows are those of a rectified flow", mean_flow=True
    ),
    "mean flow, augment 0.15": Setting("hardly memorises either", AUGMENTED, mean_flow=True),
}


@dataclass(frozen=True)
class Flags:
    data: tuple[str, ...] = ("synthetic-flowers",)
    """Values of --dataset, or folders of a dataset with a test split."""
    count: tuple[int, ...] = (200, 500)
    """Numbers of pictures to train on."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    """What to train with."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds; also of the choice of pictures."""
    image_size: int = 32
    """Side of the pictures [px]."""
    images: int = 32768
    """Training images, however many pictures there are."""
    evaluations: int = 8
    """Comparisons on the way."""
    related: Path | None = None
    """Run on another set, for the settings that start from one."""
    output_dir: Path = Path("runs/small-data")
    """Folder for runs."""
    results: Path = RESULTS
    """File to which results are appended."""
    table: bool = False
    """Print the table of what is there, and train nothing."""
    plot: Path | None = None
    """Plot the losses and distances of what is there and selected into this PNG file, and train nothing."""


@dataclass(frozen=True)
class Case:
    """One training."""

    data: str
    count: int
    name: str
    seed: int
    flags: Flags

    @property
    def key(self) -> dict[str, Any]:
        """What identifies its result."""
        return {
            "data": Path(self.data).name,
            "count": self.count,
            "setting": self.name,
            "seed": self.seed,
            "images": self.flags.images,
            "image_size": self.flags.image_size,
        }

    @property
    def folder(self) -> Path:
        return self.flags.output_dir / "".join(c if c.isalnum() else "-" for c in " ".join(map(str, self.key.values())))

    def pictures(self) -> tuple[ImageDataset, ImageDataset]:
        """Those to train on, and others."""
        folder = Path(self.data)
        if not folder.is_dir():
            everything = open_dataset(self.data, image_size=self.flags.image_size)
            order = permuted(np.arange(len(everything)), len(everything), 1)
            seen, unseen = order[UNSEEN:], everything.subset(order[:UNSEEN])
        else:
            everything, unseen = (
                open_dataset("", folder, image_size=self.flags.image_size, split=split) for split in ("train", "test")
            )
            seen = np.arange(len(everything))
        chosen = permuted(np.arange(min(self.count, len(seen))), len(seen), 2 + self.seed)
        return everything.subset(seen[chosen]), unseen

    def run(self) -> dict[str, Any]:
        """Train, and return the comparisons on the way."""
        setting, state = SETTINGS[self.name], PartialState()
        seen, unseen = self.pictures()
        set_seed(self.seed)
        flow = self.build(setting)
        steps = self.flags.images // BATCH
        every = steps // self.flags.evaluations
        config = TrainingConfig(
            batch_size=BATCH,
            train_num_steps=steps,
            learning_rate=2e-3,
            lr_warmup_steps=100,
            ema_decay=0.995,
            mixed_precision="no",
            seed=self.seed,
            num_samples=64,
            sample_every=0,
            sample_steps=4,
            save_every=every,
            keep_checkpoints=1,
            log_every=64,
            output_dir=self.folder,
            **setting.run,
        )
        evaluator = Evaluator(seen, "efficientnet_lite0", state, num_samples=128, held_out=unseen)
        heldout = HeldOutHook(HeldOutPictures(seen, unseen, seed=0), every)
        Trainer(flow, seen, config, callbacks=[heldout, EvaluationHook(evaluator, every)]).train()
        return {**self.key, "losses": _rows(self.folder, "heldout"), "distances": _rows(self.folder, "evaluations")}

    def build(self, setting: Setting) -> Flow:
        """The flow to train, with the weights that it starts from."""
        side = self.flags.image_size
        space = Pixels((3, side, side), **{"horizontal_flip": True, **setting.pixels})
        settings = {**NETWORK, **setting.network}
        conditions = TOLD if setting.score_augmentation else space.conditions
        network = Unet(image_size=side, conditions=conditions, **settings)
        if setting.related:
            if self.flags.related is None:
                raise SystemExit(f"the setting {self.name!r} needs --related")
            checkpoint.load_matching(network, checkpoint.resolve(self.flags.related))
        if setting.score_augmentation:
            return ScoreAugmented(network, setting.score_augmentation, space=space)
        return MeanFlow(network, space=space) if setting.mean_flow else RectifiedFlow(network, space=space)


def _rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The numbers of a file of lines."""
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if isinstance(value, int | float)} for row in rows]


def known(results: Path) -> list[dict[str, Any]]:
    """The results that are there."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def print_table(results: list[dict[str, Any]]) -> None:
    """For each case: where its held-out loss was least, and what was there and at the end."""
    print(
        "| data | px | pictures | setting | seed | least held-out loss, at step | at the end | gap there "
        "| nearest, at step | at the end | copies |\n" + "|---" * 11 + "|"
    )
    for row in results:
        losses, distances = row["losses"], row["distances"]
        best = min(losses, key=lambda each: each["heldout_loss"])
        near = min(distances, key=lambda each: each[f"heldout_{KERNEL}"])
        end, last = losses[-1], distances[-1]
        print(
            f"| {row['data']} | {row['image_size']} | {row['count']} | {row['setting']} | {row['seed']} "
            f"| {best['heldout_loss']:.4f}, {best['step']} | {end['heldout_loss']:.4f} | {end['gap']:.4f} "
            f"| {near[f'heldout_{KERNEL}']:.3f}, {near['step']} | {last[f'heldout_{KERNEL}']:.3f} "
            f"| {last['copies']:.0%} |"
        )


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Over passes: losses on held-out and (seen) on training pictures, distances to held-out pictures, copies."""
    losses: dict[str, Line] = {}
    distances: dict[str, Line] = {}
    copies: dict[str, Line] = {}
    for result in results:
        name, measured, compared = f"{result['count']}, {result['setting']}", result["losses"], result["distances"]

        def line(rows: list[dict[str, Any]], key: str, count: int = result["count"]) -> Line:
            return [row["step"] * BATCH / count for row in rows], [row[key] for row in rows]

        losses |= {name: line(measured, "heldout_loss"), f"{name} (seen)": line(measured, "seen_loss")}
        distances[name] = line(compared, f"heldout_{KERNEL}")
        copies[name] = line(compared, "copies")
    draw_panels(
        path,
        [
            Panel(losses, "loss on held-out and on training pictures", "passes", "squared error of the velocity"),
            Panel(distances, "kernel distance to held-out pictures", "passes", KERNEL, log_y=True),
            Panel(copies, "copies", "passes", "share of samples"),
        ],
    )


def main(flags: Flags) -> None:
    """Train what is not there yet, and print the table; or plot."""
    choices = product(flags.data, flags.count, flags.settings, flags.seeds)
    cases = [Case(*choice, flags) for choice in choices]
    if flags.plot is not None:
        wanted = [case.key for case in cases]
        plot(flags.plot, [row for row in known(flags.results) if any(key.items() <= row.items() for key in wanted)])
        return
    if not flags.table:
        join_processes()
        torch.set_num_threads(1)
        for case in cases:
            if not any(case.key.items() <= row.items() for row in known(flags.results)):
                result = case.run()
                with flags.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print_table(known(flags.results))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
