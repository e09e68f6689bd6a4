"""The loader of a rank's micro-batches, and the pairing of their rows with noise or with sources."""

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from accelerate.utils import broadcast, gather
from einops import rearrange
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from rectified_flow.condition import ConditionSpecs, check_values, chosen
from rectified_flow.data import GlobalBatch
from rectified_flow.data.stream import Batch, Batches, StreamSampler
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system.signals import leave_signals_to_parent

# The default for an iterator that cannot start its processes, whose clean-up would fail on its missing attributes.
_MultiProcessingDataLoaderIter._shutdown = True


def load(dataset: Dataset[object], stream: StreamSampler, config: TrainingConfig) -> Iterator[Batch]:
    """Yield the micro-batches of one rank without end."""
    loader = DataLoader(
        Batches(dataset),
        batch_sampler=stream,
        collate_fn=SharedBatch if config.num_workers else dict,
        num_workers=config.num_workers,
        worker_init_fn=leave_signals_to_parent,
    )
    try:
        batches = iter(loader)
    except OSError as error:
        raise RunError(f"the loader processes could not be started ({error.strerror}): {REMEDY}") from error
    try:
        yield from batches
    finally:
        if config.num_workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]  # an error's traceback may keep them


class SharedBatch:
    """A batch that a loader process hands over, and that arrives as the batch itself.

    It is pickled here, which puts its tensors into shared memory. Left to the thread that writes into the queue, an
    error, as for want of shared memory, would only be printed, and the training process would wait for ever.

    Args:
        batch: a dict of tensors.
    """

    def __init__(self, batch: Any) -> None:
        self._content = bytes(ForkingPickler.dumps(dict(batch)))

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return pickle.loads, (self._content,)


SHORTAGES = re.compile(r"shared memory|Too many open files|killed by signal|exited unexpectedly")
"""Words of torch about a loader process that lacked a resource."""
REMEDY = (
    "pass fewer `num_workers` (0 needs none), or allow more memory, shared memory (shm-size of docker run), processes "
    "and open files (ulimit)"
)


@contextmanager
def explain_loader_errors() -> Iterator[None]:
    """Turn the failure of a loader process, which may arrive anywhere inside the block, into a sentence."""
    try:
        yield
    except (RuntimeError, UsageError, OSError) as error:
        text = str(error).strip()
        if "DataLoader worker" not in text and "with the workers" not in text:
            raise
        if isinstance(error, RunError | UsageError):  # torch puts the traceback of the worker before the sentence
            raise type(error)(text.splitlines()[-1].partition(": ")[2]) from error
        line = next(filter(SHORTAGES.search, text.splitlines()), None)
        if line is None:
            raise
        raise RunError(f"a loader process failed ({line.strip()}): {REMEDY}") from error


def checked(batches: Iterator[Batch], flow: nn.Module, report: Callable[[str], object]) -> Iterator[Batch]:
    """Yield the batches unchanged, after warnings about the first: data out of range, unusual or missing conditions.

    Raises:
        UsageError: if a condition in a batch has an invalid value.
    """
    first, space, kinds = next(batches), getattr(flow, "space", None), getattr(flow, "conditions", {})
    problem = None if space is None else space.medium.problem_with(first)
    for warning in [*([] if problem is None else [problem]), *check_values(kinds, first)]:
        report(f"warning: {warning}")
    missing = ", ".join(name for name in chosen(kinds) if name not in first)
    if missing:
        report(f"warning: the network takes {missing}, which the data do not have: it is trained without")
    return chain([first], _with_checked_values(batches, kinds))


def _with_checked_values(batches: Iterator[Batch], kinds: ConditionSpecs) -> Iterator[Batch]:
    for batch in batches:
        check_values(kinds, batch)
        yield batch


def paired(batches: Iterator[Batch], flow: Flow, stream: StreamSampler, step: int) -> Iterator[Batch]:
    """Add ``noise_rows``, the number of the noise that is paired with each row of the global batch. Collective.

    If paths start from sources, the source of each row is replaced by the paired source.
    """
    batch, device = stream.batch, flow.device
    while micro_batches := list(islice(batches, batch.accumulation)):
        everything = gather_rows(micro_batches, batch, device)
        with deterministic(BatchRows(stream.seed, step, batch.total, slice(None)), device):
            rows = broadcast(flow.pair(**everything))  # rounding may differ between ranks, and so may the pairs
        for index, micro_batch in enumerate(micro_batches):
            mine = rows[batch.rows(stream.rank, index)]
            sources = {SOURCE: everything[SOURCE][mine]} if flow.from_source else {}
            yield micro_batch | {"noise_rows": mine} | sources
        step += 1


def gather_rows(micro_batches: list[Batch], batch: GlobalBatch, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of the global batch ``[total, ...]``, in order, gathered from all ranks' micro-batches."""
    everything = {}
    for key, value in micro_batches[0].items():
        if isinstance(value, Tensor):
            rows = torch.cat([micro_batch[key] for micro_batch in micro_batches]).to(device).contiguous()
            by_rank = gather(rows.view(torch.uint8)).view(rows.dtype)  # gloo gathers no 16-bit integers
            # The inverse of `GlobalBatch.rows`.
            sizes = {"world": batch.world_size, "m": batch.accumulation}
            everything[key] = rearrange(by_rank, "(world m b) ... -> (b m world) ...", **sizes)
    return everything
