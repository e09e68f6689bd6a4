"""One harness for all studies: named cases, seeds and budgets become rows of a file and a table.

A row is one training and its figures. It is identified by its case, data, image size, seed, budget and number of
samples. A row that the file of results has is not computed again, and a study that was killed continues where it was:
inside a row, its training resumes from its newest checkpoint. Each row is computed by a process of its own with one
thread. These processes end with their launcher.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from threading import Thread
from typing import Any, Literal

import tyro

Clock = Literal["processor", "wall"]
CLOCKS: Mapping[Clock, Callable[[], float]] = {"processor": time.process_time, "wall": time.monotonic}
Figures = Mapping[str, Mapping[str, float]]
"""Numbers by name, for each way to use the trained flow, such as ``{"1 call": {"frechet": 210.0}}``."""


@dataclass(frozen=True)
class Row:
    """One training: what identifies it, and where it is."""

    study: str
    """Module of the study."""
    case: str
    data: str
    image_size: int
    seed: int
    budget: float
    num_samples: int
    clock: Clock
    output_dir: Path

    @property
    def key(self) -> dict[str, Any]:
        """The values that identify the row in a file of results."""
        names = ("case", "image_size", "seed", "budget", "num_samples", "clock")
        return {"data": Path(self.data).name, **{name: getattr(self, name) for name in names}}

    @property
    def folder(self) -> Path:
        """The folder of its training, which does not depend on the number of samples."""
        words = (Path(self.data).name, f"{self.image_size}px", self.case, f"{self.budget:g}", self.clock, self.seed)
        return self.output_dir / "-".join("".join(c if c.isalnum() else "-" for c in str(word)) for word in words)

    @property
    def trained(self) -> dict[str, float] | None:
        """Images and processor seconds of its training and of those before it, once it has ended."""
        file = self.folder / "trained.json"
        return json.loads(file.read_text()) if file.exists() else None

    @property
    def definition(self) -> "Case":
        """The case of the row's study."""
        return load_study(self.study).cases[self.case]

    @property
    def before(self) -> "Row | None":
        """The row whose training this one starts from."""
        after = self.definition.after
        return None if after is None else after(self)

    @property
    def own_budget(self) -> float:
        """The budget of the training itself, without those before it."""
        return self.budget * (1 - self.definition.share)


@dataclass(frozen=True)
class Case:
    """One contender of a study.

    Args:
        about: a sentence on the case for ``--help``: what it changes, what is expected of it, or was found.
        train: trains a row and writes ``trained.json``; it resumes a training that was cut short.
        measure: measures a trained row.
        after: returns the row whose training a row starts from.
        share: share of a row's budget that the training before has.
    """

    about: str
    train: Callable[[Row], None]
    measure: Callable[[Row], Figures]
    after: Callable[[Row], Row] | None = None
    share: float = 0.0


@dataclass(frozen=True)
class Flags:
    """The flags of every study."""

    data: tuple[str, ...] = ("synthetic-flowers",)
    """Values of --dataset, folders, or names of folders in $STUDIES_DATA."""
    image_size: int = 32
    """Side of the images [px]."""
    budget: tuple[float, ...] = (12.0,)
    """Budgets of a row, its whole training from nothing: minutes, unless the study counts images."""
    clock: Clock = "processor"
    """Clock of the minutes: the processor time of one thread, or wall time, which uses a GPU if there is one."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds."""
    only: tuple[str, ...] = ("*",)
    """Cases to compute and print; * stands for any characters."""
    num_samples: int = 2000
    """Generated images per distance."""
    workers: int = 1
    """Rows to compute at once, with one thread each."""
    output_dir: Path = Path("runs/studies")
    """Folder of the runs."""
    results: Path | None = None
    """File to which rows are appended; by default results/STUDY.jsonl beside the programs."""
    dry_run: bool = False
    """List the rows and how long they take, and compute nothing."""
    table: bool = False
    """Print the table of the rows in the file, and compute nothing."""
    figures: tuple[str, ...] = ("frechet", "kernel", "precision", "recall", "copies")
    """Figures of the table."""


@dataclass(frozen=True)
class Study:
    """A question and its cases.

    Args:
        question: the question, which ``--help`` prints.
        cases: the contenders by name.
        flags: the default flags.
        unit: unit of the budgets.
    """

    question: str
    cases: Mapping[str, Case]
    flags: Flags = Flags()
    unit: Literal["minutes", "images"] = "minutes"


