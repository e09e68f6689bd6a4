"""Wall time of training runs with `--budget`, divided by the budget, in five situations.

The pictures are photographs of drawn flowers, written once. A row is appended to FOLDER/rows.jsonl when its run ends,
and the same command measures only the rows that are missing. The machine must have nothing else to do. The runs stay in
FOLDER, so that `rectified-flow evaluate` can compare them. Situations:

a: a machine without other programs. b: another program uses all cores from the start. c: another program uses all
cores from the middle of the budget. d: many pictures, which are not decoded yet. e: the run is killed after a third and
after two thirds of the budget, and resumed.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tyro
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from turns import describe_machine

from rectified_flow.cli.budget import seconds_of
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.runs.folder import CLOCK_FILE, STATUS_FILE

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = "rows.jsonl"
DRAWN, PHOTOGRAPH, GRAIN = 96, (500, 375), 4.0  # side that is drawn, sides of a file [px], noise [levels of 256]
PLAN = ("size", "pictures", "time", "budget", "length", "network", "teacher", "warning")
"""Topics of the lines of a plan that a row keeps."""
LIMIT = 4
"""Multiple of the budget after which a run is ended and counts as failed."""
POLL = 0.05  # seconds between two looks at the clock
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""A program that uses a core until the benchmark ends."""
Name = Literal["a", "b", "c", "d", "e"]


@dataclass(frozen=True)
class Situation:
    """The circumstances of a run; times are shares of the budget."""

    words: str
    busy_from: float = inf
    """When another program begins to use all cores."""
    is_decoded: bool = True
    """Whether the pictures are decoded before the run."""
    kills: Sequence[float] = ()
    """When the run is killed and started again."""


SITUATIONS: Mapping[Name, Situation] = {
    "a": Situation("quiet"),
    "b": Situation("busy from the start", busy_from=0),
    "c": Situation("busy from the middle", busy_from=1 / 2),
    "d": Situation("pictures not decoded", is_decoded=False),
    "e": Situation("killed and resumed twice", kills=(1 / 3, 2 / 3)),
}


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    budgets: tuple[str, ...] = ("3m", "10m", "24m --one_step")
    """Values of --budget, each followed by further flags of the training program, if there are any."""
    situations: tuple[Name, ...] = get_args(Name)
    """Situations to measure."""
    folder: Path = Path("runs/budget-benchmark")
    """Folder of the pictures, of the runs and of the rows."""
    pictures: int = 2000
    """Number of pictures of the runs but those of situation d."""
    undecoded: int = 20_000
    """Number of pictures of situation d."""


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    budget: str
    situation: Name
    pictures: int
    seconds: float
    """Wall time from the start of the program to its end, or to the end of its last start [s]."""
    given: float
    """The budget [s]."""
    load: float
    """Load of the machine over a minute before the run."""
    steps: list[int]
    """Steps of the run, and of the one-step run if there is one."""
    changes: list[int]
    """How often the clock changed the number of steps of each."""
    plan: dict[str, list[str]] = field(default_factory=dict)
    """Lines that the program printed, by topic; those of both runs, and of each start."""
    machine: str = ""
    date: str = ""

    @property
    def ratio(self) -> float:
        """Wall time divided by the budget."""
        return self.seconds / self.given


