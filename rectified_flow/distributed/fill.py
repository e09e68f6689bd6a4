"""Fill a store on all processes together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from accelerate import PartialState
from filelock import Timeout
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.store import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.system.files import LOCK_TIMEOUT, writing
from rectified_flow.system.terminal import progress_bar

Make = Callable[[Sequence[int]], Mapping[str, Tensor]]
"""A function that makes the rows of consecutive numbers, ``[b, ...]`` by file."""
REMEDY = "pass a writable folder with --cache_dir"
BUSY = -1


@contextmanager
def claimed(writer: StoreWriter, state: PartialState) -> Iterator[int | None]:
    """Lock other runs out of a store of the cache inside the block, after waiting for one that fills it. Collective.

    Yields:
        The number of rows that are there; None for a whole store, which needs no lock.

    Raises:
        UsageError: if the folder of the store cannot be written.
    """
    with ExitStack() as held:
        done = on_main(state, lambda: _claim(writer, held, timeout=0))
        if done == BUSY and state.is_main_process:
            tqdm.write(f"waiting for another run that writes these {writer.kind}")
        while done == BUSY:  # in turns, so that no process waits longer in a collective
            done = on_main(state, lambda: _claim(writer, held, timeout=LOCK_TIMEOUT))
        yield done


def fill(
    writer: StoreWriter,
    state: PartialState,
    done: int | None,
    make: Make,
    finish: Callable[[], None],
    *,
    doing: str,
    batch_size: int,
) -> None:
    """Write all rows from number ``done`` on, record the progress after each block, and finish. Collective.

    Args:
        writer: writer of the store, locked and prepared.
        state: state of the processes.
        done: number of rows that are there; None for a whole store, which is left as it is.
        make: function that makes the rows.
        finish: function that completes the store; it is called on the main process.
        doing: verb for the progress bar, such as ``encoding``.
        batch_size: number of rows that each process makes at once.

    Raises:
        RunError: if the disk is full.
    """
    if done is None:
        return
    block = batch_size * state.num_processes
    bar = progress_bar(
        total=writer.length,
        initial=done,
        desc=f"{doing} {writer.kind}",
        unit=writer.kind.removesuffix("s"),
        disable=not state.is_main_process,
    )
    with writing(f"{writer.kind} in {writer.stage}", remedy="make room, and run the same command to resume"):
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


def _claim(writer: StoreWriter, held: ExitStack, timeout: float) -> int | None:
    """Return the number of rows that are there, with the store locked; None for a whole store, BUSY if it is locked."""
    with writer.writable(REMEDY):
        if writer.is_whole:
            return None
        try:
            held.enter_context(writer.locked(REMEDY, timeout))
        except Timeout:
            return BUSY
        return None if writer.is_whole else writer.prepare()
