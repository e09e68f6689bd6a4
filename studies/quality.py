"""How near do samples of 16 calls come to the data after equal processor time, here and in rectified-flow-pytorch?

The cases ``budget`` run the training program, whose ``--budget`` is wall time: they need an idle core. The cases
``budget, SIDE px`` train at that side, and their samples are enlarged to ``--image_size`` (Lanczos) for the comparison:

    python -m studies.quality --image_size 128 --only "budget, *" --budget 4 12 --num_samples 500 --data FOLDER
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import pil_to_tensor, resize, to_pil_image

from rectified_flow import Evaluator, Pixels, RectifiedFlow
from rectified_flow.cli.settings import command_line, read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.runs.folder import read_config
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.peer import PEER, PeerFlow, measure_peer, train_peer
from studies.training import (
    build_unet,
    find_folder,
    load_trained,
    measure_samples,
    open_pictures,
    train_flow,
    write_trained,
)

STEPS, PEER_STEPS = 16, 8
"""Steps of one network call each by the default solver, and the peer's midpoint steps of two calls each."""
PEER_DIM = 16
"""Width of the peer's Unet, which then has 2.29 M parameters; the Unet of this study has 2.14 M."""


def train_ours(row: Row) -> None:
    """Train with the flags of a short run."""
    size = row.image_size
    flow = RectifiedFlow(build_unet(size, dim=32), space=Pixels((3, size, size)))
    train_flow(row, flow, open_pictures(row.data, size), minutes=row.budget)


def train_by_program(row: Row, **chosen: Any) -> None:
    """Train with the settings that the program chooses for the budget; an interrupted run resumes.

    Args:
        row: the row.
        chosen: flags to pass beside ``--budget``.

    Raises:
        RuntimeError: if the run was asked to stop; it is saved.
    """
    folder, run = find_folder(row.data), row.folder / "run"
    data = {"dataset": row.data} if folder is None else {"dataset_path": folder}
    flags = {"image_size": row.image_size, "budget": f"{60 * row.budget:g}s", "seed": row.seed, "output_dir": run}
    flags |= chosen
    if not train(read_settings(TrainConfig, "", command_line({**data, **flags}))):
        raise RuntimeError(f"{row.folder} was interrupted, and its checkpoint is saved")
    planned = read_config(run / "config.json")["training"]
    write_trained(row, planned["train_num_steps"] * planned["global_batch_size"], 60 * row.budget)


def measure_ours(row: Row) -> Figures:
    """Return the figures with averaged weights."""
    return measure_samples(row, load_trained(row), {"averaged weights": {"steps": STEPS}})


class EnlargingEvaluator(Evaluator):
    """An evaluator that resizes samples to the side of the dataset before the comparison."""

    def sampled(self, flow: Any, numbers: Sequence[int], **how: Any) -> Iterator[Tensor]:
        """Generate samples, and yield batches of them, resized to the side of the dataset."""
        for pictures in super().sampled(flow, numbers, **how):
            yield torch.stack([self._enlarge(each) for each in pictures])

    def _enlarge(self, picture: Tensor) -> Tensor:
        return pil_to_tensor(resize(to_pil_image(picture), [self.dataset.info.image_size], InterpolationMode.LANCZOS))


def measure_enlarged(row: Row) -> Figures:
    """Return the figures of samples by averaged weights, resized to the side of the row."""
    ways = {"averaged weights": {"steps": STEPS}}
    return measure_samples(row, load_trained(row), ways, evaluator_class=EnlargingEvaluator)


SIDES: dict[int, dict[str, Any]] = {32: {}, 64: {}, 128: {"autoencoder": ("small",)}}
"""Further flags of the training program by the side [px] at which it trains."""


STUDY = Study(
    __doc__ or "",
    {
        "here": Case("nearer at every budget, with the settings of a short run", train_ours, measure_ours),
        "budget": Case("nearer than `here`, as the settings are chosen for the budget", train_by_program, measure_ours),
        **{
            f"budget, {side} px": Case(
                "the latents of 128 px are nearest: photographs in 12 minutes, and emoji in an hour (docs/latents.md)",
                partial(train_by_program, image_size=side, **flags),
                measure_enlarged,
            )
            for side, flags in SIDES.items()
        },
        PEER: Case(
            "behind: its defaults (batch 16, learning rate 3e-4) are for long runs; its average has not caught up",
            partial(train_peer, kind=PeerFlow, dim=PEER_DIM),
            partial(measure_peer, kind=PeerFlow, dim=PEER_DIM, steps=(PEER_STEPS,)),
        ),
    },
    Flags(data=("synthetic-flowers", "fluent-emoji"), seeds=(0, 1)),
)

if __name__ == "__main__":
    sys.exit(run("studies.quality"))
