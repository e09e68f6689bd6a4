"""Compare training on pixels with training on latents at equal processor time: quality, images per second, memory.

The latents are those of the Haar wavelet, which needs no download and loses nothing: what differs is the space alone.
Both networks have about as many parameters. Runs that exist already are not trained again.
"""

import json
import multiprocessing
import resource
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import tyro
from accelerate import PartialState
from accelerate.utils import set_seed
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peer import Budget

from rectified_flow import randomness
from rectified_flow.cli.command_line import parse
from rectified_flow.cli.flags import TrainRectifiedFlow
from rectified_flow.cli.train import build_rectified_flow, open_pictures, planned_space
from rectified_flow.data.store import StoreDataset
from rectified_flow.distributed.joining import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flags import command_line
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.pictures import to_grid, write_picture
from rectified_flow.spaces.latents import Latents
from rectified_flow.training.encoding import encode_pictures
from rectified_flow.training.trainer import Trainer

NETWORKS: dict[str, dict[int, dict[str, Any]]] = {
    "pixels": {128: {"dim": 16, "dim_mults": (1, 2, 4, 4)}, 256: {"dim": 16, "dim_mults": (1, 1, 2, 4, 4)}},
    "haar": {128: {"dim": 32, "dim_mults": (1, 2, 2), "autoencoder": "haar"}},
}
"""Flags by side of the pictures [px]; others take that of the next smaller side, or of the first."""


@dataclass(frozen=True)
class Flags:
    data: str = "synthetic-flowers"
    """A value of --dataset, or a folder."""
    image_size: int = 256
    """Side of the pictures [px]."""
    cpu_minutes: float = 15
    """Processor time per training [minutes]."""
    num_samples: int = 250
    """Generated pictures per distance."""
    steps: int = 4
    """Intervals per picture, of two network calls each."""
    output_dir: Path = Path("runs/latents")
    """Folder for runs, results and grids."""


def config_of(flags: Flags, space: str) -> TrainRectifiedFlow:
    """All flags of a run."""
    networks = NETWORKS[space]
    side = max((each for each in networks if each <= flags.image_size), default=min(networks))
    data: dict[str, Any] = {"dataset_path": flags.data} if Path(flags.data).exists() else {"dataset": flags.data}
    how = {"batch_size": 16, "learning_rate": 1e-3, "lr_warmup_steps": 50, "ema_decay": 0.99, "dropout": 0.0}
    end = {"train_num_steps": 10**6, "num_samples": 0, "horizontal_flip": False, "save_every": 10**6, "log_every": 5}
    name = f"{Path(flags.data).name}-{flags.image_size}-{space}-{flags.cpu_minutes:g}min"
    out = {"output_dir": flags.output_dir / name, "image_size": flags.image_size}
    return parse(TrainRectifiedFlow, "", command_line({**networks[side], **data, **how, **end, **out}))


def train(flags: Flags, space: str) -> dict[str, Any]:
    """Train until the budget is spent; returns what it took."""
    config = config_of(flags, space)
    known = config.run.output_dir / "took.json"
    if known.exists():
        return dict(json.loads(known.read_text()))
    shutil.rmtree(config.run.output_dir, ignore_errors=True)  # its clock has stopped
    torch.set_num_threads(1)
    set_seed(0)
    join_processes()
    pictures, planned = open_pictures(config.data), planned_space(config)
    flow, dataset = build_rectified_flow(config, {}, planned), cast(StoreDataset, pictures)
    if isinstance(planned, Latents):
        latents = encode_pictures(pictures, planned.autoencoder, PartialState(), mirrored=False)
        dataset, flow.space = latents, latents.space(planned.autoencoder)
    trainer = Trainer(flow, dataset, config.run)
    budget, take, began = Budget(flags.cpu_minutes), trainer.stepper.take, time.process_time()

    def take_until_the_end(batches: Any) -> None:
        take(batches)
        if budget.spent:
            trainer.total_steps = trainer.state.step

    trainer.stepper.take = take_until_the_end  # type: ignore[method-assign]
    trainer.train()
    images = trainer.state.step * config.run.split_batch(1).total
    took = {
        "parameters": sum(p.numel() for p in flow.parameters()),
        "images": images,
        "images_per_second": images / (time.process_time() - began),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    known.write_text(json.dumps(took))
    return took


def evaluate(flags: Flags, space: str) -> dict[str, Any]:
    """Distances of a run's pictures to its training pictures, and a grid."""
    config = config_of(flags, space)
    known = config.run.output_dir / "evaluation.json"
    if known.exists():
        return dict(json.loads(known.read_text()))
    torch.set_num_threads(1)
    flow = RectifiedFlow.from_checkpoint(config.run.output_dir)
    evaluator = Evaluator(
        open_pictures(config.data), "efficientnet_lite0", join_processes(), num_samples=flags.num_samples, batch_size=16
    )
    generated = evaluator.generate(flow, steps=flags.steps)
    with randomness.deterministic(randomness.Samples(0, range(16))):
        grid = to_grid(flow.space.draw(flow.sample(16, steps=flags.steps)))
    write_picture(config.run.output_dir / "grid.png", grid)
    distances = evaluator.distances(generated)
    known.write_text(json.dumps(distances))
    return distances


def main(flags: Flags) -> None:
    rows = {}
    for space in NETWORKS:
        parts = []
        for work in (train, evaluate):  # in a process of its own, whose memory is measured
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                parts.append(pool.submit(work, flags, space).result())
        rows[space] = parts[0] | parts[1]
    print(
        f"{Path(flags.data).name}, {flags.image_size} px, {flags.cpu_minutes:g} minutes of one thread, batches of 16, "
        f"{flags.num_samples} pictures in {2 * flags.steps} calls; torch {torch.__version__}\n"
    )
    print("| space | M parameters | images/s | images seen | memory [GB] | Fréchet | kernel |")
    print("|---|---|---|---|---|---|---|")
    for space, row in rows.items():
        frechet, kernel = (row[f"efficientnet_lite0_{kind}_distance"] for kind in ("frechet", "kernel"))
        print(
            f"| {space} | {row['parameters'] / 1e6:.2f} | {row['images_per_second']:.2f} | {row['images']} | "
            f"{row['memory'] / 1e9:.2f} | {frechet:.1f} | {kernel:.3f} |"
        )
    grids = [np.asarray(Image.open(config_of(flags, space).run.output_dir / "grid.png")) for space in NETWORKS]
    gap = np.full((len(grids[0]), 12, 3), 255, np.uint8)
    beside = np.concatenate([grids[0], gap, grids[1]], axis=1)
    print(write_picture(flags.output_dir / f"{Path(flags.data).name}-{flags.image_size}.png", beside))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
