"""How are the weights of ``--init_from starter`` for latents made, and what does longer training gain?

    python -m studies.starter --state runs/starter --images 20000000 --minutes 60

Store the pictures with ``python -m studies.starter_data`` first. Views of the pictures of ``MIXTURE`` are cut and
encoded once, and stay on the device. The training ends after ``--images`` images or after ``--minutes``, whichever
comes first. Start the same command again after a kill: the run resumes from its newest checkpoint. ``figures.json`` has
the loss on held-out pictures of each source at the end, and ``samples.png`` shows samples. ``scripts/make_starter.py``
turns the run into a starter.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.utils import save_image

from rectified_flow import RectifiedFlow, Small, Trainer, TrainingConfig, Unet, load_flow
from rectified_flow.flows.times import LogitNormal
from rectified_flow.latents.in_step import LatentsInStep
from rectified_flow.latents.space import Latents, scales_of
from rectified_flow.training.clock import Clock
from studies.starter_views import VIEW, Views

MIXTURE: Mapping[str, float] = {
    "openclipart": 0.15,
    "emoji": 0.1,
    "drawn": 0.07,
    "words": 0.02,
    "plasma": 0.03,
    "ukui": 0.01,
    "gnome": 0.01,
    "mate": 0.01,
    "land": 0.13,
    "things": 0.09,
    "budgie": 0.03,
    "kylin": 0.02,
    "samples": 0.01,
    "terrain": 0.03,
    "walls": 0.03,
    "tracks": 0.02,
    "skies": 0.01,
    "plants": 0.04,
    "renders": 0.15,
    "sprites": 0.04,
}
"""Share of the views of each source."""
BATCH, RATE, WEIGHT_DECAY, AVERAGED, WARMUP = 2048, 3e-3, 0.05, 0.04, 50
"""Images of a step, peak learning rate, decay of the weights, which keeps them small, and length of the average and of
the warm-up, the latter as a divisor of steps."""
AT_ONCE = 4096
"""Views that are cut at once."""
SCALED_VIEWS = 8192
"""Views from which the scale of the latents is measured."""
HELD_OUT_VIEWS = 256
"""Views of held-out pictures of each source for the figures."""
TIMES = 8
"""Times at which each of them is measured."""


@dataclass(frozen=True)
class Flags:
    """The network and the length of its training."""

    state: Path
    """Folder of ``sources`` and of the runs."""
    images: int = 20_000_000
    """Images of the training, with repeats."""
    minutes: float | None = None
    """Largest duration of the training by the clock; no limit if not given."""
    dim: int = 48
    """Channels of the first level of the network."""
    dim_mults: tuple[int, ...] = (1, 2)
    """Factors of the channels of each level."""
    without: tuple[str, ...] = ()
    """Sources to leave out."""
    views: int = 500_000
    """Views that are cut and encoded."""
    batch_size: int = BATCH
    """Images of a step."""
    compile: bool = False
    """Compile the loss, which takes more than a minute at the start."""
    seed: int = 0
    """Seed of weights, order and noise."""

    @property
    def network(self) -> dict[str, Any]:
        """Arguments of the network."""
        return {"dim": self.dim, "dim_mults": self.dim_mults, "attention_sides": (8,), "blocks_per_level": 1}

    @property
    def shares(self) -> dict[str, float]:
        """Share of the views of each source."""
        return {name: share for name, share in MIXTURE.items() if name not in self.without}

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        words = [f"{self.dim}", *map(str, self.dim_mults), f"{self.images}", *(f"no-{name}" for name in self.without)]
        others = {"minutes": self.minutes, "views": self.views, "batch": self.batch_size, "seed": self.seed}
        words += [f"{name}{value}" for name, value in others.items() if value is not None]
        return self.state / "runs" / "-".join(words)


class Encoded(Dataset[Any]):
    """Latents of views, ``latents`` as float16 ``[b, 1, 1, 8, 16, 16]``, on the device of the views.

    Args:
        views: the views.
        count: number of latents.
    """

    def __init__(self, views: Views, count: int) -> None:
        space, numbers = LatentsInStep(Small(), VIEW), range(count)
        parts = [numbers[first : first + AT_ONCE] for first in range(0, count, AT_ONCE)]
        self.latents = torch.cat([space.latents_of(views.read_batch(part)["images"]).half() for part in parts])
        self.fingerprint = f"{count} of {views.fingerprint}"

    def __len__(self) -> int:
        return len(self.latents)

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the latents of some views."""
        return {"latents": self.latents[torch.tensor(indices, device=self.latents.device)]}

    def scales(self) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel."""
        some = self.latents[:SCALED_VIEWS, 0, 0].double()
        return scales_of(*(some.pow(power).mean(dim=(0, 2, 3)).tolist() for power in (1, 2)))


def build_flow(flags: Flags, data: Encoded) -> RectifiedFlow:
    """Return the flow with the weights of the seed, and with the scale of the latents of the data."""
    set_seed(flags.seed)
    mean, std = data.scales()
    space = Latents(Small(), VIEW, mean=mean, std=std)
    channels, side, _ = space.shape or ()
    network = Unet(**flags.network, channels=channels, image_size=side)
    return RectifiedFlow(network, space=space, time_distribution=LogitNormal(stratified=True))


def train(flags: Flags) -> None:
    """Train to the end of the images or of the time."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Encoded(Views(flags.state / "sources", flags.shares, device), flags.views)
    steps = flags.images // flags.batch_size
    config = TrainingConfig(
        output_dir=flags.folder,
        train_num_steps=steps,
        batch_size=flags.batch_size,
        optimizer=("muon", f"weight_decay={WEIGHT_DECAY}"),
        learning_rate=RATE,
        lr_decay="cosine",
        lr_warmup_steps=max(10, steps // WARMUP),
        ema_decay=1 - 1 / max(10.0, AVERAGED * steps),
        compile=flags.compile,
        num_samples=0,
        save_every=max(1, steps // 10),
        keep_checkpoints=1,
        log_every=max(1, steps // 200),
        seed=flags.seed,
    )
    recorded = {
        "network": ["Unet", "blocks_per_level=1", "attention_sides=[8]"],
        "dim": flags.dim,
        "dim_mults": list(flags.dim_mults),
        "dropout": 0.0,
        "prediction": "velocity",
        "autoencoder": ["small"],
    }  # what scripts/make_starter.py and --init_from read
    known = None if flags.minutes is None else Clock.resumed(flags.folder, began=began)
    clock = None if flags.minutes is None else known or Clock(60 * flags.minutes, steps, began=began)
    trainer = Trainer(build_flow(flags, data), data, config, flags=recorded, clock=clock)
    if not trainer.train():
        raise SystemExit(f"{flags.folder} was asked to stop, and is saved")


@torch.no_grad()
def measure(flags: Flags) -> None:
    """Write the loss on held-out pictures of each source, and a picture of samples."""
    flow = load_flow(flags.folder).eval()
    assert isinstance(flow, RectifiedFlow)  # train built it
    figures = {}
    for name in flags.shares:
        with suppress(ValueError):  # no picture of the source is held out
            views = Views(flags.state / "sources", {name: 1.0}, torch.device("cpu"), held_out=True)
            x = flow.space.encode(Encoded(views, HELD_OUT_VIEWS).latents.float())
            figures[name] = loss_of(flow, x, torch.Generator().manual_seed(0))
    (flags.folder / "figures.json").write_text(json.dumps(figures, indent=1))
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
    """Train, and measure."""
    flags = tyro.cli(Flags, prog="python -m studies.starter", description=__doc__, use_underscores=True)
    if not (flags.folder / "figures.json").exists():
        train(flags)
        measure(flags)


if __name__ == "__main__":
    main()
