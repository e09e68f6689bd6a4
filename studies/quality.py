"""How near do samples of 16 calls come to the data after equal processor time, here and in rectified-flow-pytorch?

The case ``budget`` runs the training program, whose ``--budget`` is wall time: it needs an idle core.
"""

import sys
from functools import partial

from rectified_flow import Pixels, RectifiedFlow
from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.train import train
from rectified_flow.flags import command_line, flags_in, parse
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

STEPS = 8
"""Midpoint steps, of two network calls each."""
PEER_DIM = 16
"""Width of the peer's Unet, which then has 2.29 M parameters; the Unet of this study has 2.14 M."""


def train_ours(row: Row) -> None:
    """Train with the flags of a short run."""
    size = row.image_size
    flow = RectifiedFlow(build_unet(size, dim=32), space=Pixels((3, size, size)))
    train_flow(row, flow, open_pictures(row.data, size), minutes=row.budget)


def train_by_program(row: Row) -> None:
    """Train with the settings that the program chooses for the budget; an interrupted run resumes.

    Raises:
        RuntimeError: if the run was asked to stop; it is saved.
    """
    folder, run = find_folder(row.data), row.folder / "run"
    data = {"dataset": row.data} if folder is None else {"dataset_path": folder}
    flags = {"image_size": row.image_size, "budget": f"{60 * row.budget:g}s", "seed": row.seed, "output_dir": run}
    if not train(parse(TrainConfig, "", command_line({**data, **flags}))):
        raise RuntimeError(f"{row.folder} was interrupted, and its checkpoint is saved")
    chosen = flags_in(read_config(run / "config.json"))
    write_trained(row, chosen["train_num_steps"] * chosen["global_batch_size"], 60 * row.budget)


def measure_ours(row: Row) -> Figures:
    """Return the figures with averaged weights."""
    return measure_samples(row, load_trained(row), {"averaged weights": {"steps": STEPS}})


STUDY = Study(
    __doc__ or "",
    {
        "here": Case("nearer at every budget, with the settings of a short run", train_ours, measure_ours),
        "budget": Case("nearer than `here`, as the settings are chosen for the budget", train_by_program, measure_ours),
        PEER: Case(
            "behind: its defaults (batch 16, learning rate 3e-4) are for long runs; its average has not caught up",
            partial(train_peer, kind=PeerFlow, dim=PEER_DIM),
            partial(measure_peer, kind=PeerFlow, dim=PEER_DIM, steps=(STEPS,)),
        ),
    },
    Flags(data=("synthetic-flowers", "fluent-emoji"), seeds=(0, 1)),
)

if __name__ == "__main__":
    sys.exit(run("studies.quality"))
