"""The time of a run: its budget, what of it has been used, and the clock of a run that resumes."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from accelerate import PartialState

from rectified_flow.cli.budget import seconds_of
from rectified_flow.cli.training_flags import TrainProgramConfig
from rectified_flow.distributed import on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.runs.folder import CLOCK_FILE, prepare_folders
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.terminal import duration, line
from rectified_flow.training.clock import Clock

RECORD_EVERY = 5.0  # seconds between two records of the used time while data are prepared
DEFAULT_BUDGET = "1h"
"""Budget of runs on a folder of pictures and of runs with a teacher, unless a flag gives the length."""


def budget_of(program: TrainProgramConfig) -> float:
    """Return the time that a planned run is to take [s]: with ``--one_step``, half of the budget."""
    return seconds_of(program.budget or DEFAULT_BUDGET) / (2 if program.one_step else 1)


def seconds_since(began: float) -> float:
    """Return the seconds since a time of the monotonic clock of the main process. Collective."""
    return on_main(PartialState(), lambda: time.monotonic() - began)


def time_used(folder: Path, budget: float) -> float:
    """Return the time used by a run that was killed before its first checkpoint [s], and print it. Collective."""
    state = PartialState()
    used = on_main(state, lambda: Clock.used_before(folder, budget, saved=False))
    if used:
        state.print(line("clock", f"{duration(used)} of the budget had been used before the run was killed"))
    return used


@contextmanager
def time_recorded(run: TrainingConfig, clock: Clock | None) -> Iterator[None]:
    """Record the used time at intervals inside the block, in which data are prepared and the run may be killed.

    After an error, a run that has no plan yet begins anew with all of its time.

    Args:
        run: the flags of the run.
        clock: the time of the run, if it has a budget.
    """
    if clock is None or not PartialState().is_main_process:
        yield
        return
    has_ended, has_plan = Event(), run.train_num_steps is not None

    def write() -> None:
        with suppress(OSError, UsageError, RunError):  # a full or slow disk
            prepare_folders(run)
            clock.write(run.output_dir, run.train_num_steps or 0, durable=False)

    def write_at_intervals() -> None:
        while not has_ended.wait(RECORD_EVERY):
            write()

    if has_plan:  # without a plan, a preparation that is over soon leaves nothing behind
        write()
    thread = Thread(target=write_at_intervals, name="clock", daemon=True)
    thread.start()
    try:
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
    except Exception:
        if not has_plan:
            (run.output_dir / CLOCK_FILE).unlink(missing_ok=True)
        raise


def resumed_clock(folder: Path, budget: float | None, given: Collection[str], began: float) -> Clock | None:
    """Return the clock of a run that resumes; None if its length is a number of steps. Collective.

    The run has the rest of its time, or a new time if the user gives another budget.

    Args:
        folder: the folder of the run.
        budget: the budget that the user gives [s], if there is one.
        given: names of the flags that the user gave.
        began: when the program began, by :func:`time.monotonic`.
    """
    if not {"train_num_steps", "num_epochs"}.isdisjoint(given):
        return None
    return on_main(PartialState(), lambda: Clock.resumed(folder, seconds=budget, began=began))
