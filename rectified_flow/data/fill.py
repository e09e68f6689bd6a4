"""Write stores with all processes together. Writing resumes after a kill, and one rename publishes a finished store."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.format import INFO_FILE, LABELS_FILE, RECIPE_FILE
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import BusyError
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import LOCK_TIMEOUT, flush, writing
from rectified_flow.system.machine import require_disk
from rectified_flow.system.terminal import progress_bar

REMEDY = "pass a writable folder with --cache_dir"
Rows = Mapping[str, np.ndarray[Any, Any]]
"""Consecutive rows ``[b, ...]`` by entry, of the type to store."""


def key_of(*shaped_by: object) -> str:
    """Return a hash of everything that determines the rows of a store, for the name of the store."""
    return blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()


class StoreWriter(Artifact):
    """A store that is written row by row, from one process or several; writing resumes after a kill.

    Args:
        path: folder of the finished store.
        length: number of rows, or an upper limit of it.
        kind: name of the rows in the plural, such as ``latents``, and the kind of the artifact.
        recipe: plain data to keep in ``recipe.json``; None keeps no such file. A store with a recipe is in a folder
            that the user chose, so a damaged one is refused instead of replaced.
        documents: names of further files, which the caller writes.

    Attributes:
        shapes: shape of a row by file, ``NAME.DTYPE``; known when the first rows have been made.
    """

    def __init__(
        self, path: Path, length: int, kind: str, recipe: Mapping[str, Any] | None = None, documents: Sequence[str] = ()
    ) -> None:
        files = (LABELS_FILE, INFO_FILE, *[RECIPE_FILE] * (recipe is not None), *documents)
        super().__init__(path, kind, files, replaceable=recipe is None)
        self.length, self.recipe, self.shapes = length, recipe, dict[str, Sequence[int]]()

    def prepare(self) -> int:
        """Make the stage unless it exists, and return the number of rows in it. Call in one process only.

        Raises:
            OSError: if the stage cannot be made.
            UsageError: if something foreign is in its place.
        """
        progress = self.begin()
        if "shapes" in progress:
            self._declare(progress["shapes"])
            return int(progress["done"])
        if self.recipe is not None:
            (self.stage / RECIPE_FILE).write_text(json.dumps(self.recipe, indent=1))
        return 0

    def allocate(self, rows: Rows) -> None:
        """Create a file for each entry of the first rows. Call in one process only.

        Raises:
            OSError: if the files cannot be created.
            UsageError: if the disk has no room for them.
        """
        size = self.length * sum(values[0].nbytes for values in rows.values())
        remedy = "make room, or store fewer or smaller rows"
        require_disk(size, self.path.parent, f"{self.length} rows of the {self.kind}", remedy)
        self._declare({f"{name}.{values.dtype}": values.shape[1:] for name, values in rows.items()})
        self.written(0)  # recorded first: a stage never has a file that its marker does not list
        for name in self.shapes:
            (self.stage / name).touch()

    def _declare(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes, self.files = dict(shapes), (*shapes, *self.files)

    def write(self, first: int, rows: Rows, *, durable: bool = True) -> None:
        """Write consecutive rows.

        Args:
            first: number of the first of these rows.
            rows: the rows.
            durable: whether to wait until the rows are on the disk.

        Raises:
            OSError: if the disk is full.
        """
        for name, values in rows.items():
            file = self.stage / f"{name}.{values.dtype}"
            with file.open("r+b") as opened:  # on a full disk, a write to a memory map would crash the process
                opened.seek(first * values[0].nbytes)
                opened.write(values.tobytes())
            if durable:
                flush(file)

    def written(self, count: int) -> None:
        """Record that the first ``count`` rows are written and flushed. Call in one process only."""
        self.reached({"done": count, "shapes": self.shapes})

    def complete(self, labels: np.ndarray[Any, np.dtype[np.int64]] | None = None, **info: Any) -> None:
        """Write the labels and ``info.json``, once all rows are written, and finish. Call in one process only.

        Args:
            labels: int64 ``[n]``; None without labels.
            info: further fields of :class:`StoreInfo`.

        Raises:
            OSError: if the disk is full.
        """
        labels = np.full(self.length, -1) if labels is None else labels
        np.save(self.stage / LABELS_FILE, labels)
        document = {"content": hash_contents(self.stage, *self.shapes), "length": len(labels), "rows": self.shapes}
        (self.stage / INFO_FILE).write_text(json.dumps(document | info, indent=1))
        self.finish()


def hash_contents(path: Path, *names: str) -> str:
    """Return the hash of the rows in the named files of a store, and of its labels."""
    content = blake2b(digest_size=16)
    for name in names:
        with (path / name).open("rb") as file:
            file_digest(file, lambda: content)  # adds the file to the same hash
    content.update(repr(np.load(path / LABELS_FILE).tolist()).encode())
    return content.hexdigest()


@contextmanager
def claimed(store: StoreWriter, remedy: str = REMEDY) -> Iterator[bool]:
    """Yield on every process whether rows are missing, after waiting for another run that writes them. Collective.

    If rows are missing, other runs are locked out inside the block.

    Raises:
        UsageError: if the folder of the store cannot be written.
    """
    state = PartialState()
    with ExitStack() as held:

        def claim(timeout: float) -> bool | None:
            with suppress(BusyError):
                return held.enter_context(store.claimed(remedy, timeout))
            return None

        is_missing = on_main(state, lambda: claim(timeout=0))
        if is_missing is None and state.is_main_process:
            tqdm.write(f"waiting for another run that is writing the {store.kind} {store.path}")
        while is_missing is None:  # polled, so that no process waits longer than this in a collective
            is_missing = on_main(state, lambda: claim(timeout=LOCK_TIMEOUT))
        yield is_missing


def fill(
    store: StoreWriter,
    make: Callable[[Sequence[int]], Mapping[str, Tensor]],
    describe: Callable[[], Mapping[str, Any]],
    *,
    doing: str = "encoding",
    batch_size: int,
) -> None:
    """Write the missing rows of a store that is claimed, record the progress after each block, and finish. Collective.

    Args:
        store: writer of the store.
        make: function that makes the rows of consecutive numbers, ``[b, ...]`` by entry in the type to store.
        describe: function that returns the arguments of :meth:`StoreWriter.complete`, called on the main process.
        doing: verb for the progress bar.
        batch_size: number of rows that each process makes at once.

    Raises:
        RunError: if the disk is full.
    """
    state = PartialState()
    block = batch_size * state.num_processes
    with writing(f"{store.kind} in {store.stage}", remedy="make room, and run the same command to resume"):
        done = on_main(state, store.prepare)
        bar = progress_bar(
            total=store.length,
            initial=done,
            desc=f"{doing} {store.kind}",
            unit=store.kind.removesuffix("s"),
            disable=not state.is_main_process,
        )
        with bar:
            for start in range(done, store.length, block):
                first = start + batch_size * state.process_index
                end = min(start + block, store.length)
                numbers = range(first, min(first + batch_size, store.length))
                rows = {name: values.cpu().numpy() for name, values in make(numbers).items()} if numbers else {}
                if start == 0:
                    on_main(state, partial(store.allocate, rows))
                store.write(first, rows)
                state.wait_for_everyone()
                if state.is_main_process:
                    store.written(end)
                bar.update(end - start)
        on_main(state, lambda: store.complete(**describe()))
