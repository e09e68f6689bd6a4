"""Fill a store on all processes together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.store import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import BusyError
from rectified_flow.system.files import LOCK_TIMEOUT, writing
from rectified_flow.system.terminal import progress_bar

Make = Callable[[Sequence[int]], Mapping[str, Tensor]]
"""A function that makes the rows of consecutive numbers, ``[b, ...]`` by file."""
REMEDY = "pass a writable folder with --cache_dir"


def encode(
    writer: StoreWriter, state: PartialState, make: Make, finish: Callable[[], None], *, batch_size: int
) -> None:
    """Fill a cached store unless it is whole, after waiting for another run that fills it. Collective.

    Arguments as in :func:`fill`. A whole store is not locked.

    Raises:
        UsageError: if the folder of the store cannot be written.
        RunError: if the disk is full.
    """
    with ExitStack() as held:
        missing = on_main(state, lambda: _claim(writer, held, timeout=0))
        if missing is None and state.is_main_process:
            tqdm.write(f"waiting for another run that is writing these {writer.kind}")
        while missing is None:  # polled, so that no process waits longer than this in a collective
            missing = on_main(state, lambda: _claim(writer, held, timeout=LOCK_TIMEOUT))
        if missing:
            fill(writer, state, make, finish, doing="encoding", batch_size=batch_size)


def fill(
    writer: StoreWriter,
    state: PartialState,
    make: Make,
    finish: Callable[[], None],
    *,
    doing: str,
    batch_size: int,
) -> None:
    """Write the missing rows, record the progress after each block, and finish. Collective.

    Args:
        writer: writer of the store, locked.
        state: state of the processes.
        make: function that computes the rows.
        finish: function that completes the store; it is called on the main process.
        doing: verb for the progress bar, such as ``encoding``.
        batch_size: number of rows that each process computes at once.

    Raises:
        RunError: if the disk is full.
    """
    block = batch_size * state.num_processes
    with writing(f"{writer.kind} in {writer.stage}", remedy="make room, and run the same command to resume"):
        done = on_main(state, writer.prepare)
        bar = progress_bar(
            total=writer.length,
            initial=done,
            desc=f"{doing} {writer.kind}",
            unit=writer.kind.removesuffix("s"),
            disable=not state.is_main_process,
        )
        with bar:
            for start in range(done, writer.length, block):
                first = start + batch_size * state.process_index
                numbers = range(first, min(first + batch_size, writer.length))
                end = min(start + block, writer.length)
                if numbers:
                    writer.write(first, make(numbers))
                state.wait_for_everyone()
                if state.is_main_process:
                    writer.reached({"done": end})
                bar.update(end - start)
        on_main(state, finish)


def _claim(writer: StoreWriter, held: ExitStack, timeout: float) -> bool | None:
    """Lock the store and return whether rows are missing; return None if another run holds the lock."""
    if writer.is_whole:
        return False
    try:
        held.enter_context(writer.locked(REMEDY, timeout))
    except BusyError:
        return None
    return not writer.is_whole
