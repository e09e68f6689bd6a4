"""The micro-batches of a rank, from its place in the stream on."""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from rectified_flow.data.batches import GlobalBatch
from rectified_flow.data.stream import Batches, StreamSampler, as_they_are
from rectified_flow.distributed.collectives import broadcast, gather_rows
from rectified_flow.flows.flow import Flow
from rectified_flow.interruption import leave_signals_to_parent
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.config import TrainingConfig


def load(
    dataset: Dataset[Any], length: int, config: TrainingConfig, batch: GlobalBatch, rank: int, position: int
) -> Iterator[dict[str, Any]]:
    """Endless micro-batches of one rank, from the ``position``-th item of the stream on."""
    loader = DataLoader(
        Batches(dataset),
        batch_sampler=StreamSampler(length, config.seed, batch, rank, position),
        collate_fn=as_they_are,
        num_workers=config.num_workers,
        multiprocessing_context=config.multiprocessing_context,
        persistent_workers=config.persistent_workers,
        pin_memory=config.pin_memory,
        worker_init_fn=leave_signals_to_parent,
    )
    return iter(loader)


def checked(
    batches: Iterator[dict[str, Any]], flow: nn.Module, report: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """The same batches, after a warning if the data of the first look wrong to the flow's space."""
    first, problems = next(batches), list[str | None]()
    space = getattr(flow, "space", None)
    if space is not None and space.key in first:
        problems.append(space.problem_with(first[space.key]))
    missing = [name for name in getattr(flow, "conditions", {}) if name not in first]
    if missing:
        problems.append(f"the network takes {', '.join(missing)}, which the data do not have: it is trained without")
    for problem in problems:
        if problem is not None:
            report(f"warning: {problem}")
    return chain([first], batches)


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
    """Add ``noise_rows``, the noise that the flow chose for each row of the global batch. Collective.

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
