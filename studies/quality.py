"""How near do samples of 16 calls come to the data after equal processor time, here and in rectified-flow-pytorch?"""

import sys
from functools import partial

from rectified_flow import Pixels, RectifiedFlow, Unet
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.peer import PEER, PeerFlow, measure_peer, train_peer
from studies.training import load_trained, measure_samples, open_pictures, train_flow

STEPS = 8
"""Midpoint steps, of two network calls each."""
PEER_DIM = 16
"""Width of the peer's Unet, which then has 2.29 M parameters; the Unet of this study has 2.14 M."""


def train_ours(row: Row) -> None:
    """Train with the flags of a short run; for images of twice the side, the network has one level more."""
    size = row.image_size
    mults = (1, 2, 3) if size <= 32 else (1, 1, 2, 3)
    network = Unet(32, mults, image_size=size, attention_sides=(8,), blocks_per_level=1, dropout=0)
    flow = RectifiedFlow(network, space=Pixels((3, size, size)))
    train_flow(row, flow, open_pictures(row.data, size), minutes=row.budget)


def measure_ours(row: Row) -> Figures:
    """Return the figures with averaged weights."""
    return measure_samples(row, load_trained(row), {"averaged weights": {"steps": STEPS}})


STUDY = Study(
    __doc__ or "",
    {
        "here": Case("nearer at every budget", train_ours, measure_ours),
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
