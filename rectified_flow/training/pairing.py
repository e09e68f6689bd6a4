"""Batches with the noise that the flow chose for them, where it looks at the whole global batch for that."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from rectified_flow.data.batches import GlobalBatch
from rectified_flow.distributed.collectives import broadcast, gather_rows
from rectified_flow.flows.flow import Flow
from rectified_flow.randomness import BatchRows, deterministic


def paired(
    batches: Iterator[dict[str, Any]],
    flow: Flow,
    batch: GlobalBatch,
    *,
    seed: int,
    step: int,
    rank: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Add ``noise_rows`` to each micro-batch. Collective.

    Args:
        batches: a rank's micro-batches.
        flow: its :meth:`Flow.pair` chooses.
        batch: how the global batch is cut.
        seed: the run's seed.
        step: of the first global batch.
        rank: of this process.
        device: where to pair.
    """
    while micro_batches := list(islice(batches, batch.accumulation)):
        everything = gather_rows(micro_batches, batch, device)
        with deterministic(BatchRows(seed, step, batch.total, slice(None)), device):
            rows = broadcast(flow.pair(**everything))
        for index, micro_batch in enumerate(micro_batches):
            yield micro_batch | {"noise_rows": rows[batch.rows(rank, index)]}
        step += 1
