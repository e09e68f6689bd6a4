"""The global batch of a step, cut over processes and accumulation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GlobalBatch:
    """How one step's global batch is cut over processes and accumulation.

    Micro-batch ``m`` of rank ``k`` takes every ``(world_size * accumulation)``-th row, starting at row
    ``m * world_size + k``.
    """

    per_process: int
    world_size: int = 1
    accumulation: int = 1

    @property
    def parts(self) -> int:
        """Micro-batches in the global batch."""
        return self.world_size * self.accumulation

    @property
    def total(self) -> int:
        """Rows in the global batch."""
        return self.per_process * self.parts

    def rows(self, rank: int, micro_batch: int) -> slice:
        """The rows of one rank's micro-batch."""
        return slice(micro_batch * self.world_size + rank, None, self.parts)

    def __str__(self) -> str:
        return (
            f"{self.per_process} per process x {self.world_size} process{'es' * (self.world_size > 1)}"
            f" x {self.accumulation} accumulation = {self.total}"
        )
