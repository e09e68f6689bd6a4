"""Compare the image quality of this project and of rectified-flow-pytorch, for the same data and the same budget.

Both train for the same processor time of one thread, on the same images, decoded in advance, with about as many
parameters. The peer runs with its defaults, without its previews and checkpoints. Then both generate the same number of
images with the same number of network calls, and both sets are compared with the training images.

This project is measured twice: at the end of its budget, and when it has seen as many images as the peer has at the end
of its own. The peer is measured twice, too: with the averaged weights, which its Trainer samples with, and with the raw
weights, since its average is meant for longer runs. Results that exist already are not computed again. Needs
`pip install -e ".[benchmark,evaluation]"`.
"""

import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import tyro
from accelerate.utils import set_seed
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peer import PEER, Budget, PeerFlow, train_peer

from rectified_flow import randomness
from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation.evaluator import Evaluator, Generated
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.training.trainer import Trainer

PEER_LAST = f"{PEER}, weights not averaged"
OURS, OURS_EARLY = "here", "here, as many images"
SIDES = (PEER, PEER_LAST, OURS_EARLY, OURS)
IMAGE_SIZE = 32
PEER_DIM = 16
FEATURES = ("efficientnet_lite0", "colours_8x8")
DISTANCES = [f"{features}_{kind}_distance" for features in FEATURES for kind in ("frechet", "kernel")]


@dataclass(frozen=True)
class Flags:
    data: tuple[str, ...] = ("synthetic-flowers",)
    """Datasets: values of --dataset, or folders."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds."""
    cpu_minutes: float = 12
    """Processor time per training run [minutes]."""
    num_samples: int = 1000
    """Generated images per distance."""
    calls: int = 16
    """Network calls per image, with the midpoint solver."""
    workers: int = 1
    """Number of training runs or evaluations at once, with one thread each."""
    output_dir: Path = Path("runs/quality")
    """Folder for runs, results and grids."""


@dataclass(frozen=True)
class Case:
    """One training setup: its data, its seed and the flags."""

    data: str
    seed: int
    flags: Flags

    @property
    def name(self) -> str:
        return Path(self.data).name

    def folder(self, who: str) -> Path:
        return self.flags.output_dir / f"{self.name}-{who}-{self.flags.cpu_minutes:g}min-{self.seed}"

    def pictures(self) -> ImageDataset:
        path = Path(self.data) if Path(self.data).exists() else None
        return open_dataset(self.data, path, image_size=IMAGE_SIZE)


# The peer


def train_their(case: Case) -> None:
    """Train with the peer's own Trainer and its defaults, until the budget is spent."""
    flow = partial(PeerFlow, PEER_DIM, IMAGE_SIZE)
    train_peer(flow, case.pictures(), case.folder(PEER), case.flags.cpu_minutes, case.seed)


def load_peer(case: Case, weights: str) -> tuple[PeerFlow, int]:
    """The peer's flow with the weights of the file ``weights``, and the number of images it has seen."""
    path = checkpoint.resolve(case.folder(PEER))
    flow = PeerFlow(PEER_DIM, IMAGE_SIZE)
    checkpoint.load_weights(flow, path, weights)
    return flow, checkpoint.load_document(path, "run.json")["images"]


# This project


def our_flow() -> RectifiedFlow:
    network = Unet(32, (1, 2, 3), image_size=IMAGE_SIZE, attention_sides=(8,), blocks_per_level=1, dropout=0)
    return RectifiedFlow(network, space=Pixels((3, IMAGE_SIZE, IMAGE_SIZE)))


def our_config(case: Case) -> TrainingConfig:
    return TrainingConfig(
        batch_size=8,
        learning_rate=2e-3,
        lr_warmup_steps=100,
        ema_decay=0.995,
        mixed_precision="no",
        seed=case.seed,
        train_num_steps=10**6,
        num_samples=0,
        save_every=100,
        keep_checkpoints=0,
        output_dir=case.folder(OURS),
    )


def train_ours(case: Case) -> None:
    """Train with this project's Trainer, until the budget is spent."""
    config = our_config(case)
    status = config.output_dir / "status.json"
    if status.exists() and json.loads(status.read_text())["state"] == "finished":
        return
    shutil.rmtree(config.output_dir, ignore_errors=True)  # an unfinished run cannot resume: its clock has stopped
    torch.set_num_threads(1)
    set_seed(case.seed)
    join_processes()
    trainer = Trainer(our_flow(), case.pictures(), config)
    budget, take = Budget(case.flags.cpu_minutes), trainer.stepper.take

    def take_until_the_end(batches: Any) -> None:
        take(batches)
        if budget.spent:
            trainer.total_steps = trainer.state.step

    trainer.stepper.take = take_until_the_end  # type: ignore[method-assign]
    trainer.train()


