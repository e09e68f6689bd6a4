"""`make bench`: run every speed benchmark, print one table and write it to benchmarks/README.md.

Each part has a limit of time, 12 minutes together on a CPU: rounds end early on a slow machine, and a part that has no
result by then is reported as not measured. A new table replaces the previous one of the same kind of machine. Needs
`pip install -e ".[benchmark]"`.
"""

import contextlib
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data_speed
import mean_flow
import training_speed
from turns import PEER, Row, describe_machine, print_rows

RESULTS = Path(__file__).with_name("README.md")
GPUS = torch.cuda.device_count()
# GPUs get larger workloads: a GPU finishes the CPU's workloads before its clock has ramped up.
LIMITS = {"training": 6.5, "data": 3.0, "mean_flow": 2.0}
"""Minutes after which a part is ended; on a GPU they are twice as long, as compiling takes minutes."""
ROUNDS = 0.6
"""Share of its limit after which a part starts no further round."""
TRAINING = training_speed.Flags(image_sizes=(64, 128), steps=50, warm_up=30) if GPUS else training_speed.Flags()
MEAN_FLOW = mean_flow.Flags(image_size=64, batch_size=128, compile=True) if GPUS else mean_flow.Flags(rounds=5)
Part = Literal["training", "data", "mean_flow"]
PARTS: dict[Part, Callable[[float], list[Row]]] = {
    "training": lambda minutes: training_speed.measure_rows(replace(TRAINING, minutes=minutes)),
    "data": lambda minutes: data_speed.measure_rows(data_speed.Flags(minutes=minutes)),
    "mean_flow": lambda minutes: mean_flow.measure_rows(replace(MEAN_FLOW, minutes=minutes)),
}
CLOCK = "Wall time on the GPU" if GPUS else "Processor time of one thread"


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    parts: tuple[Part, ...] = get_args(Part)
    """Benchmarks to run. Only a run of all of them replaces the existing table."""


def measure_part(name: Part, minutes: float) -> list[Row]:
    """Return the rows of a part, or one that says why there are none.

    The part runs in a process of its own, which is ended with all that it started when its time is over.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_measure, args=(name, ROUNDS * minutes, sender))
    process.start()
    sender.close()
    reason = f"not within {minutes:g} minutes on this machine"
    try:
        if receiver.poll(60 * minutes):
            rows: list[Row] = receiver.recv()
            return rows
    except EOFError:
        reason = "failed, see the error above"
    finally:
        _end(process.pid)
        process.join()
    return [Row(f"benchmark {name}", "", "", "not measured", reason)]


def _measure(name: Part, minutes: float, sender: Connection) -> None:
    sender.send(PARTS[name](minutes))


def _end(pid: int | None) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for each in [*first.children(recursive=True), first]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


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
    """Measure, and print the table."""
    rows = []
    for name in flags.parts:
        began = time.perf_counter()
        found = measure_part(name, LIMITS[name] * (2 if GPUS else 1))
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
