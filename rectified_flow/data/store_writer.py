"""Write stores, with all processes together or by decoding the images of a source once.

Writing by all processes resumes after a kill, and one rename publishes a finished store. The name of a store contains
a hash of everything that determines its contents. A changed source, size or split therefore gets a store of its own.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple
from errno import EIO
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.census import counted_sentence
from rectified_flow.data.framing import Framing
from rectified_flow.data.sources import TRANSPARENT, WHITE, Fitted, ImageSource, PictureRows, Row
from rectified_flow.data.store import INFO_FILE, LABELS_FILE, ORIGINALS_FILE, RECIPE_FILE, Original
from rectified_flow.distributed import any_rank, launched_processes, on_main
from rectified_flow.errors import BusyError, UsageError, first_line
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import LOCK_TIMEOUT, PASSING, flush, usable_path, writing
from rectified_flow.system.machine import processors, require_disk
from rectified_flow.system.pictures import FORMATS
from rectified_flow.system.signals import Interrupted, raise_if_stop_requested, stop_requested
from rectified_flow.system.terminal import progress_bar, warn_once

REMEDY = "pass a writable folder with `cache_dir`"
Rows = Mapping[str, np.ndarray[Any, Any]]
"""Consecutive rows ``[b, ...]`` by entry, of the type to store."""


def key_of(*shaped_by: object) -> str:
    """Return a hash of everything that determines the rows of a store, for the name of the store."""
    return blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()


class StoreWriter(Artifact):
    """A store of at most ``length`` rows of a ``kind``, such as latents; writing resumes after a kill.

    A store with a recipe, plain data that ``recipe.json`` keeps, is in a folder that the user chose, so a damaged one
    is refused instead of replaced. The caller writes the further ``documents``. The attribute ``shapes`` has the shape
    of a row by file, ``NAME.DTYPE``, when the first rows have been made.
    """

    def __init__(
        self, path: Path, length: int, kind: str, recipe: Mapping[str, Any] | None = None, documents: Sequence[str] = ()
    ) -> None:
        files = (LABELS_FILE, INFO_FILE, *[RECIPE_FILE] * (recipe is not None), *documents)
        super().__init__(path, kind, files, replaceable=recipe is None)
        self.length, self.recipe, self.shapes = length, recipe, dict[str, Sequence[int]]()

    def prepare(self) -> int:
        """Make the stage unless it exists, and return the number of rows in it. Call in one process only."""
        progress = self.begin()
        if "shapes" in progress:
            self._declare(progress["shapes"])
            return int(progress["done"])
        if self.recipe is not None:
            (self.stage / RECIPE_FILE).write_text(json.dumps(self.recipe, indent=1))
        return 0

    def allocate(self, rows: Rows) -> None:
        """Create a file for each entry of the first rows. Call in one process only."""
        size = self.length * sum(values[0].nbytes for values in rows.values())
        require_disk(size, self.path.parent, f"{self.length} rows of the {self.kind}")
        self._declare({f"{name}.{values.dtype}": values.shape[1:] for name, values in rows.items()})
        self.written(0)  # recorded first: a stage never has a file that its marker does not list
        for name in self.shapes:
            (self.stage / name).touch()

    def _declare(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.shapes, self.files = dict(shapes), (*shapes, *self.files)

    def write(self, first: int, rows: Rows, *, durable: bool = True) -> None:
        """Write consecutive rows, starting at row ``first``, and flush them unless progress is not recorded."""
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
        """Write the labels, int64 ``[n]``, and ``info.json`` with more fields of :class:`StoreInfo`, and finish.

        Call in one process only, once all rows are written.
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
    """
    state, waiting = PartialState(), f"another run is writing the {store.kind} {store.path}: waiting until it ends"
    with ExitStack() as held:

        def claim() -> bool | None:
            with suppress(BusyError):
                return held.enter_context(store.claimed(remedy, LOCK_TIMEOUT))
            warn_once(waiting)
            return None

        while (is_missing := on_main(state, claim)) is None:
            pass  # polled, so that no process waits longer than the timeout in a collective
        yield is_missing


def fill(
    store: StoreWriter,
    make: Callable[[Sequence[int]], Mapping[str, Tensor]],
    info: Callable[[], Mapping[str, Any]],
    *,
    doing: str = "encoding",
    batch_size: int,
) -> None:
    """Write the missing rows of a store that is claimed, record the progress after each block, and finish. Collective.

    Each process makes ``batch_size`` consecutive rows at once, ``[b, ...]`` by entry in the type to store. The main
    process calls ``info`` for the arguments of :meth:`StoreWriter.complete`. The progress bar shows ``doing``.
    """
    state = PartialState()
    block = batch_size * state.num_processes
    with writing(f"{store.kind} in {store.stage}", remedy="make room, and run the same command to resume"):
        done = on_main(state, store.prepare)
        what, is_silent = f"{doing} {store.kind}", not state.is_main_process
        with progress_bar(total=store.length, initial=done, desc=what, unit="row", disable=is_silent) as bar:
            for start in range(done, store.length, block):
                first = start + batch_size * state.process_index
                end = min(start + block, store.length)
                numbers = range(first, min(first + batch_size, store.length))
                rows = {name: values.cpu().numpy() for name, values in make(numbers).items()} if numbers else {}
                if start == 0:
                    on_main(state, partial(store.allocate, rows))
                store.write(first, rows)
                request = stop_requested()  # no signal reports that the launcher exited
                is_stopped = any_rank(state, request is not None)
                if state.is_main_process:
                    store.written(end)
                if is_stopped:
                    raise Interrupted(request or "on another process")
                bar.update(end - start)
        on_main(state, lambda: store.complete(**info()))


STORE_VERSION, CHUNK = 10, 64  # version of the stored images, and number of images that are decoded at once


def default_cache_dir() -> Path:
    """Return the default folder of stores: ``$RECTIFIED_FLOW_CACHE``, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"  # an empty variable is one that is not set
    path = Path(os.environ.get("RECTIFIED_FLOW_CACHE") or f"{base}/rectified-flow")
    return usable_path("the default `cache_dir`", path)


