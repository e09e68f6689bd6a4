"""Does a starter trained on more kinds of pictures suit more datasets? Four arms with equal training, one per run.

    python -m studies.starter --state runs/starter --arm b

Arm a has the kinds of pictures of the present starter; arm b adds photographs, arm c photographs and renders. Arm d
has the pictures of arm b, and begins with the weights of the present starter, which has seen 864,000 images. The
network, its settings and the number of images are the same in all arms, and so is their work; the processor time of
each arm is recorded.

Build the data with ``python -m studies.starter_data`` first. Start the same command again after a kill: the run
resumes from its newest checkpoint. While a file ``PAUSE`` is in the folder of the state, the run waits after its step,
and the wait costs no processor time. ``arms/NAME-IMAGES/progress.json`` has the state of a run, and ``figures.json``
beside it the loss on held-out pictures of each source, when the run has ended.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from accelerate.utils import set_seed
from numpy.random import default_rng
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.utils import save_image

from rectified_flow import Callback, RectifiedFlow, Small, Trainer, TrainingConfig, Unet, load_flow
from rectified_flow.cli.training_flags import STARTERS
from rectified_flow.flows.times import LogitNormal
from rectified_flow.latents.space import Latents
from rectified_flow.runs import checkpoint
from studies.starter_data import LATENTS, VIEW, wait_while_paused, write

Arm = Literal["a", "b", "c", "d"]
TODAY = {"openclipart": 0.45, "drawn": 0.28, "emoji": 0.155, "plasma": 0.07, "gnome": 0.035, "mate": 0.01}
"""Shares of the crops of the present starter, without six photographs of gnome-backgrounds 3.38."""
DRAWINGS = {"openclipart": 0.25, "composed": 0.2, "drawn": 0.18, "emoji": 0.2, "words": 0.03, "plasma": 0.08}
DRAWINGS |= {"ukui": 0.03, "gnome": 0.02, "mate": 0.01}
PHOTOGRAPHS = {"land": 0.75, "things": 0.25}
RENDERS = {"renders": 0.8, "sprites": 0.2}


def mixed(*parts: tuple[float, Mapping[str, float]]) -> dict[str, float]:
    """Return the shares of sources in a mixture of groups."""
    return {name: share * weight for share, group in parts for name, weight in group.items()}


ARMS: Mapping[Arm, Mapping[str, float]] = {
    "a": TODAY,
    "b": mixed((0.6, DRAWINGS), (0.4, PHOTOGRAPHS)),
    "c": mixed((0.4, DRAWINGS), (0.3, PHOTOGRAPHS), (0.3, RENDERS)),
    "d": mixed((0.6, DRAWINGS), (0.4, PHOTOGRAPHS)),
}
"""Shares of the sources in each arm."""
NETWORK: Mapping[str, Any] = {"dim": 48, "dim_mults": (1, 2), "attention_sides": (8,), "blocks_per_level": 1}
"""The network of the present starter."""
FLAGS: Mapping[str, Any] = {
    "network": ["Unet", "blocks_per_level=1", "attention_sides=[8]"],
    "dim": NETWORK["dim"],
    "dim_mults": list(NETWORK["dim_mults"]),
    "dropout": 0.0,
    "prediction": "velocity",
    "autoencoder": ["small"],
}
"""The flags of the same network, which scripts/make_starter.py and ``--init_from`` read from the run."""
BATCH, RATE, AVERAGED, WARMUP = 32, 2e-3, 0.05, 50
"""Images of a step, peak learning rate, length of the average and of the warm-up, the latter as a divisor of steps."""
SAVE_EVERY = 200
HELD_OUT_LATENTS = 256
"""Held-out latents of each source for the figures, at most."""
TIMES = 8
"""Times at which each of them is measured."""


@dataclass(frozen=True)
class Flags:
    """The arm of the study and the length of its training."""

    state: Path
    """Folder of ``data`` and ``arms``."""
    arm: Arm
    """Pictures to train on."""
    images: int = 280_000
    """Images of the training, with repeats."""
    seed: int = 0
    """Seed of weights, order and noise."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.state / "arms" / f"{self.arm}-{self.images}"