def load_ours(case: Case, images: float = float("inf")) -> tuple[RectifiedFlow, int]:
    """This project's flow after at most ``images`` images, and the number of images it has seen."""
    config = our_config(case)
    batch = config.split_batch(1).total
    paths = checkpoint.list_checkpoints(config.checkpoints)
    path = max(each for each in paths if checkpoint.step_of(each) * batch <= images)
    return load_flow(path, RectifiedFlow), checkpoint.step_of(path) * batch


# Both


def evaluate(case: Case, who: str) -> dict[str, Any]:
    """Distances of one side, with the settings needed to interpret them."""
    known = case.folder(who) / "evaluation.json"
    if known.exists():
        return dict(json.loads(known.read_text()))
    torch.set_num_threads(1)
    load: dict[str, Callable[[], tuple[Any, int]]] = {
        PEER: lambda: load_peer(case, checkpoint.EMA_FILE),
        PEER_LAST: lambda: load_peer(case, checkpoint.MODEL_FILE),
        OURS: lambda: load_ours(case),
        OURS_EARLY: lambda: load_ours(case, load_peer(case, checkpoint.EMA_FILE)[1]),
    }
    flow, images = load[who]()
    evaluator = Evaluator(
        case.pictures(), "efficientnet_lite0", join_processes(), num_samples=case.flags.num_samples, seed=case.seed
    )
    steps = case.flags.calls // 2
    generated: Generated = evaluator.generate(flow, steps=steps)
    beside = evaluator.beside_neighbours(flow, generated, steps=steps)
    known.parent.mkdir(parents=True, exist_ok=True)
    write_picture(known.with_name("neighbours.png"), to_grid(beside.flatten(0, 1), beside.shape[1]))
    with randomness.deterministic(randomness.Samples(case.seed, range(64))):
        pictures = flow.sample(64, steps=case.flags.calls // 2)
    write_picture(known.with_name("grid.png"), to_grid(flow.space.render(pictures)))
    result = {
        "images": images,
        "parameters": sum(p.numel() for p in flow.parameters()),
        **evaluator.distances(generated),
        **evaluator.scores(generated),
        **evaluator.settings,
    }
    known.write_text(json.dumps(result, indent=1))
    return result


def main(flags: Flags) -> None:
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    cases = [Case(data, seed, flags) for seed in flags.seeds for data in flags.data]
    spawn = multiprocessing.get_context("spawn")
    fresh = partial(ProcessPoolExecutor, flags.workers, mp_context=spawn, max_tasks_per_child=1)
    with fresh() as pool:
        for done in [pool.submit(train, case) for case in cases for train in (train_their, train_ours)]:
            done.result()
    with fresh() as pool:
        jobs = {(case, who): pool.submit(evaluate, case, who) for case in cases for who in SIDES}
        results = {key: job.result() for key, job in jobs.items()}
    print_table(flags, results)
    for case in cases:
        print(draw_side_by_side(case))


def draw_side_by_side(case: Case) -> Path:
    """The grids side by side: the peer with averaged and raw weights, this project at equal images and equal time."""
    grids = [np.asarray(Image.open(case.folder(who) / "grid.png")) for who in SIDES]
    gap = np.full((len(grids[0]), 12, 3), 255, np.uint8)
    path = case.flags.output_dir / f"{case.name}-{case.seed}.png"
    return write_picture(path, np.concatenate([part for grid in grids for part in (grid, gap)][:-1], axis=1))


def print_table(flags: Flags, results: dict[tuple[Case, str], dict[str, Any]]) -> None:
    """Print means over seeds, and the ratio to the better of the peer's two results."""
    print(
        f"{flags.cpu_minutes:g} minutes of one thread each, {flags.calls} calls, {flags.num_samples} images, ", end=""
    )
    print(f"{len(flags.seeds)} seed{'s' * (len(flags.seeds) > 1)}; torch {torch.__version__}\n")
    print("| data | | M parameters | images seen | " + " | ".join(DISTANCES) + " |")
    print("|---|---|---|---|" + "---|" * len(DISTANCES))
    for data in flags.data:
        rows = {
            who: [result for (case, which), result in results.items() if which == who and case.data == data]
            for who in SIDES
        }
        for who, of in rows.items():
            cells = []
            for distance in DISTANCES:
                here, *theirs = (mean(each[distance] for each in group) for group in (of, rows[PEER], rows[PEER_LAST]))
                cells.append(f"{here:.4g}" + (f" ({here / min(theirs):.2f} x)" if who in (OURS, OURS_EARLY) else ""))
            images = mean(each["images"] for each in of)
            parameters = of[0]["parameters"] / 1e6
            print(f"| {Path(data).name} | {who} | {parameters:.2f} | {images:.0f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