def load_study(module: str) -> Study:
    """Return the ``STUDY`` of a module."""
    study: Study = importlib.import_module(module).STUDY
    return study


def run(module: str, arguments: Sequence[str] | None = None) -> int:
    """Run a study's command line; return the exit code, which is 1 if a row failed."""
    study = load_study(module)
    names: dict[str, list[str]] = {}
    for name, case in study.cases.items():
        names.setdefault(case.about, []).append(name)
    cases = "\n".join(f"- {'; '.join(some)}: {about}" for about, some in names.items())
    description = f"{study.question.strip()}\n\nCases:\n{cases}"
    prog = f"python -m {module}"
    flags = tyro.cli(
        Flags, prog=prog, description=description, default=study.flags, args=arguments, use_underscores=True
    )
    results = flags.results or Path(__file__).parent / "results" / f"{module.rpartition('.')[2]}.jsonl"
    rows = select_rows(module, study, flags)
    if flags.dry_run:
        print(describe_plan(study, rows, results, flags.workers))
        return 0
    failed = [] if flags.table else compute(missing(rows, results), results, flags.workers)
    found = [each for each in read_rows(results) if any(row.key.items() <= each.items() for row in rows)]
    print(format_table(found, flags.figures))
    return 1 if failed else 0


def select_rows(module: str, study: Study, flags: Flags) -> list[Row]:
    """Return the rows that the flags ask for, the shortest first."""
    names = [name for name in study.cases if any(fnmatchcase(name, each) for each in flags.only)]
    if not names:
        raise SystemExit(f"--only {' '.join(flags.only)} matches no case; there are {', '.join(study.cases)}")
    rest = (flags.num_samples, flags.clock, flags.output_dir / module.rpartition(".")[2])
    return [
        Row(module, name, data, flags.image_size, seed, budget, *rest)
        for budget in sorted(flags.budget)
        for seed in flags.seeds
        for data in flags.data
        for name in names
    ]


# The file of results


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of results, without a line that was cut short."""
    rows = []
    for line in results.read_text().splitlines() if results.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"warning: {results} has a line that is no row; it is left out", file=sys.stderr)
    return rows


def append_row(results: Path, row: Mapping[str, Any]) -> None:
    """Append a row in one write; a line that a kill cut short is closed before."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")


def missing(rows: Sequence[Row], results: Path) -> list[Row]:
    """Return the rows that are not in the file of results."""
    found = read_rows(results)
    return [row for row in rows if not any(row.key.items() <= each.items() for each in found)]


# Computing rows


@dataclass(frozen=True)
class Task:
    """The work of one process: train a row and, unless ``results`` is None, measure it."""

    row: Row
    results: Path | None

    def __str__(self) -> str:
        row = self.row
        name = f"{row.case}, {Path(row.data).name}, {row.image_size} px, budget {row.budget:g}, seed {row.seed}"
        return name if self.results else f"{name} (for later rows)"


def compute(rows: Sequence[Row], results: Path, workers: int) -> list[Task]:
    """Compute rows and, before them, the trainings that they start from; return the tasks that failed."""
    failed: list[Task] = []
    chains = [trainings_of(row)[:-1] for row in rows if row.trained is None]
    for depth in range(max(map(len, chains), default=0)):
        phase = dict.fromkeys(chain[depth] for chain in chains if len(chain) > depth)
        todo = [Task(row, None) for row in phase if row.trained is None and not starts_from(row, failed)]
        failed += run_tasks(todo, workers)
    tasks = [Task(row, results) for row in rows]
    lost = [task for task in tasks if starts_from(task.row, failed)]
    return failed + lost + run_tasks([task for task in tasks if task not in lost], workers)


def trainings_of(row: Row) -> list[Row]:
    """Return the trainings that a row takes, from the first to its own."""
    return [*([] if row.before is None else trainings_of(row.before)), row]


def starts_from(row: Row, failed: Sequence[Task]) -> bool:
    """Return whether a failed training is before a row's own."""
    return any(task.row in trainings_of(row)[:-1] for task in failed)