def open_store(
    source: ImageSource,
    framing: Framing | int,
    *,
    cache_dir: Path | None = None,
    skip_broken_images: bool = False,
    limit: int | None = None,
) -> Path:
    """Return the folder of the store of ``source``. The store is built first if it does not exist or is damaged.

    One process builds while others wait for its lock; on a file system without locks, only a run of one process builds.
    A number as the framing is the side of a square [px]. With a
    ``limit``, only so many images, spread over the source, are read.
    """
    framing = Framing(framing, framing) if isinstance(framing, int) else framing
    store = _store_of(source, framing, cache_dir, limit, skip_broken_images=skip_broken_images)
    with store.claimed(REMEDY, is_contested=launched_processes() > 1) as is_missing:
        if is_missing:
            with store.building():
                _build(store, source, source.rows(framing), limit, skip_broken_images)
    return store.path


def find_store(source: ImageSource, framing: Framing, cache_dir: Path | None = None) -> Path | None:
    """Return the folder of a store of the images of ``source``; None if it is not built yet."""
    both = (_store_of(source, framing, cache_dir, None, skip_broken_images=skips) for skips in (False, True))
    return next((store.path for store in both if store.is_whole), None)


def _store_of(
    source: ImageSource,
    framing: Framing,
    cache_dir: Path | None,
    limit: int | None,
    *,
    skip_broken_images: bool,
) -> StoreWriter:
    """Return the store of the images of ``source``, which may be missing."""
    chosen = [*sorted(source.excluded), *([] if limit is None else [limit])]
    rows = source.rows(framing)
    skips = skip_broken_images and FORMATS  # a new plugin may read the skipped files
    key = key_of(STORE_VERSION, source.fingerprint, *astuple(framing), skips, *rows.key, *chosen)
    slug = "".join(c if c.isalnum() else "-" for c in source.name).strip("-")[-40:]
    cache_dir = default_cache_dir() if cache_dir is None else usable_path("`cache_dir`", cache_dir)
    path = cache_dir / f"{slug}-{framing.size_text}px-{key}"
    return StoreWriter(path, len(source), "image store", documents=[ORIGINALS_FILE])


