"""A study whose rows take no time, for tests of the harness."""

import json
import os
import signal
from dataclasses import replace
from functools import partial

from studies.harness import Case, Figures, Row, Study
from tests.patience import wait_for


def train(row: Row, how: str = "") -> None:
    """Count to the budget, from where it was stopped; some cases fail or kill their process on the way."""
    file = row.folder / "count"
    while (count := int(file.read_text()) if file.exists() else 0) < row.budget:
        file.write_text(str(count + 1))
        with (row.folder / "steps").open("a") as steps:
            steps.write(f"{count + 1} ")
        if how == "fails":
            raise ValueError("no luck")
        if how == "waits" and count == 1:
            wait(row)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    (row.folder / "trained.json").write_text(json.dumps({"images": 8 * row.budget, "seconds": 60 * row.budget}))


def wait(row: Row) -> None:
    """Write down the process, and wait for a file of that name, or to be killed."""
    (row.folder / "pid").write_text(str(os.getpid()))
    wait_for("the file go", (row.output_dir / "go").exists)


def measure(row: Row) -> Figures:
    """Return figures that fall with the budget."""
    return {"1 call": {"frechet": 100.0 / row.budget + row.seed}, "2 calls": {"frechet": 50.0 / row.budget}}


def half(case: str, row: Row) -> Row:
    """Return the row of a case with half of the budget."""
    return replace(row, case=case, budget=row.budget / 2)


STUDY = Study(
    "What does a toy do?",
    {
        "plain": Case("counts", train, measure),
        "after": Case("starts from plain", train, measure, partial(half, "plain"), 0.5),
        "fails": Case("raises an error", partial(train, how="fails"), measure),
        "dies": Case("is killed", partial(train, how="dies"), measure),
        "after fails": Case("has nothing to start from", train, measure, partial(half, "fails"), 0.5),
        "waits": Case("waits after two steps", partial(train, how="waits"), measure),
    },
)
