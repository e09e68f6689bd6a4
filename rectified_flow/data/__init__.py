"""Data: from files to batches.

A picture passes through these modules in order:

- ``open`` finds the source that the arguments name. ``sources`` has the contract of a source.
- ``store_writer`` decodes each picture once, into a store. All processes write latents, captions and the data of a
  teacher.
- ``store`` reads a batch of the store, with its conditions.
- ``stream`` decides which pictures each batch contains.
"""

from dataclasses import dataclass

OXFORD_FLOWERS = "nelorth/oxford-flowers"


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
        of_rank = f"{self.per_process} per process x {self.world_size} process{'es' * (self.world_size > 1)}"
        accumulated = f" x {self.accumulation} accumulation" if self.accumulation > 1 else ""
        return f"{of_rank}{accumulated} = {self.total}"
