"""Start-up: processor time from the command to the end of the first training step, of train_oxford.py and of the peer.

This project's images are decoded in advance; the peer decodes one batch. Each program exits after its first step. Needs
`pip install -e ".[benchmark]"`.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from training_speed import write_photographs
from turns import PEER, Row, Times, describe_machine, is_over, print_rows, ratio

PROJECT = Path(__file__).resolve().parent.parent
OURS = """
import os, runpy, sys
from rectified_flow.training.stepper import Stepper
take = Stepper.take
def take_one(*arguments):
    take(*arguments)
    os._exit(0)
Stepper.take = take_one
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PEERS = """
import os, sys
from rectified_flow_pytorch import ImageDataset, RectifiedFlow, Trainer, Unet
pictures, size, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
places = {"checkpoints_folder": folder, "results_folder": folder}
flow = RectifiedFlow(Unet(dim=int(sys.argv[4])))
trainer = Trainer(flow, dataset=ImageDataset(pictures, image_size=size), batch_size=int(sys.argv[5]), **places)
trainer.ema_model.update = lambda: os._exit(0)
trainer()
"""


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    image_size: int = 32
    """Side of the images [px]."""
    dim: int = 20
    """Channels of this project's Unet at full resolution."""
    peer_dim: int = 16
    """Channels of the peer's Unet, chosen so that it has no more parameters."""
    batch_size: int = 16
    """Images per step."""
    rounds: int = 5
    """Number of launches of each program."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""


def processor_time(script: str, arguments: list[str]) -> float:
    """Processor time of a Python script, user and system together [s]."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.argv = {arguments!r}\n{script}"],
            stdout=said,
            stderr=said,
            cwd=PROJECT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        _, status, used = os.wait4(process.pid, 0)
        if status != 0:
            said.seek(0)
            raise RuntimeError(f"{arguments[0]} failed:\n{said.read().decode()}")
    return used.ru_utime + used.ru_stime


def measure_rows(flags: Flags) -> list[Row]:
    """Measure both programs in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photographs = folder / "photographs"
        photographs.mkdir()
        write_photographs(photographs, flags.batch_size)
        sizes = {"image_size": flags.image_size, "dim": flags.dim, "batch_size": flags.batch_size}
        ours = ["train_oxford.py", "--dataset_path", str(photographs), "--cache_dir", str(folder / "cache")]
        ours += ["--output_dir", str(folder / "run"), "--resume", "never"]
        ours += [part for flag, value in sizes.items() for part in (f"--{flag}", str(value))]
        peers = ["peer", str(photographs), str(flags.image_size), str(folder), str(flags.peer_dim)]
        peers += [str(flags.batch_size)]
        planned, ours = ours, [*ours, "--train_num_steps", "1000"]
        processor_time(OURS, ours)  # decodes the images
        seconds: dict[str, list[float]] = {"ours": [], "planned": [], PEER: []}
        began = time.monotonic()
        for round_ in range(flags.rounds):
            if is_over(began, flags.minutes) and round_ > 0:
                break
            seconds["ours"].append(processor_time(OURS, ours))
            seconds["planned"].append(processor_time(OURS, planned))
            seconds[PEER].append(processor_time(PEERS, peers))
    mine, planned_, theirs = (Times(of, {}) for of in seconds.values())
    rows = []
    for name, aim, own in (("with --train_num_steps", "<= 1", mine), ("with the plan of an hour", "", planned_)):
        remark = f"{own.median:.1f} s and {theirs.median:.1f} s of processor time"
        what = f"start-up, from the command to the first step, {name}"
        rows.append(Row(what, PEER, aim, str(ratio(own, theirs)), remark))
    return rows


if __name__ == "__main__":
    given = tyro.cli(Flags, description=__doc__, use_underscores=True)
    print(describe_machine())
    print(print_rows(measure_rows(given)))
