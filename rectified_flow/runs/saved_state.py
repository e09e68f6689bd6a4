"""``trainer.json``: what a run resumes from, beside the tensors of a checkpoint."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from rectified_flow.runs.manifest import Natural

ByRank = Annotated[list[float], Field(min_length=1)]
Scale = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class RunIdentity:
    """What makes two runs the same run; part of every checkpoint."""

    dataset: str
    """Fingerprint of the dataset."""
    seed: Natural
    global_batch: Natural
    origin: str
    """The checkpoint or run that ``--resume`` named when the run began, or "new"."""
    precision: str = ""
    """Of the forward pass; "" in checkpoints that do not record it."""


@dataclass(frozen=True)
class SavedState:
    """The counters of a run after ``step`` steps; the first checkpoints of version 0.1 lack some."""

    step: Natural
    run: RunIdentity
    images_seen: Natural = 0
    updates: Natural = -1
    """As many as steps, where it is not recorded."""
    bad_steps: Natural = 0
    bad_in_a_row: Natural = 0
    scaler_skips: Natural = 0
    sums: dict[str, float | ByRank] = field(default_factory=dict)
    """Of the values to log, by rank; version 0.1 kept their mean."""
    summands: Natural = 0
    ema_step: Natural | None = None
    grad_scaler: dict[str, Natural | Scale] | None = None
    optimizer: str | None = None
    optimizer_numbers: dict[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sums and self.summands == 0:
            raise ValueError("there are sums of no summands")
        if self.updates < 0:
            object.__setattr__(self, "updates", self.step)
