"""Compare training on pixels with training on latents for equally long: quality, images per second, memory.

The latents are those of the Haar wavelet, which needs no download and loses nothing: what differs is the space alone.
Both networks have about as many parameters. The time of a step is measured first, on a machine that should do nothing
else, and says how many steps each is trained for. Runs that exist already are not trained again.
"""

import json
import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.cli.parts import build_flow, open_pictures
from rectified_flow.cli.train import train_rectified_flow
from rectified_flow.cli.train_flags import TrainRectifiedFlow
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flags import command_line, parse
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import load_flow
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.training.costs import gradient_time

NETWORKS: dict[str, dict[int, dict[str, Any]]] = {
    "pixels": {128: {"dim": 16, "dim_mults": (1, 2, 4, 4)}, 256: {"dim": 16, "dim_mults": (1, 1, 2, 4, 4)}},
    "haar": {128: {"dim": 32, "dim_mults": (1, 2, 2), "autoencoder": "haar"}},
}
"""Flags by side of the pictures [px]; others take that of the next smaller side, or of the first."""


BATCH_SIZE, TURNS = 8, 5


@dataclass(frozen=True)
class Flags:
    data: str = "synthetic-flowers"
    """A value of --dataset, or a folder."""
    image_size: int = 256
    """Side of the pictures [px]."""
    minutes: float = 15
    """Time of one thread for the losses and gradients of each training [minutes], as measured before."""
    num_samples: int = 250
    """Generated pictures per distance."""
    steps: int = 4
    """Intervals per picture, of two network calls each."""
    output_dir: Path = Path("runs/latents")
    """Folder for runs, results and grids."""


def config_of(flags: Flags, space: str, steps: int = 1) -> TrainRectifiedFlow:
    """All flags of a run."""
    networks = NETWORKS[space]
    side = max((each for each in networks if each <= flags.image_size), default=min(networks))
    data: dict[str, Any] = {"dataset_path": flags.data} if Path(flags.data).exists() else {"dataset": flags.data}
    how = {"batch_size": BATCH_SIZE, "learning_rate": 1e-3, "lr_warmup_steps": 50, "ema_decay": 0.99, "dropout": 0.0}
    end = {"train_num_steps": steps, "num_samples": 0, "horizontal_flip": False, "log_every": 10}
    name = f"{Path(flags.data).name}-{flags.image_size}-{space}-{flags.minutes:g}min"
    out = {"output_dir": flags.output_dir / name, "image_size": flags.image_size}
    return parse(TrainRectifiedFlow, "", command_line({**networks[side], **data, **how, **end, **out}))


def measure_steps(flags: Flags) -> dict[str, float]:
    """Seconds that a step's loss and gradient take in each space, one thread, the spaces taking turns."""
    torch.set_num_threads(1)
    flows = {space: build_flow(config_of(flags, space), {}) for space in NETWORKS}
    seconds = {space: list[float]() for space in NETWORKS}
    for _ in range(TURNS):
        for space, flow in flows.items():
            item = {flow.space.key: flow.space.to_stored(torch.zeros(1, *(flow.space.shape or ())))}
            seconds[space].append(gradient_time(flow, item, BATCH_SIZE))
    return {space: median(each) for space, each in seconds.items()}


def train(flags: Flags, space: str, steps: int) -> dict[str, Any]:
    """Train for so many steps; returns what it took."""
    config = config_of(flags, space, steps)
    known = config.run.output_dir / "took.json"
    if known.exists():
        return dict(json.loads(known.read_text()))
    torch.set_num_threads(1)
    train_rectified_flow(config)
    parameters = sum(p.numel() for p in load_flow(config.run.output_dir, RectifiedFlow).parameters())
    took = {"parameters": parameters, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    known.write_text(json.dumps(took))
    return took


def evaluate(flags: Flags, space: str) -> dict[str, Any]:
    """Distances of a run's pictures to its training pictures, and a grid."""
    config = config_of(flags, space)
    known = config.run.output_dir / "evaluation.json"
    if known.exists():
        return dict(json.loads(known.read_text()))
    torch.set_num_threads(1)
    flow = load_flow(config.run.output_dir, RectifiedFlow)
    evaluator = Evaluator(
        open_pictures(config.data), "efficientnet_lite0", join_processes(), num_samples=flags.num_samples, batch_size=16
    )
    generated = evaluator.generate(flow, steps=flags.steps)
    with randomness.deterministic(randomness.Samples(0, range(16))):
        grid = to_grid(flow.space.render(flow.sample(16, steps=flags.steps)))
    write_picture(config.run.output_dir / "grid.png", grid)
    distances = evaluator.distances(generated)
    known.write_text(json.dumps(distances))
    return distances


def main(flags: Flags) -> None:
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    name = f"{Path(flags.data).name}-{flags.image_size}"
    measured = flags.output_dir / f"{name}.json"
    if not measured.exists():
        measured.write_text(json.dumps(measure_steps(flags)))
    seconds = json.loads(measured.read_text())
    steps = {space: round(60 * flags.minutes / each) for space, each in seconds.items()}
    rows = {}
    for space in NETWORKS:
        parts = []
        for work in (partial(train, steps=steps[space]), evaluate):  # in a process of its own: its memory is measured
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                parts.append(pool.submit(work, flags, space).result())
        rows[space] = parts[0] | parts[1]
    print(
        f"{Path(flags.data).name}, {flags.image_size} px, {flags.minutes:g} minutes of one thread, batches of "
        f"{BATCH_SIZE}, {flags.num_samples} pictures in {2 * flags.steps} calls; torch {torch.__version__}\n"
    )
    print("| space | M parameters | images/s | images seen | memory [GB] | Fréchet | kernel |")
    print("|---|---|---|---|---|---|---|")
    for space, row in rows.items():
        frechet, kernel = (row[f"efficientnet_lite0_{kind}_distance"] for kind in ("frechet", "kernel"))
        print(
            f"| {space} | {row['parameters'] / 1e6:.2f} | {BATCH_SIZE / seconds[space]:.2f} | "
            f"{BATCH_SIZE * steps[space]} | "
            f"{row['memory'] / 1e9:.2f} | {frechet:.1f} | {kernel:.3f} |"
        )
    grids = [np.asarray(Image.open(config_of(flags, space).run.output_dir / "grid.png")) for space in NETWORKS]
    gap = np.full((len(grids[0]), 12, 3), 255, np.uint8)
    beside = np.concatenate([grids[0], gap, grids[1]], axis=1)
    print(write_picture(flags.output_dir / f"{name}.png", beside))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
