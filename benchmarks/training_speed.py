"""Images a second through the whole training loop, this project's and rectified-flow-pytorch's, in turns.

Both train on the same folder of JPEG files with their own Trainers as a user starts them: data, step, average, logging.
Previews and checkpoints are left out of both. Needs `pip install -e ".[benchmark]"`.
"""

import contextlib
import io
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import Row, Times, Turns, describe_machine, print_rows, ratio, take_turns

from rectified_flow import RectifiedFlowConfig, Trainer, open_dataset
from rectified_flow.data.synthetic_flowers import SyntheticFlowers
from rectified_flow.processes.joining import join_processes
from train_oxford import build_flow

PEER = "rectified-flow-pytorch"
PHOTOGRAPH = (667, 500)
NEVER = 10**9


@dataclass(frozen=True)
class Flags:
    image_sizes: tuple[int, ...] = (32, 64)
    """Sides of the images [px]."""
    dim: int = 32
    """Channels of this project's Unet at full resolution."""
    peer_dim: int = 32
    """Channels of the peer's, for about as many parameters."""
    batch_size: int = 16
    """Images a step, of both; what the peer is shipped with."""
    rounds: int = 5
    """How often each has its turn."""
    steps: int = 2
    """Training steps in a turn."""
    pictures: int = 256
    """JPEG files to train on."""


def write_photographs(folder: Path, count: int) -> None:
    """Drawn flowers as JPEG files of the size that most of Oxford Flowers have."""
    side = max(PHOTOGRAPH)
    flowers = SyntheticFlowers(side, count=count)
    grain = np.random.default_rng(0).normal(0, 6, (side, side, 3))  # no photograph is as smooth as a drawing
    for index in range(count):
        picture = np.clip(np.asarray(flowers.load(index)[0]) + grain, 0, 255).astype(np.uint8)
        Image.fromarray(picture).crop((0, 0, *PHOTOGRAPH)).save(folder / f"{index:05d}.jpg", quality=90)


def train_ours(config: RectifiedFlowConfig, turns: Turns) -> None:
    """This project's Trainer, a turn of some steps at a time."""
    join_processes()
    pictures = open_dataset("", config.dataset_path, image_size=config.image_size, cache_dir=config.cache_dir)
    flow = build_flow(config, ())
    turns.facts["parameters"] = sum(parameter.numel() for parameter in flow.parameters())
    trainer = Trainer(flow, pictures, config)
    take, images = trainer.stepper.take, trainer.batch.total

    def take_in_turns(batches: Any) -> None:
        take(batches)
        turns.done(images)

    trainer.stepper.take = take_in_turns  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()


@dataclass(frozen=True)
class PeerSetup:
    """The peer's Trainer; what is not said here is as it is shipped."""

    photographs: Path
    image_size: int
    dim: int
    batch_size: int = 16
    decoded: bool = False
    """Give it pictures that are decoded already."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of its Accelerator."""


def train_peer(setup: PeerSetup, turns: Turns) -> None:
    """The peer's Trainer, a turn of some steps at a time."""
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
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line a step
            trainer()


def measure(flags: Flags, image_size: int, folder: Path) -> dict[str, Times]:
    """Seconds an image, of every side."""
    photographs = folder / "photographs"
    base = RectifiedFlowConfig(
        dataset_path=photographs,
        image_size=image_size,
        dim=flags.dim,
        batch_size=flags.batch_size,
        train_num_steps=NEVER,
        num_samples=0,
        save_every=0,
        resume="never",
        cache_dir=folder / "cache",
    )

    def ours(name: str, **settings: Any) -> Any:
        return partial(train_ours, replace(base, output_dir=folder / f"{name} {image_size}", **settings))

    return take_turns(
        {
            PEER: partial(train_peer, PeerSetup(photographs, image_size, flags.peer_dim, flags.batch_size)),
            "float32": ours("float32", mixed_precision="no"),
            "bf16": ours("bf16", mixed_precision="bf16"),
        },
        rounds=flags.rounds,
        pieces=flags.steps,
    )


def measure_rows(flags: Flags) -> list[Row]:
    """A row for each size and precision."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photographs").mkdir()
        write_photographs(folder / "photographs", flags.pictures)
        for image_size in flags.image_sizes:
            times = measure(flags, image_size, folder)
            for precision, aim in (("float32", ">= 1.5"), ("bf16", ">= 2.5")):
                what = f"training images/s, whole loop, {image_size} px, {precision}"
                speeds = " and ".join(
                    f"{1 / each.median:.1f} img/s ({each.facts['parameters'] / 1e6:.1f} M)"
                    for each in (times[precision], times[PEER])
                )
                rows.append(Row(what, f"{PEER} as shipped", aim, str(ratio(times[PEER], times[precision])), speeds))
    return rows


if __name__ == "__main__":
    given = tyro.cli(Flags, description=__doc__, use_underscores=True)
    print(describe_machine())
    print(print_rows(measure_rows(given)))
