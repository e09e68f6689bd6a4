"""The micro-batches of a rank, from its place in the stream on."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from rectified_flow.condition import chosen
from rectified_flow.data.stream import Batches, StreamSampler, as_they_are
from rectified_flow.distributed.collectives import broadcast, gather_rows
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.config import GlobalBatch, TrainingConfig
from rectified_flow.system.signals import leave_signals_to_parent


def load(
    dataset: Dataset[Any], length: int, config: TrainingConfig, batch: GlobalBatch, rank: int, position: int
) -> Iterator[dict[str, Any]]:
    """Endless micro-batches of one rank, from the ``position``-th item of the stream on.

    Raises:
        RunError: if the loader processes cannot be started.
    """
    loader = DataLoader(
        Batches(dataset),
        batch_sampler=StreamSampler(length, config.seed, batch, rank, position),
        collate_fn=Parcel if config.num_workers else as_they_are,
        num_workers=config.num_workers,
        multiprocessing_context=config.multiprocessing_context,
        persistent_workers=config.persistent_workers,
        pin_memory=config.pin_memory,
        worker_init_fn=leave_signals_to_parent,
    )
    batches = _start(loader)
    try:
        yield from batches
    finally:
        if config.num_workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # an error's traceback may keep them


def _start(loader: DataLoader[Any]) -> Iterator[dict[str, Any]]:
    try:
        return iter(loader)
    except OSError as error:
        for frame, _ in walk_tb(error.__traceback__):
            half = frame.f_locals.get("self")
            if isinstance(half, _MultiProcessingDataLoaderIter):  # whose own clean-up expects a whole one
                half._shutdown = True
                for worker in getattr(half, "_workers", ()):
                    worker.kill()
        raise RunError(
            f"the loader processes could not be started ({error.strerror}): pass fewer --num_workers, or raise the "
            "limits of processes and open files (ulimit) and the shared memory (docker run --shm-size)"
        ) from error


class Parcel:
    """A batch that a loader process hands over, and that arrives as the batch itself.

    It is pickled here, which puts its tensors into shared memory, so that an error reaches the training process. The
    thread that writes into the queue would only print it, and the training process would wait for ever.

    Args:
        batch: a dict of tensors.
    """

    def __init__(self, batch: Any) -> None:
        self._content = bytes(ForkingPickler.dumps(dict(batch)))

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._content,)


LOADER_ERRORS = {
    "shared memory": "have too little shared memory: give them more (docker run --shm-size), or pass fewer "
    "--num_workers; 0 needs none",
    "Too many open files": "may not open enough files: raise the limit (ulimit -n), or pass fewer --num_workers",
    "is killed by signal": "ended early, perhaps for want of memory: pass fewer --num_workers; 0 needs none",
    "exited unexpectedly": "ended early, perhaps for want of memory: pass fewer --num_workers; 0 needs none",
}
"""What torch says of loader processes, and what to say of them."""


@contextmanager
def explain_loader_errors() -> Iterator[None]:
    """Turn the failure of a loader process, which may arrive anywhere inside the block, into a sentence.

    Raises:
        RunError: if it lacks memory or open files, or was killed.
        UsageError: as RunError, if the process raised one with a sentence of its own.
    """
    try:
        yield
    except (RuntimeError, UsageError, OSError) as error:
        lines = str(error).strip().splitlines()
        if not any(name in line for line in lines for name in ("DataLoader worker", "with the workers")):
            raise
        if isinstance(error, RunError | UsageError):
            raise type(error)(lines[-1].partition(": ")[2]) from error
        for said, sentence in LOADER_ERRORS.items():
            for line in lines:
                if said in line:
                    raise RunError(f"the loader processes {sentence} ({line.strip()})") from error
        raise


def checked(
    batches: Iterator[dict[str, Any]], flow: nn.Module, report: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """The same batches, after a warning if the data of the first look wrong to the flow's space."""
    first, problems = next(batches), list[str | None]()
    space = getattr(flow, "space", None)
    if space is not None and space.key in first:
        problems.append(space.problem_with(first[space.key]))
    missing = [name for name in chosen(getattr(flow, "conditions", {})) if name not in first]
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
