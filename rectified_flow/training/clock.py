"""The time that a run is given: how many steps fit into it, and how the plan of the run is scaled to this number.

A plan chooses the number of steps from a speed that was measured before the run begins. Other programs may later
make the machine slower or faster. So the main process compares the run with the clock at fixed shares of the time, and
changes the number of steps when the end would be too early or too late. Each change is written to ``clock.json`` before
it takes effect, so that a run that is killed and resumed repeats it at the same step.
"""

import json
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from rectified_flow.errors import DamageError
from rectified_flow.runs.folder import CLOCK_FILE
from rectified_flow.system.artifact import Natural, write_output
from rectified_flow.system.files import read_document

MARKS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Shares of the time after the first step at which the run is compared with the clock."""
LEAST_SHARE = 1 / 4
"""Share of the time that a new run trains at least, however long it took to begin."""
LEAST_STEPS = 4
"""Number of steps between two comparisons: the time of fewer is too uncertain."""
FEW_STEPS = 10
"""Number of last steps that do not change any more, however fast they are."""
TOLERANCE = 0.04
"""Share of the time by which a run may end too early or too late before the number of its steps changes."""
PAUSE, IDLE = 60.0, 0.02
"""A step that takes longer than these seconds, and uses less than this share of a core, was a pause of the machine."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Change = tuple[Natural, Natural]
"""A step, and the number of steps of the whole run that was decided after it."""


@dataclass(frozen=True)
class Pace:
    """The position of a run in its plan, as a piecewise linear function of the step.

    Learning rates, averages and intervals are planned for a number of steps. After a change, the rest of the plan takes
    another number of steps, so that the run still ends as planned, for example with a learning rate of 0.

    Args:
        planned: number of steps of the plan.
        changes: the changes in the order of their steps; each total is larger than the step.
    """

    planned: int
    changes: tuple[Change, ...] = ()

    @property
    def total(self) -> int:
        """Number of steps of the whole run."""
        return self.changes[-1][1] if self.changes else self.planned

    def position(self, step: float) -> float:
        """Return the step of the plan that a step of the run stands for, from 0 to ``planned``."""
        begin, position, stretch = self._segment(step)
        return position + (step - begin) * stretch

    def stretch(self, step: float) -> float:
        """Return by how many steps of the plan a step of the run advances; 1 before the first change."""
        return self._segment(step)[2]

    def _segment(self, step: float) -> tuple[int, float, float]:
        """Return the first step of a segment, its position in the plan, and the change of the position by one step."""
        begin, position, stretch = 0, 0.0, 1.0
        for change, total in self.changes[: bisect(self.changes, step, key=lambda each: each[0])]:
            position += (change - begin) * stretch
            begin, stretch = change, (self.planned - position) / (total - change)
        return begin, position, stretch


@dataclass
class ClockFile:
    """The contents of ``clock.json``."""

    seconds: Seconds
    """The time that the run was given [s]."""
    asked: Seconds
    """The time that was asked for [s]; less than ``seconds`` if the preparation took most of it."""
    used: Seconds
    """The part of the time that had passed when the file was written [s]."""
    planned: Natural
    """Number of steps of the plan."""
    most_steps: Natural | None = None
    """Largest number of steps of the run; None for no limit."""
    changes: list[Change] = field(default_factory=list)
    saved: bool = False
    """Whether the run has saved a checkpoint, so that a resumed run continues its time."""


