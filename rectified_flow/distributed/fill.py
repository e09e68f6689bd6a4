"""Fill a store on all processes together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from accelerate import PartialState
from filelock import Timeout
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.system.files import lock_of
from rectified_flow.system.terminal import progress_bar

Make = Callable[[Sequence[int]], Mapping[str, Tensor]]
LOCK_TIMEOUT = 10.0
"""Seconds between two looks whether another run has finished: no process waits longer in a collective."""
BUSY = -1


def fill_once(
    writer: StoreWriter,
    state: PartialState,
    make: Make,
    finish: Callable[[], None],
    *,
    doing: str,
    batch_size: int,
) -> None:
    """Fill a store of the cache unless it is whole, after waiting for another run that fills it. Collective.

    Args:
        writer: of the store.
        state: of the processes.
        make: the rows of some consecutive numbers, ``[b, ...]`` by file.
        finish: finishes the store; called on the main process.
        doing: what is done, for the progress bar.
        batch_size: rows that each process makes at once.

    Raises:
        UsageError: if the store's folder cannot be written.
        RunError: if the disk is full.
    """
    with ExitStack() as held:
        done = on_main(state, lambda: _claim(writer, held, wait=0))
        if done == BUSY and state.is_main_process:
            tqdm.write(f"waiting for another run that is {doing} these {writer.called}")
        while done == BUSY:
            done = on_main(state, lambda: _claim(writer, held, wait=LOCK_TIMEOUT))
        if done is not None:
            fill(writer, state, done, make, doing=doing, batch_size=batch_size)
            on_main(state, lambda: _finish(writer, finish))


def fill(writer: StoreWriter, state: PartialState, done: int, make: Make, *, doing: str, batch_size: int) -> None:
    """Write all rows from number ``done`` on, and record the progress after each block. Collective.

    Args:
        writer: of the store; its files are there, and other runs are locked out.
        state: of the processes.
        done: rows that are written.
        make: as in :func:`fill_once`, and what follows.
        doing: what is done.
        batch_size: rows at once.

    Raises:
        RunError: if they cannot be written.
    """
    block = batch_size * state.num_processes
    bar = progress_bar(
        total=writer.length,
        initial=done,
        desc=f"{doing} {writer.called}",
        unit=writer.called.removesuffix("s"),
        disable=not state.is_main_process,
    )
    with bar:
        for start in range(done, writer.length, block):
            first = start + batch_size * state.process_index
            numbers = range(first, min(first + batch_size, writer.length))
            end = min(start + block, writer.length)
            try:
                if numbers:
                    writer.write(first, make(numbers))
                state.wait_for_everyone()
                if state.is_main_process:
                    writer.reached(end)
            except OSError as error:
                raise no_room(writer, error) from error
            bar.update(end - start)


def no_room(writer: StoreWriter, error: OSError) -> RunError:
    """The error to raise where a store cannot be written."""
    return RunError(
        f"could not write {writer.called} into {writer.stage} ({error}): make room, and run the same command to resume"
    )


def _claim(writer: StoreWriter, held: ExitStack, wait: float) -> int | None:
    """The number of rows that are there, other runs being locked out; None if all are; BUSY if they lock us out."""
    try:
        if writer.is_whole:
            return None
        held.enter_context(lock_of(Path(f"{writer.path}.lock")).acquire(timeout=wait))
        return None if writer.is_whole else writer.begin({})
    except Timeout:
        return BUSY
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the {writer.called} {writer.path} cannot be written ({reason}): pass a writable folder with --cache_dir"
        ) from error


def _finish(writer: StoreWriter, finish: Callable[[], None]) -> None:
    try:
        finish()
    except OSError as error:
        raise no_room(writer, error) from error