def write_pictures(folder: Path, count: int) -> None:
    """Write photographs of drawn flowers as JPEG files, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        [*pool.map(partial(_write_picture, folder), range(count), chunksize=50)]


def _write_picture(folder: Path, number: int) -> None:
    path = folder / f"{number:05}.jpg"
    if path.exists():
        return
    width, height = PHOTOGRAPH
    drawn = SyntheticFlowers(DRAWN, count=number + 1).load(number)[0].resize((width, width), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(number).normal(0, GRAIN, (height, width, 1))
    pixels = np.asarray(drawn, dtype=np.float32)[(width - height) // 2 :][:height] + grain
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    part = path.with_suffix(".part")
    picture.save(part, "JPEG", quality=85)
    part.rename(path)


def run_in(situation: Situation, command: Sequence[str], seconds: float, log: Path) -> tuple[float, int]:
    """Run a command with a budget in a situation; return its wall time [s] and its exit code.

    Args:
        situation: the situation.
        command: the words of the command.
        seconds: the budget [s].
        log: file for the output.
    """
    began = time.monotonic()
    busy_from, kills = situation.busy_from, list(situation.kills)
    with log.open("ab") as output, ExitStack() as ended:

        def start() -> subprocess.Popen[bytes]:
            started = subprocess.Popen(
                command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            ended.callback(_kill, started)
            return started

        process = start()
        while (code := process.poll()) is None:
            share = (time.monotonic() - began) / seconds
            if share >= busy_from:
                busy_from = inf
                ended.enter_context(busy_machine())
            if kills and share >= kills[0]:
                del kills[0]
                _kill(process)
                process = start()
            if share > LIMIT:
                _kill(process)
            time.sleep(POLL)
        return time.monotonic() - began, code


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, if it runs."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def busy_machine() -> Iterator[None]:
    """Use all cores inside the block."""
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(flags: Flags, budget: str, name: Name) -> Result | None:
    """Measure a row; None if the run fails, whose output is then in the log of the row."""
    situation = SITUATIONS[name]
    count = flags.pictures if situation.is_decoded else flags.undecoded
    folder = flags.folder.resolve() / f"{budget.replace(' ', '')}-{name}"
    shutil.rmtree(folder, ignore_errors=True)  # a row that was interrupted
    folder.mkdir(parents=True)
    pictures, cache, run = flags.folder.resolve() / f"pictures-{count}", folder / "cache", folder / "run"
    write_pictures(pictures, count)
    command = [sys.executable, "-m", "rectified_flow", "train", "--dataset_path", str(pictures)]
    command += ["--cache_dir", str(cache), "--output_dir", str(run), "--budget", *shlex.split(budget)]
    if situation.is_decoded:
        with (folder / "decoding.txt").open("wb") as output:
            subprocess.run([*command, "--dry_run"], cwd=REPOSITORY, stdout=output, stderr=output, check=True)
    given, log, load = seconds_of(budget.split(maxsplit=1)[0]), folder / "log.txt", os.getloadavg()[0]
    seconds, code = run_in(situation, command, given, log)
    shutil.rmtree(cache, ignore_errors=True)
    if code:
        print(f"{budget}, situation {name}: the run ended with code {code}, see {log}", flush=True)
        return None
    parts = [part for part in (run, run / "one-step") if (part / STATUS_FILE).exists()]
    return Result(
        budget,
        name,
        count,
        round(seconds, 1),
        given,
        round(load, 2),
        steps=[_document(part / STATUS_FILE)["step"] for part in parts],
        changes=[len(_document(part / CLOCK_FILE)["changes"]) for part in parts],
        plan=plan_of(log.read_text(errors="replace")),
        machine=describe_machine(),
        date=str(date.today()),
    )


def _document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def plan_of(output: str) -> dict[str, list[str]]:
    """Return the lines of plans in the output of a program, by topic."""
    found: dict[str, list[str]] = {}
    for topic, text in re.findall(rf"^({'|'.join(PLAN)}) {{2,}}(.+)$", output.replace("\r", "\n"), re.MULTILINE):
        found.setdefault(topic, []).append(text)
    return found


def read_rows(file: Path) -> list[Result]:
    """Return the rows in a file; a last line that was cut off is left out."""
    rows = list[Result]()
    for text in file.read_text().splitlines() if file.exists() else ():
        with suppress(json.JSONDecodeError):
            rows.append(Result(**json.loads(text)))
    return rows


def table(rows: Sequence[Result]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| budget | situation | pictures | wall time [s] | / budget | load before | steps | changes | plan |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps, changes = " + ".join(map(str, row.steps)), " + ".join(map(str, row.changes))
        plan = "; ".join(text for topic in ("time", "length") for text in row.plan.get(topic, ()))
        figures = f"{row.seconds:,.0f} | **{row.ratio:.2f}** | {row.load:.1f} | {steps} | {changes}"
        words = SITUATIONS[row.situation].words
        lines.append(f"| {row.budget} | {row.situation}: {words} | {row.pictures:,} | {figures} | {plan} |")
    return "\n".join(lines)


def main(flags: Flags) -> int:
    """Measure the rows that are missing, print the table of all rows, and return 1 if a run failed."""
    file, failed = flags.folder / ROWS, 0
    for budget, name in product(flags.budgets, flags.situations):
        if any((row.budget, row.situation) == (budget, name) for row in read_rows(file)):
            continue
        row = measure(flags, budget, name)
        if row is None:
            failed = 1
            continue
        with file.open("a") as output:
            output.write(json.dumps(asdict(row)) + "\n")
        print(f"{budget}, situation {name}: {row.ratio:.2f} of the budget", flush=True)
    print(f"{describe_machine()}\n\n{table(read_rows(file))}")
    return failed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the run ends with the benchmark
    sys.exit(main(tyro.cli(Flags, description=__doc__, use_underscores=True)))
