"""Pixels or latents of the Haar wavelet: which draws nearer samples after equal time, and at what cost?

The wavelet needs no download and loses nothing, so that only the space differs. Both networks have about as many
parameters. ``memory`` is the peak memory of the training process [GB], ``speed`` images per second.
"""

import resource
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from rectified_flow import Haar, Pixels, RectifiedFlow, Unet, encode_pictures
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import load_trained, measure_samples, open_pictures, train_flow

RUN: Mapping[str, Any] = {"learning_rate": 1e-3, "lr_warmup_steps": 50, "ema_decay": 0.99}


def train(row: Row, latents: bool) -> None:
    """Train on pixels, or on the latents of the wavelet, which have a quarter of the side."""
    pictures, size = open_pictures(row.data, row.image_size), row.image_size
    if latents:
        data = encode_pictures(pictures, Haar(), mirrored=False)
        space = data.space_of(Haar())
        channels, height, _ = space.shape or ()
        network = Unet(32, (1, 2, 2), channels=channels, image_size=height, dropout=0.0)
        train_flow(row, RectifiedFlow(network, space=space), data, minutes=row.budget, **RUN)
    else:
        network = Unet(16, (1, 2, 4, 4) if size < 256 else (1, 1, 2, 4, 4), image_size=size, dropout=0.0)
        flow = RectifiedFlow(network, space=Pixels((3, size, size)))
        train_flow(row, flow, pictures, minutes=row.budget, **RUN)
    (row.folder / "memory").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9))


def measure(row: Row) -> Figures:
    """Return the figures of four midpoint steps, and the cost of the training."""
    [(way, figures)] = measure_samples(row, load_trained(row), {"8 calls": {"steps": 4}}).items()
    trained, memory = row.trained or {}, float((row.folder / "memory").read_text())
    speed = trained["images"] / max(1e-9, trained["seconds"])
    return {way: {**figures, "memory": memory, "speed": speed}}


STUDY = Study(
    __doc__ or "",
    {
        "pixels": Case("the reference", partial(train, latents=False), measure),
        "haar": Case("several times the images per second", partial(train, latents=True), measure),
    },
    Flags(image_size=128, budget=(12.0,), num_samples=500, figures=("speed", "memory", "frechet", "kernel")),
)

if __name__ == "__main__":
    sys.exit(run("studies.latents"))