def _decoded(source: ImageSource, rows: PictureRows, skip_broken_images: bool, index: int) -> tuple[Fitted, int] | str:
    """Return the row of an image, and its class or -1; the reason if it is broken and to be skipped."""
    try:
        image, label = source.load(index)
        if not -1 <= label < len(source.class_names):
            raise UsageError(f"its label is {label}, outside the {len(source.class_names)} classes numbered from 0")
        return rows.fit(image), label
    except Exception as error:  # decoders raise exceptions of many types
        reason = getattr(error, "strerror", None) or first_line(error)
        # A temporary error must not remove an image from the store. EIO may come from a network disk.
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in (*PASSING, EIO):
            advice = "try again, or leave it out with `exclude`"
            raise UsageError(f"{source.place_of(index)} cannot be read now ({reason}): {advice}") from error
        if skip_broken_images:
            return reason
        broken = f"broken image {source.place_of(index)} ({reason})"
        raise UsageError(f"{broken}: remove it, or pass `skip_broken_images`") from error


def _build(
    store: StoreWriter,
    source: ImageSource,
    rows: PictureRows,
    limit: int | None,
    skip_broken_images: bool,
) -> None:
    """Decode the images that are left into the store, and note the names and sizes of the originals."""
    numbers, every = source.numbers(limit), len(source.numbers())
    store.length = len(numbers)

    decode = partial(_decoded, source, rows, skip_broken_images)
    kept, broken, contents, equal = list[tuple[Original, int]](), dict[str, str](), set[bytes](), list[str]()
    remarked = defaultdict[str, list[str]](list)
    bar = progress_bar(total=len(numbers), desc=f"preparing {source.name}", unit="img")
    with bar, ThreadPoolExecutor(processors()) as pool:  # the decoder releases the GIL
        for start in range(0, len(numbers), CHUNK):
            raise_if_stop_requested()
            chunk, written = numbers[start : start + CHUNK], list[Row]()
            for index, decoded in zip(chunk, pool.map(decode, chunk), strict=True):
                bar.update()
                if isinstance(decoded, str):
                    broken[source.place_of(index)] = decoded
                    continue
                (row, size, remarks), label = decoded
                name, content = source.name_of(index), blake2b(row.tobytes(), digest_size=16).digest()
                is_repeated = content in contents
                rows.add(row, is_repeated=is_repeated)
                for remark in remarks:
                    remarked[remark].append(name)
                written.append(row)
                kept.append((Original(name, *size), label))
                equal += [name] * is_repeated
                contents.add(content)
            if written:
                images = {"images": np.stack(written)}
                if not store.shapes:
                    store.allocate(images)
                store.write(len(kept) - len(written), images, durable=False)  # the whole store is flushed at the end
    if not kept:
        raise UsageError(f"none of the {len(broken)} images in {source.name} could be read")
    remedies = {TRANSPARENT: "save them with visible pixels", WHITE: "pass `alpha`, which latents do not have"}
    for what, remedy in remedies.items():
        if len(remarked.get(what, [])) == len(kept):
            raise UsageError(f"all {len(kept)} pictures of {source.name} are {what}: {remedy}")
    # The census counts transparent rows, if they have an alpha channel.
    shown = [what for what in remarked if what != TRANSPARENT or not rows.framing.alpha]
    skipped = f"skipped {len(broken):,} broken {'image' if len(broken) == 1 else 'images'}"
    noted = [f"{skipped}; the first is {each} ({broken[each]})" for each in [*broken][:1]]
    if len(numbers) < every:
        noted += [f"read {len(numbers):,} of {every:,} images, spread over all of them, because of `limit`"]
    noted += [counted_sentence(len(equal), "equal to an earlier one", each) for each in equal[:1]]
    noted += [counted_sentence(len(remarked[what]), what, remarked[what][0]) for what in shown]
    originals, labels = zip(*kept, strict=True)
    names = [original.name for original in originals]
    (store.stage / ORIGINALS_FILE).write_text(json.dumps(originals))
    store.complete(
        np.asarray(labels, dtype=np.int64),
        source=source.name,
        image_size=min(rows.framing.width, rows.framing.height),
        class_names=list(source.class_names) if min(labels) >= 0 else [],
        skipped=[*broken],
        framing=asdict(rows.framing),
        notes=[*noted, *rows.notes(names)],
        **rows.info(source.name, {original[1:] for original in originals}),
    )
