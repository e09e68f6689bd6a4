"""`make bench`: every measurement of speed, as one table, printed and written into benchmarks/README.md.

A table stays there until the same kind of machine measures again. Needs `pip install -e ".[benchmark]"`.
"""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_speed
import mean_flow
import ranks
import starting
import step_parts
import training_speed
from peer import PEER
from turns import Row, describe_machine, print_rows

RESULTS = Path(__file__).with_name("README.md")
GPUS = torch.cuda.device_count()
# A GPU is done with what keeps a CPU busy for seconds before its clock has risen.
TRAINING = training_speed.Flags(image_sizes=(64, 128), steps=50, warm_up=30) if GPUS else training_speed.Flags()
MEAN_FLOW = mean_flow.Flags(image_size=64, batch_size=128, compile=True) if GPUS else mean_flow.Flags(rounds=5)
STEP = (
    step_parts.Flags(image_size=64, batch_size=64, mixed_precision="bf16", compile=True) if GPUS else step_parts.Flags()
)
RANKS = ranks.Flags(image_size=64, dim=64, batch_size=64, processes=GPUS, steps=50) if GPUS else ranks.Flags()
Part = Literal["training", "data", "starting", "mean_flow", "step", "ranks"]
PARTS: dict[Part, Callable[[], list[Row]]] = {
    "training": lambda: training_speed.measure_rows(TRAINING),
    "data": lambda: data_speed.measure_rows(data_speed.Flags()),
    "starting": lambda: starting.measure_rows(starting.Flags()),
    "mean_flow": lambda: mean_flow.measure_rows(MEAN_FLOW),
    "step": lambda: step_parts.measure_rows(STEP),
    "ranks": lambda: [] if GPUS == 1 else ranks.measure_rows(RANKS),
}
CLOCK = (
    "Wall time on the GPU, but processor time from the command to the first step"
    if GPUS
    else "Processor time of one thread, but wall time of a step's parts and of several processes"
)


@dataclass(frozen=True)
class Flags:
    parts: tuple[Part, ...] = get_args(Part)
    """Which measurements; only all of them together take the place of the table that is there."""


def write_table(machine: str, table: str, into: Path) -> None:
    """Put a machine's table in the place of its last one, or at the end."""
    head = f"## {machine}"
    section = f"{head}\n\n{table}\n"
    text = into.read_text()
    found = re.search(rf"^{re.escape(head)}\n(?:(?!## ).*\n)*", text, re.MULTILINE)
    after = text[found.end() :] if found else ""
    before = text[: found.start()] if found else f"{text}\n"
    into.write_text(before + section + ("\n" + after if after else ""))


def main(flags: Flags) -> None:
    rows = []
    for name in flags.parts:
        began = time.perf_counter()
        found = PARTS[name]()
        print(f"{name}, {(time.perf_counter() - began) / 60:.1f} minutes\n{print_rows(found)}\n", flush=True)
        rows += found
    versions = f"torch {torch.__version__}, {PEER} {version(PEER)}"
    how = f"`make bench`, {date.today()}; {versions}. {CLOCK}; medians, and the range of the rounds."
    table = f"{how}\n\n{print_rows(rows)}"
    print(f"{describe_machine()}\n\n{table}")
    if set(flags.parts) == set(PARTS):
        write_table(describe_machine(), table, RESULTS)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
