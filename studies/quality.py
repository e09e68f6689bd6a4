"""How near do samples of 16 calls come to the data after equal processor time, here and in rectified-flow-pytorch?

The training program plans by wall time, so its rows need a core that no other program uses.
"""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from rectified_flow import Pixels, RectifiedFlow, Unet
from rectified_flow.runs.checkpoint import CONFIG_FILE
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.peer import PEER, PeerFlow, measure_peer, train_peer
from studies.training import find_folder, load_trained, measure_samples, open_pictures, train_flow, write_trained

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


def train_by_program(row: Row) -> None:
    """Train with the program and the settings that it chooses for the budget; a run that was cut short resumes."""
    program = Path(__file__).resolve().parent.parent / "train_oxford.py"
    run, began = row.folder / "run", time.monotonic()
    folder = find_folder(row.data)
    data = ["--dataset", row.data] if folder is None else ["--dataset_path", folder]
    flags = ["--image_size", str(row.image_size), "--budget", f"{60 * row.budget:g}s", "--seed", str(row.seed)]
    subprocess.run([sys.executable, program, *data, *flags, "--output_dir", run], check=True, stdin=subprocess.DEVNULL)
    chosen = json.loads((run / CONFIG_FILE).read_text())["flags"]
    write_trained(row, chosen["train_num_steps"] * chosen["global_batch_size"], time.monotonic() - began)


def measure_ours(row: Row) -> Figures:
    """Return the figures with averaged weights."""
    return measure_samples(row, load_trained(row), {"averaged weights": {"steps": STEPS}})


STUDY = Study(
    __doc__ or "",
    {
        "here": Case("nearer at every budget, with the settings of a short run", train_ours, measure_ours),
        "--budget": Case("nearer still, as the program chooses the settings", train_by_program, measure_ours),
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