class Clock:
    """The time of a run.

    The time is that of a monotonic clock, and pauses do not count: the machine slept, or the process was stopped.

    Args:
        seconds: the time that the run is given, from ``began`` to its last file [s].
        asked: the time that was asked for, by which a run that resumes knows whether it is given another time [s];
            ``seconds`` if not given.
        most_steps: largest number of steps, for example since a longer run would memorise its data.
        used: time that the run used before it was resumed [s].
        began: when the run began, by :func:`time.monotonic`; now if not given.
        changes: the changes of the run before it was resumed.
    """

    def __init__(
        self,
        seconds: float,
        most_steps: int | None = None,
        *,
        asked: float | None = None,
        used: float = 0.0,
        began: float | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        self.seconds, self.most_steps, self.changes = seconds, most_steps, tuple(changes)
        self.asked = seconds if asked is None else asked
        self._began = (time.monotonic() if began is None else began) - used
        self._done: list[_Step] = []
        self._longest = 0.0
        self._resumes = used > 0
        self.saved = False
        """Whether the run has saved a checkpoint."""
        # A run whose preparation took nearly all the time still trains: a model of some steps is of no use.
        self._least = LEAST_SHARE * seconds
        self._first = 0.0

    @classmethod
    def resumed(cls, folder: Path, *, seconds: float | None = None, began: float | None = None) -> "Clock | None":
        """Return the clock of the run in a folder; None if the run has none. Call in one process only.

        Args:
            folder: the folder of the run.
            seconds: the time that is asked for. If it is not the one that was asked for before, it begins anew.
            began: when this part of the run began, by :func:`time.monotonic`; now if not given.
        """
        try:
            file = read_document(folder / CLOCK_FILE, ClockFile)
        except DamageError:
            return None if seconds is None else cls(seconds, began=began)
        if seconds not in (None, file.asked):
            return cls(seconds, file.most_steps, began=began, changes=file.changes)
        return cls(file.seconds, file.most_steps, asked=file.asked, used=file.used, began=began, changes=file.changes)

    @staticmethod
    def used_before(folder: Path, asked: float, *, saved: bool = True) -> float:
        """Return the recorded time that a run has used [s]; 0 if none is recorded. Call in one process only.

        Args:
            folder: the folder of the run.
            asked: the requested time [s]. If it differs from the recorded one, 0 is returned.
            saved: whether the time of a run that has saved a checkpoint counts, too.
        """
        try:
            file = read_document(folder / CLOCK_FILE, ClockFile)
        except DamageError:
            return 0.0
        return file.used if file.asked == asked and (saved or not file.saved) else 0.0

    @property
    def elapsed(self) -> float:
        """The time that has passed, without pauses [s]."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """The time until the planned end of the run [s]; negative after the planned end."""
        return self._end - time.monotonic()

    def expected(self, step: int, total: int, step_time: float) -> float:
        """Return the expected time until the end of a run [s].

        A run that repeats its recorded changes, or whose time is over, is not shortened now. It trains its last steps.

        Args:
            step: number of steps that are done.
            total: number of steps of the whole run.
            step_time: time of a step [s].
        """
        return (total - step) * step_time if self._repeats(step) or self.left <= 0 else self.left

    def pace(self, planned: int) -> Pace:
        """Return the pace of a run whose plan has ``planned`` steps."""
        return Pace(planned, self.changes)

    def write(self, folder: Path, planned: int, *, durable: bool = True) -> None:
        """Write ``clock.json`` into the folder of the run. Call in one process only."""
        used, changes = round(self.elapsed, 1), list(self.changes)
        file = ClockFile(self.seconds, self.asked, used, planned, self.most_steps, changes, self.saved)
        write_output(folder / CLOCK_FILE, json.dumps(asdict(file), indent=1), durable=durable)

    def tick(self, step: int, total: int) -> bool:
        """Count a step of ``total`` steps that is done, and return whether to compare the run with the clock now.

        Runs are compared at fixed shares of the time, and after half of the remaining steps: on a machine that has
        become faster, all of these steps might be over before the next share.
        """
        now = _Step(step, time.monotonic(), time.process_time())
        if not self._done:  # the first step may compile, and has no start to measure it from
            self._done = [now, now]
            self._first = now.time
            if self._resumes and step > 1:  # the run trained before it resumed
                self._least = 0.0
            return False
        compared, last = self._done
        took = now.time - last.time
        if took > PAUSE and now.processor - last.processor < IDLE * took:
            self._began += took
            self._first += took
            compared = compared.later(took)
        else:
            self._longest = max(self._longest, took)
        self._done = [compared, now]
        is_halfway = total > step + FEW_STEPS and 2 * step >= compared.step + total
        if self._repeats(step) or step >= total or step < compared.step + LEAST_STEPS:
            return False
        return is_halfway or self._marks(now.time) > self._marks(compared.time)

    def compare(self, pace: Pace) -> Pace:
        """Return the pace with which the run ends in time: a new pace if the end would be too early or too late.

        The last step is taken to be as long as the longest one so far, which had a preview and a checkpoint, too.
        """
        compared, now = self._done
        self._done = [now, now]
        step_time = (now.time - compared.time) / (now.step - compared.step)
        left = self._end - now.time - self._longest
        total = now.step + max(1, int(left / step_time))
        if self.most_steps is not None:
            total = min(total, max(self.most_steps, now.step + 1))
        if abs(pace.total - total) * step_time > TOLERANCE * self.seconds:
            self.changes = (*self.changes, (now.step, total))
        return self.pace(pace.planned)

    def _repeats(self, step: int) -> bool:
        """Return whether a recorded change, after which the run was killed, is at this step or a later one."""
        return bool(self.changes) and step <= self.changes[-1][0]

    @property
    def _end(self) -> float:
        """When the run is to end, by the monotonic clock."""
        return max(self._began + self.seconds, self._first + self._least)

    def _marks(self, when: float) -> int:
        """Return the number of marks between the first step and a time of the monotonic clock."""
        return bisect(MARKS, (when - self._first) / max(self._end - self._first, 1e-9))


class _Step(NamedTuple):
    """A step that is done, with the time of the monotonic clock and of the processor [s]."""

    step: int
    time: float
    processor: float

    def later(self, seconds: float) -> "_Step":
        """Return the step as if it had been done later."""
        return self._replace(time=self.time + seconds)
