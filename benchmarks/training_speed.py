"""Images per second through the whole training loop, of this project and of rectified-flow-pytorch, in turns.

Both train on the same folder of JPEG files with their own Trainers, launched as a user would launch them. The time
includes data loading, the step, the weight average, and printing and logging, which the peer does at each step. It
includes no previews and no checkpoints. On a CPU, both have about as many parameters and the same batch size. On a GPU,
each has its defaults; the peer also runs a second time, with everything that speeds it up without changes to its code.
Needs `pip install -e ".[benchmark]"`.
"""

import contextlib
import io
import math
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import PEER, Contender, Row, Times, Turns, ratio, take_turns

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.data import build_space, data_of
from rectified_flow.cli.training_flags import DataConfig, NetworkConfig, TrainConfig
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.distributed import join_processes
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.training.trainer import Trainer

PEER_TUNED = f"{PEER}, decoded images, batch 128, bf16"
PHOTOGRAPH = (667, 500)
NEVER = 10**9


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    image_sizes: tuple[int, ...] = (32, 64)
    """Sides of the images [px]."""
    dim: int = 40
    """Channels of this project's Unet at full resolution."""
    peer_dim: int = 32
    """Channels of the peer's Unet, chosen so that it has no more parameters."""
    batch_size: int = 16
    """Images per step, for both; the peer's default."""
    rounds: int = 5
    """Number of timed rounds per contender."""
    steps: int = 2
    """Training steps per round."""
    warm_up: int = 1
    """Training steps before the first round."""
    pictures: int = 256
    """Number of JPEG files to train on."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""


def write_photographs(folder: Path, count: int) -> None:
    """Write synthetic flowers as JPEG files, in the size of most images of Oxford Flowers."""
    side = max(PHOTOGRAPH)
    flowers = SyntheticFlowers(side, count=count)
    grain = np.random.default_rng(0).normal(0, 6, (side, side, 3))  # no photograph is as smooth as a drawing
    for index in range(count):
        picture = np.clip(np.asarray(flowers.load(index)[0]) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(picture).crop((0, 0, *PHOTOGRAPH)).save(folder / f"{index:05d}.jpg", quality=90)


def train_ours(values: TrainConfig, turns: Turns) -> None:
    """Train with this project's Trainer, a round of steps at a time."""
    join_processes()
    flow = build_flow(values, {}, build_space(values.data))
    trainer = Trainer(flow, data_of(values.data, values.source, values.columns).open(), values.run)
    turns.facts["parameters"] = sum(parameter.numel() for parameter in flow.parameters())
    take, images = trainer.stepper.take, trainer.batch.total

    def take_in_turns(batches: Any) -> None:
        take(batches)
        turns.done(images)

    trainer.stepper.take = take_in_turns  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()


@dataclass(frozen=True)
class PeerSetup:
    """Settings of the peer's Trainer; all others keep the peer's defaults."""

    photographs: Path
    image_size: int
    dim: int
    batch_size: int = 16
    decoded: bool = False
    """Train on images that are decoded in advance."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of its Accelerator."""


def train_peer(setup: PeerSetup, turns: Turns) -> None:
    """Train with the peer's Trainer, a round of steps at a time."""
    from rectified_flow_pytorch import ImageDataset, RectifiedFlow, Unet
    from rectified_flow_pytorch import Trainer as PeerTrainer

    size = setup.image_size
    pictures = ImageDataset(setup.photographs, image_size=size, augment_horizontal_flip=True)
    flow = RectifiedFlow(Unet(dim=setup.dim), data_shape=(3, size, size))
    turns.facts["parameters"] = sum(parameter.numel() for parameter in flow.parameters())
    with tempfile.TemporaryDirectory() as folder:
        trainer = PeerTrainer(
            flow,
            dataset=[pictures[i] for i in range(len(pictures))] if setup.decoded else pictures,
            batch_size=setup.batch_size,
            num_train_steps=NEVER,
            save_results_every=NEVER,
            checkpoint_every=NEVER,
            checkpoints_folder=folder,
            results_folder=folder,
            accelerate_kwargs={"cpu": not torch.cuda.is_available()} | setup.settings,
        )
        update = trainer.ema_model.update

        def update_in_turns() -> None:
            update()
            turns.done(setup.batch_size)

        trainer.ema_model.update = update_in_turns
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line per step
            trainer()


