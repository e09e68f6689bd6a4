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
ON_GPU = torch.cuda.is_available()
PARTS: dict[str, Callable[[], list[Row]]] = {
    "training": lambda: training_speed.measure_rows(training_speed.Flags()),
    "data": lambda: data_speed.measure_rows(data_speed.Flags()),
    "starting": lambda: starting.measure_rows(starting.Flags()),
    "mean flow": lambda: mean_flow.measure_rows(mean_flow.Flags(rounds=5, compile=ON_GPU)),
    "step": lambda: step_parts.measure_rows(step_parts.Flags()),
    "ranks": lambda: ranks.measure_rows(ranks.Flags()),
}


@dataclass(frozen=True)
class Flags:
    parts: tuple[str, ...] = tuple(PARTS)
    """Which measurements; all of them together take the place of the table that is there."""


def write_table(machine: str, table: str, into: Path) -> None:
    """Put a machine's table in the place of its last one, or at the end."""
    head = f"## {machine}"
    section = f"{head}\n\n{table}\n"
    text = into.read_text()
    found = re.search(rf"^{re.escape(head)}\n(?:(?!## ).*\n)*", text, re.MULTILINE)
    into.write_text(text[: found.start()] + section + text[found.end() :] if found else f"{text}\n{section}")


def main(flags: Flags) -> None:
    rows = []
    for name in flags.parts:
        began = time.perf_counter()
        rows += PARTS[name]()
        print(f"{name}: {(time.perf_counter() - began) / 60:.1f} minutes", file=sys.stderr, flush=True)
    setting = "wall time" if ON_GPU else "processor time of one thread, but wall time where processes are compared"
    versions = f"torch {torch.__version__}, {training_speed.PEER} {version(training_speed.PEER)}"
    how = f"`make bench`, {date.today()}; {versions}; {setting}; medians, and the range of the rounds."
    table = f"{how}\n\n{print_rows(rows)}"
    print(f"{describe_machine()}\n\n{table}")
    if set(flags.parts) == set(PARTS):
        write_table(describe_machine(), table, RESULTS)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
