"""Artifacts: folders that are whole or absent, such as image stores, teachers' paths, text indexes and checkpoints.

An artifact is built in a *stage*, the folder ``NAME.building`` beside its place. The stage carries a marker,
``building.json``, with the kind of the artifact, the names of its files and the progress of the build, so that a build
that was killed resumes. When all files are written, a manifest, ``manifest.json``, records the size and the SHA-256 of
each, everything is flushed to the disk, and one rename gives the stage its name. A reader therefore never sees half an
artifact, whenever the power fails.

Removal follows one rule: the project removes only files that the manifest or marker in the very folder lists, of the
kind that is to be removed. A folder that holds anything else (a file of the user's, a hidden file, a link, a subfolder)
is refused with an error that names it, and is left exactly as it is. A damaged artifact in a folder that the user chose
is refused too, since the user may have put the altered file there. Nothing here calls ``rmtree``.

A typical build::

    artifact = Artifact(path, "text index", ("starts.uint64", "info.json"))
    with artifact.claimed("set RECTIFIED_FLOW_CACHE to a folder that can be written") as is_missing:
        if is_missing:
            progress = artifact.begin()  # {} at first, then the last record of `reached`
            ...  # write files into artifact.stage; after each part, flush it, then
            artifact.reached({"done": 100})
            artifact.finish()
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from os import utime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tqdm.auto import tqdm

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.system.files import flush, hash_file, locked, read_document, reading, replace_file, writing

MANIFEST, MARKER = "manifest.json", "building.json"
CHECKPOINT = "checkpoint"  # kind of a checkpoint
SMALL = 2**20  # size below which a file is hashed at each verification, whatever its time [bytes]
LEFTOVER = re.compile(r"\.tmp\w{6}|\.(building|manifest)\.json\.[0-9a-f]{8}\.tmp")
"""Temporary files of safetensors and of :func:`replace_file` that a killed build leaves in its stage."""
FIRST_LEFTOVER = re.compile(r"\.building\.json\.[0-9a-f]{8}\.tmp")
"""Temporary file that a build leaves if it is killed before its stage has the marker."""

Natural = Annotated[int, Field(ge=0, lt=2**53)]
FileName = Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")]  # name of a file in the folder itself


@dataclass(frozen=True)
class FileRecord:
    """Size [bytes], hash and time of modification [s] of a finished file.

    A large file with the recorded time of modification is not hashed again. Manifests of checkpoints record no times,
    so each file of a checkpoint is hashed when it is read.
    """

    size: Natural
    sha256: str
    time: Natural | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    files: dict[FileName, FileRecord]
    kind: str
    format: Natural = 1


@dataclass(frozen=True)
class Marker:
    """The contents of ``building.json``."""

    kind: str
    files: list[FileName]
    progress: dict[str, Any]
    source: dict[str, Any] = field(default_factory=dict)  # only commit c5b7768 wrote it


class Artifact:
    """An artifact to be built or read.

    Args:
        path: folder of the finished artifact.
        kind: kind of the artifact in words, such as ``image store``.
        files: names of the files that it consists of, besides the manifest.
        replaceable: replace a damaged artifact in a new build; otherwise :meth:`begin` refuses it.
    """

    def __init__(self, path: Path, kind: str, files: Sequence[str], *, replaceable: bool = True) -> None:
        self.path, self.kind, self.files, self.replaceable = path, kind, tuple(files), replaceable

    @property
    def stage(self) -> Path:
        """Folder in which the artifact is built."""
        return self.path.with_name(f"{self.path.name}.building")

    @property
    def is_whole(self) -> bool:
        """Whether the artifact exists and is undamaged."""
        return find_damage(self.path, self.kind) is None

    @contextmanager
    def claimed(self, remedy: str, timeout: float = -1) -> Iterator[bool]:
        """Yield whether the artifact must be built; if so, other builders are locked out inside the block.

        A whole artifact is not locked, so that it can be read in a folder that cannot be written. An OSError inside the
        block is raised as a UsageError.

        Args:
            remedy: advice for the error message, such as "pass a writable folder with --cache_dir".
            timeout: time to wait for another builder [s]; negative waits as long as it takes.
        """
        if self.is_whole:
            yield False
            return
        with writing(f"the {self.kind} {self.path}", UsageError, remedy):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            busy = f"another run is writing the {self.kind} {self.path}"
            with locked(self.path.with_name(f"{self.path.name}.lock"), busy, timeout, remedy):
                yield not self.is_whole  # another process may have built it meanwhile

    def begin(self) -> dict[str, Any]:
        """Make the stage, or find that of an earlier build. Call with the lock held, in one process only.

        Returns:
            The progress that :meth:`reached` recorded last; empty for a new stage.
        """
        for place in (self.stage, _removing(self.path)):  # foreign files are refused before the work
            owned_files(place, self.kind)
        damage = find_damage(self.path, self.kind) if owned_files(self.path, self.kind) else None
        if damage is not None:
            if not self.replaceable:
                raise UsageError(f"{self.path} is damaged ({damage}): move the folder away, or choose another")
            tqdm.write(f"warning: the {self.kind} {self.path} is damaged ({damage}) and is made again")
        with suppress(DamageError):  # there is no stage yet
            progress = read_document(self.stage / MARKER, Marker).progress
            if progress:
                return progress
        remove(self.stage, self.kind)
        self.stage.mkdir(parents=True)
        self.reached({})
        return {}

    @contextmanager
    def building(self) -> Iterator[None]:
        """Create the stage of a build that does not resume, and remove the stage if the block fails."""
        remove(self.stage, self.kind)
        self.begin()
        try:
            yield
        except BaseException:
            with suppress(OSError, UsageError):
                remove(self.stage, self.kind)
            raise

    def reached(self, progress: Mapping[str, Any]) -> None:
        """Record the progress of the build, whose files must be flushed before. Call in one process only."""
        marker = Marker(self.kind, [*self.files], dict(progress))
        replace_file(self.stage / MARKER, json.dumps(asdict(marker)))

    def finish(self) -> None:
        """Seal and publish the artifact. Call in one process only."""
        self.seal()
        self.publish()

    def seal(self) -> None:
        """Write the manifest of the stage, and flush all files."""
        for path in owned_files(self.stage, self.kind):
            if path.name not in (*self.files, MARKER):  # a leftover of a killed build
                path.unlink()
        write_manifest(self.stage, self.kind, self.files)
        for path in (*self.stage.iterdir(), self.stage):
            flush(path)

    def publish(self) -> None:
        """Give the sealed stage its name, in the place of an earlier artifact if there is one."""
        remove(self.path, self.kind)
        self.stage.rename(self.path)
        flush(self.path.parent)
        (self.path / MARKER).unlink()


def write_manifest(folder: Path, kind: str, names: Sequence[str]) -> None:
    """Write the manifest of the named files of ``folder``."""
    files = dict[str, dict[str, Any]]()
    for name in names:
        stat = (folder / name).stat()
        time = {} if kind == CHECKPOINT else {"time": int(stat.st_mtime)}
        files[name] = {"size": stat.st_size, "sha256": hash_file(folder / name), **time}
    replace_file(folder / MANIFEST, json.dumps({"kind": kind, "format": 1, "files": files}, indent=1))


def read_manifest(folder: Path, kind: str = CHECKPOINT) -> Manifest:
    """Return the manifest of the artifact in ``folder``."""
    manifest = read_document(folder / MANIFEST, Manifest)
    if manifest.kind != kind:
        raise DamageError(f"{folder} holds the {manifest.kind}, not the {kind}")
    return manifest


def is_artifact(folder: Path) -> bool:
    """Return whether ``folder`` has the manifest of a finished artifact of any kind."""
    with suppress(DamageError):
        return bool(read_document(folder / MANIFEST, Manifest).files)
    return False


def find_damage(folder: Path, kind: str = CHECKPOINT, names: Collection[str] | None = None) -> str | None:
    """Return the damage of an artifact in words, or None.

    The sizes of all files are compared. Files are hashed if their times are not the recorded ones, as after copying.
    """
    try:
        with reading(folder):
            for name, expected in read_manifest(folder, kind).files.items():
                stat = (folder / name).stat()
                if stat.st_size != expected.size:
                    return f"{name} has the wrong size"
                as_recorded = int(stat.st_mtime) == expected.time
                if (names is not None and name not in names) or (as_recorded and expected.size > SMALL):
                    continue
                if hash_file(folder / name) != expected.sha256:
                    return f"{name} was altered"
                if expected.time is not None and not as_recorded:
                    with suppress(OSError):  # in a folder that cannot be written, the file is hashed each time
                        utime(folder / name, (expected.time, expected.time))
    except DamageError as error:
        return str(error)
    return None


def owned_files(folder: Path, kind: str) -> list[Path]:
    """Return the files of a finished or half-built artifact, all of which the project wrote."""
    if not folder.exists() and not folder.is_symlink():
        return []
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"{folder} is in the way of the {kind}, and is no folder: move it away")
    known = set[str]()
    proofs: dict[str, type[Manifest] | type[Marker]] = {MANIFEST: Manifest, MARKER: Marker}
    for name, schema in proofs.items():
        with suppress(DamageError):  # an unreadable document lists no files
            document = read_document(folder / name, schema)
            known |= {name, *document.files} if document.kind == kind else set()
    leftover = LEFTOVER if MARKER in known and MANIFEST not in known else FIRST_LEFTOVER
    entries = sorted(folder.iterdir())
    for entry in entries:
        is_known = entry.name in known or (MANIFEST not in known and leftover.fullmatch(entry.name))
        if entry.is_symlink() or not entry.is_file() or not is_known:
            foreign = f"{entry.name}, which this project did not write"
            raise UsageError(f"{folder} is in the way of the {kind}, and holds {foreign}: move it away")
    return entries


def remove(folder: Path, kind: str) -> None:
    """Remove a finished or half-built artifact, if every file in it is proven to be the project's.

    Another process sees all of it or nothing, since it first gets another name.
    """
    removing = _removing(folder)
    owned_files(folder, kind)
    _unlink(removing, kind)  # left by a process that was killed while it removed
    with suppress(FileNotFoundError):
        folder.rename(removing)
    _unlink(removing, kind)


def _removing(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.removing")


def _unlink(folder: Path, kind: str) -> None:
    for path in sorted(owned_files(folder, kind), key=lambda path: path.name in (MANIFEST, MARKER)):
        path.unlink()  # the proof of ownership last, so that a killed removal can be repeated
    with suppress(FileNotFoundError):
        folder.rmdir()