def run_tasks(tasks: Sequence[Task], workers: int) -> list[Task]:
    """Run tasks in processes of their own, some at once; return the tasks that failed."""
    spawn = multiprocessing.get_context("spawn")
    waiting, failed = list(reversed(tasks)), list[Task]()
    running: dict[int, tuple[BaseProcess, Task]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                task = waiting.pop()
                set_environment(task.row.clock)
                process: BaseProcess = spawn.Process(target=work, args=(task,))
                process.start()
                running[process.sentinel] = process, task
                print(f"started: {task}", file=sys.stderr, flush=True)
            for sentinel in connection.wait(list(running)):
                process, task = running.pop(int(sentinel))  # type: ignore[arg-type]
                process.join()
                if process.exitcode != 0:
                    failed.append(task)
                verdict = "done" if process.exitcode == 0 else f"failed, see {task.row.folder / 'log.txt'}"
                print(f"{verdict}: {task}", file=sys.stderr, flush=True)
    finally:
        for process, _ in running.values():  # a training that is asked to stop saves a checkpoint first
            process.terminate()
        for process, _ in running.values():
            process.join()
    return failed


def set_environment(clock: Clock) -> None:
    """Give processes that are started from here one thread and, for processor time, no GPU."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if clock == "processor":
        os.environ["ACCELERATE_USE_CPU"] = "true"


def work(task: Task) -> None:
    """Compute a task in a process that ends with its launcher; its output goes to ``log.txt``."""
    Thread(target=end_with_launcher, daemon=True).start()
    row = task.row
    row.folder.mkdir(parents=True, exist_ok=True)
    with (row.folder / "log.txt").open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    case = row.definition
    if row.trained is None:
        case.train(row)
    if task.results is not None:
        figures = case.measure(row)
        append_row(task.results, {**row.key, **(row.trained or {}), "figures": figures})


def end_with_launcher() -> None:
    """Wait for the launcher to end, and end this process then; its training resumes from its newest checkpoint."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)


# What a person reads


def describe_plan(study: Study, rows: Sequence[Row], results: Path, workers: int) -> str:
    """Return the rows with their state, and the time that those to compute take."""
    todo = missing(rows, results)
    words = []
    for row in rows:
        state = "to do" if row in todo else "done"
        state = "trained, to measure" if state == "to do" and row.trained else state
        words.append(f"{state}: {Task(row, results)}")
    trainings = list(dict.fromkeys(each for row in todo for each in trainings_of(row)))
    whole = sum(row.own_budget for row in trainings if row.trained is None)
    hours = f", {whole / 60 / workers:.1f} hours with --workers {workers}" if study.unit == "minutes" else ""
    summary = f"{len(todo)} of {len(rows)} rows to compute: {whole:g} {study.unit} of training{hours}, and measuring"
    return "\n".join([*words, summary])


GROUP = ("data", "image_size", "budget", "case", "num_samples")
"""Values that rows share whose mean over seeds the table has."""


def group_by_seed(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Return the rows by all that identifies them except the seed, in their order."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return dict(sorted(groups.items(), key=lambda item: item[0][:3]))


def mean_of(rows: Sequence[Mapping[str, Any]], way: str, figure: str) -> float | None:
    """Return the mean of a figure over rows, or None if no row has it."""
    values = [row["figures"][way][figure] for row in rows if figure in row["figures"].get(way, {})]
    return fmean(values) if values else None


def format_table(rows: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> str:
    """Return means over seeds as a Markdown table."""
    ways = list(dict.fromkeys(way for row in rows for way in row["figures"]))
    cells = [(figure, way) for figure in figures for way in ways if mean_of(rows, way, figure) is not None]
    head = ["data", "px", "budget", "case", "samples", "seeds", "images", "minutes"]
    head += [f"{figure}, {way}" for figure, way in cells]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (data, size, budget, case, samples), group in group_by_seed(rows).items():
        means = [mean_of(group, way, figure) for figure, way in cells]
        images = fmean(row["images"] for row in group)
        seconds = [row["seconds"] for row in group if row.get("seconds") is not None]
        minutes = f"{fmean(seconds) / 60:.1f}" if seconds else ""
        line = [data, f"{size}", f"{budget:g}", case, f"{samples}", f"{len(group)}", f"{images:,.0f}", minutes]
        lines.append(f"| {' | '.join([*line, *('' if mean is None else f'{mean:.4g}' for mean in means)])} |")
    return "\n".join(lines)
