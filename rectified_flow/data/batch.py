"""The global batch of a step. Imports no torch, since the flags of a run compute with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GlobalBatch:
    """The global batch of a step, split over processes and accumulation.

    Micro-batch ``m`` of rank ``k`` takes every ``(world_size * accumulation)``-th row, starting at row
    ``m * world_size + k``.
    """

    per_process: int
    world_size: int = 1
    accumulation: int = 1

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.per_process * self.world_size * self.accumulation

    def rows(self, rank: int, micro_batch: int) -> slice:
        """Return the rows of one rank's micro-batch."""
        return slice(micro_batch * self.world_size + rank, None, self.world_size * self.accumulation)

    def __str__(self) -> str:
        return (
            f"{self.per_process} per process x {self.world_size} process{'es' * (self.world_size > 1)}"
            f" x {self.accumulation} accumulation = {self.total}"
        )