def build_contenders(flags: Flags, image_size: int, folder: Path) -> dict[str, Contender]:
    """Return the contenders by name; this project's are named by their precision."""
    photographs = folder / "photographs"
    data = DataConfig(dataset_path=photographs, image_size=image_size, cache_dir=folder / "cache")
    never = TrainingConfig(train_num_steps=NEVER, num_samples=0, save_every=0, resume="never")

    def ours(precision: Literal["no", "bf16"], network: NetworkConfig, **settings: Any) -> Contender:
        output_dir = Path(tempfile.mkdtemp(dir=folder))
        run = replace(never, mixed_precision=precision, output_dir=output_dir, **settings)
        return partial(train_ours, TrainConfig(data, network, run=run))

    if torch.cuda.is_available():
        shipped = PeerSetup(photographs, image_size, dim=64)
        tuned = replace(shipped, batch_size=128, decoded=True, settings={"mixed_precision": "bf16"})
        return {
            PEER: partial(train_peer, shipped),
            PEER_TUNED: partial(train_peer, tuned),
            "bf16, compiled": ours("bf16", NetworkConfig(), compile=True),
            "bf16": ours("bf16", NetworkConfig()),
        }
    small = NetworkConfig(dim=flags.dim)
    contenders: dict[str, Contender] = {
        PEER: partial(train_peer, PeerSetup(photographs, image_size, flags.peer_dim, flags.batch_size)),
        "float32": ours("no", small, batch_size=flags.batch_size),
    }
    if compare_bf16() < SLOW_BF16:
        contenders["bf16"] = ours("bf16", small, batch_size=flags.batch_size)
    return contenders


SLOW_BF16 = 2.0
"""Time of bf16 in times of float32 from which on bf16 is left out: a step in it could take minutes."""


def compare_bf16() -> float:
    """Return the time of a convolution, a matrix product and their gradients on the CPU in bf16, in float32's times."""
    seconds = {dtype: min(_probe(dtype) for _ in range(3)) for dtype in (torch.float32, torch.bfloat16)}
    return seconds[torch.bfloat16] / seconds[torch.float32]


def _probe(dtype: torch.dtype) -> float:
    x = torch.randn(8, 32, 16, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(32, 32, 3, 3, dtype=dtype, requires_grad=True)
    matrix = torch.randn(256, 256, dtype=dtype, requires_grad=True)
    began = time.process_time()
    (F.conv2d(x, weight, padding=1).float().sum() + (matrix @ matrix).float().sum()).backward()
    return time.process_time() - began


AIMS = {
    (PEER, "float32"): ">= 1.5",
    (PEER, "bf16"): ">= 2.5",
    (PEER, "bf16, compiled"): ">= 15",
    (PEER_TUNED, "bf16, compiled"): ">= 3",
}


def measure_size(flags: Flags, image_size: int, folder: Path) -> list[Row]:
    """Return the rows of one image size."""
    times = take_turns(
        build_contenders(flags, image_size, folder),
        rounds=flags.rounds,
        pieces=flags.steps,
        warm_up=flags.warm_up,
        minutes=flags.minutes / len(flags.image_sizes),
    )
    peers = [name for name in times if name in (PEER, PEER_TUNED)]
    rows = []
    for name in (each for each in times if each not in peers):
        what = f"training images/s, whole loop, {image_size} px, {name}"
        for peer in peers:
            speeds = f"{_speed(times[name])} and {_speed(times[peer])}"
            rows.append(Row(what, peer, AIMS.get((peer, name), ""), str(ratio(times[peer], times[name])), speeds))
    return rows


def _speed(times: Times) -> str:
    return f"{1 / times.median:,.1f} img/s ({times.facts['parameters'] / 1e6:.1f} M)"


def measure_rows(flags: Flags) -> list[Row]:
    """Return the rows of all image sizes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photographs").mkdir()
        write_photographs(folder / "photographs", flags.pictures)
        rows = [row for image_size in flags.image_sizes for row in measure_size(flags, image_size, folder)]
    slowness = 0.0 if torch.cuda.is_available() else compare_bf16()
    if slowness >= SLOW_BF16:
        reason = f"left out: bf16 takes {slowness:.1f} times as long as float32 on this processor"
        rows.append(Row("training images/s, whole loop, bf16", PEER, AIMS[PEER, "bf16"], "not measured", reason))
    return rows
