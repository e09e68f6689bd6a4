"""Fill a store on all processes together."""

from collections.abc import Callable, Mapping, Sequence

from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.errors import RunError
from rectified_flow.progress import progress_bar


def fill(
    writer: StoreWriter,
    state: PartialState,
    done: int,
    make: Callable[[Sequence[int]], Mapping[str, Tensor]],
    *,
    doing: str,
    batch_size: int,
) -> None:
    """Write all rows from number ``done`` on, and record the progress after each block. Collective.

    Args:
        writer: of the store; its files are there.
        state: of the processes.
        done: rows that are written.
        make: the rows of some consecutive numbers, ``[b, ...]`` by file.
        doing: what is done, for the progress bar.
        batch_size: rows that each process makes at once.

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
