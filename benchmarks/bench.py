"""`make bench`: run every speed benchmark, print one table and write it to benchmarks/README.md.

A new table replaces the previous one of the same kind of machine. Needs `pip install -e ".[benchmark]"`.
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

from turns import Row, describe_machine, print_rows

RESULTS = Path(__file__).with_name("README.md")
GPUS = torch.cuda.device_count()
# GPUs get larger workloads: a GPU finishes the CPU's workloads before its clock has ramped up.
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
    "Wall time on the GPU, but processor time for the start-up"
    if GPUS
    else "Processor time of one thread, but wall time for the parts of a step and for several processes"
)


@dataclass(frozen=True)
class Flags:
    parts: tuple[Part, ...] = get_args(Part)
    """Benchmarks to run. Only a run of all of them replaces the existing table."""


def write_table(machine: str, table: str, into: Path) -> None:
    """Replace the machine's previous table, or append the new one."""
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
    how = f"`make bench`, {date.today()}; {versions}. {CLOCK}. Medians, with the range over rounds."
    table = f"{how}\n\n{print_rows(rows)}"
    print(f"{describe_machine()}\n\n{table}")
    if set(flags.parts) == set(PARTS):
        write_table(describe_machine(), table, RESULTS)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