class Mixture(Dataset[Any]):
    """Latents of several sources, each with its share.

    Args:
        folder: the folder of the data.
        shares: shares of the sources.

    Raises:
        FileNotFoundError: if a source is not built.
    """

    def __init__(self, folder: Path, shares: Mapping[str, float]) -> None:
        self.parts = {name: np.load(folder / f"{name}-latents.npy", mmap_mode="r") for name in shares}
        counts = {name: training_rows(folder, name) for name in shares}
        # An epoch has each latent of the largest source, relative to its share, once.
        length = max(count / shares[name] for name, count in counts.items())
        rng = default_rng(0)
        self.rows = [
            (name, int(row))
            for name, share in shares.items()
            for row in repeated(counts[name], round(share * length), rng)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        name, row = self.rows[index]
        return {"latents": torch.from_numpy(self.parts[name][row].copy())[None, None]}


def repeated(count: int, length: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return ``length`` of ``count`` numbers, each of them equally often, up to one."""
    rounds = [rng.permutation(count) for _ in range(-(-length // count))]
    return np.concatenate(rounds)[:length]


def training_rows(folder: Path, name: str) -> int:
    """Return the number of latents of a source for training."""
    about = json.loads((folder / f"{name}.json").read_text())
    return about["training"] * about["views"]


def space_of(folder: Path) -> Latents:
    """Return the space of the latents, scaled by those of arm a in all arms, so that losses can be compared."""
    data = Mixture(folder, ARMS["a"])
    chosen = default_rng(0).permutation(len(data))[:8192]
    some = torch.stack([data[int(number)]["latents"][0, 0] for number in chosen]).float()
    mean, std = some.mean(dim=(0, 2, 3)), some.std(dim=(0, 2, 3))
    return Latents(Small(), VIEW, mean=[float(f"{m:.4g}") for m in mean], std=[float(f"{s:.4g}") for s in std])


class Progress(Callback):
    """Writes the state of a run down, counts its processor time, and waits while there is a file ``PAUSE``."""

    def __init__(self, flags: Flags) -> None:
        self.file, self.state = flags.folder / "progress.json", flags.state
        self.before, self.began = 0.0, time.process_time()

    def on_start(self, trainer: Trainer) -> None:
        """Restore the processor time of the checkpoint that the run resumes from."""
        if self.file.exists() and trainer.state.step:
            self.before = json.loads(self.file.read_text())["seconds"]
        self.began = time.process_time()

    def on_step(self, trainer: Trainer) -> None:
        """Wait while the run is paused."""
        wait_while_paused(self.state)

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write down how far the run is."""
        seconds = round(self.before + time.process_time() - self.began, 1)
        state = {"step": trainer.state.step, "of": trainer.total_steps, "images": trainer.state.images_seen}
        write(self.file, {**state, "seconds": seconds})


def train(flags: Flags) -> None:
    """Train an arm to its end."""
    flags.folder.mkdir(parents=True, exist_ok=True)
    data = Mixture(flags.state / "data", ARMS[flags.arm])
    set_seed(flags.seed)
    network = Unet(**NETWORK, channels=LATENTS[0], image_size=LATENTS[1])
    if flags.arm == "d":
        checkpoint.load_matching(network, checkpoint.resolve(STARTERS / "small"))  # a resumed run loads its checkpoint
    flow = RectifiedFlow(network, space=space_of(flags.state / "data"), time_distribution=LogitNormal(stratified=True))
    steps = flags.images // BATCH
    config = TrainingConfig(
        output_dir=flags.folder / "run",
        train_num_steps=steps,
        batch_size=BATCH,
        optimizer=("muon",),
        learning_rate=RATE,
        lr_decay="cosine",
        lr_warmup_steps=max(10, steps // WARMUP),
        ema_decay=1 - 1 / max(10.0, AVERAGED * steps),
        mixed_precision="no",
        num_samples=0,
        save_every=SAVE_EVERY,
        keep_checkpoints=1,
        log_every=50,
        num_workers=0,
        seed=flags.seed,
    )
    trainer = Trainer(flow, data, config, callbacks=[Progress(flags)], flags=FLAGS)
    if not trainer.train():
        raise SystemExit(f"{flags.folder} was asked to stop, and is saved")


@torch.no_grad()
def measure(flags: Flags) -> None:
    """Write the loss on held-out latents of all sources that are built, and a picture of samples."""
    flow = load_flow(flags.folder / "run").eval()
    assert isinstance(flow, RectifiedFlow)  # train built it
    generator, figures = torch.Generator().manual_seed(0), dict[str, float]()
    for about in sorted((flags.state / "data").glob("*-latents.npy")):
        name = about.name.removesuffix("-latents.npy")
        if not (flags.state / "data" / f"{name}.json").exists():
            continue
        latents = np.load(about, mmap_mode="r")[training_rows(flags.state / "data", name) :]
        if not len(latents):
            continue
        some = latents[:: max(1, len(latents) // HELD_OUT_LATENTS)].copy()
        x = flow.space.encode(torch.from_numpy(some)[:, None, None])
        figures[name] = loss_of(flow, x, generator)
    write(flags.folder / "figures.json", figures)
    set_seed(flags.seed)
    save_image(flow.sample(64, steps=16), flags.folder / "samples.png", nrow=8)


def loss_of(flow: RectifiedFlow, x: Tensor, generator: torch.Generator) -> float:
    """Return the mean squared error of the velocity at evenly spread times, for latents ``[n, 8, 16, 16]``."""
    errors = []
    for time_of in (torch.arange(TIMES) + 0.5) / TIMES:
        noise = torch.randn(x.shape, generator=generator)
        for clean, noisy in zip(x.split(64), noise.split(64), strict=True):
            predicted = flow.velocity((1 - time_of) * clean + time_of * noisy, time_of.expand(len(clean)))
            errors.append((predicted - (noisy - clean)).square().mean())
    return float(torch.stack(errors).mean())


def main() -> None:
    """Train an arm, and measure it."""
    flags = tyro.cli(Flags, prog="python -m studies.starter", description=__doc__, use_underscores=True)
    torch.set_num_threads(1)
    if not (flags.folder / "figures.json").exists():
        train(flags)
        measure(flags)


if __name__ == "__main__":
    main()
