"""The manifest of a folder is the one proof that a file is this project's. Any other file is the user's.

A manifest lists the files that programs wrote into its folder, in one format for two kinds of folders:

* An *artifact* is whole or absent: a checkpoint, an image store, a teacher's paths. Its ``manifest.json`` has the size
  and the SHA-256 of each file, so that a copy proves its own contents.
* A folder of *outputs* grows: that of a run, of samples, of an exported model. Its hidden ``.manifest.json`` has names
  only. It is hidden because names prove nothing about files that were copied together with it, one by one.

A program replaces or removes only files that the manifest in the very folder lists. If anything else is in the way (a
file of the user's, a hidden file, a link, a subfolder), the program raises an error that names it, and leaves it
exactly as it is. Nothing here calls ``rmtree``.

**Outputs.** :func:`claim` adds names to the manifest before the files are written, so a killed program leaves no file
that is not listed. :func:`write_output` claims and writes.

**Artifacts.** An artifact is built in a *stage*, the folder ``NAME.building`` beside its place. The manifest of the
stage has the names of the files and the progress of the build, so that a build that was killed resumes. When all files
are written, their sizes and hashes are added, everything is flushed to the disk, and one rename gives the stage its
name. A reader therefore never sees half an artifact, whenever the power fails. A damaged artifact in a folder that the
user chose is refused instead of replaced, since the user may have put the altered file there. A typical build::

    artifact = Artifact(path, "text index", ("starts.uint64", "info.json"))
    with artifact.claimed("set RECTIFIED_FLOW_CACHE to a folder that can be written") as is_missing:
        if is_missing:
            progress = artifact.begin()  # {} at first, then the last record of `reached`
            ...  # write files into artifact.stage; after each part, flush it, then
            artifact.reached({"done": 100})
            artifact.finish()
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from os import utime
from os.path import lexists
from pathlib import Path
from typing import Annotated

from pydantic import Field
from tqdm.auto import tqdm

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.registry import Document
from rectified_flow.system.files import flush, hash_file, locked, read_document, reading, replace_file, writing

MANIFEST, OUTPUTS_MANIFEST = "manifest.json", ".manifest.json"
CHECKPOINT, OUTPUTS = "checkpoint", "outputs"
"""Kinds of a checkpoint and of a folder that grows."""
SMALL = 2**20  # size below which a file is hashed at each verification, whatever its time [bytes]
TEMPORARY = ".tmp??????"  # name of a file that safetensors leaves in a stage if it is killed

Natural = Annotated[int, Field(ge=0, lt=2**53)]
FileName = Annotated[str, Field(pattern=r"^(\.{0,2}[^./\x00]|\.{3})[^/\x00]*$")]  # in the folder itself: not . or ..


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
    """The contents of a manifest."""

    kind: str
    files: dict[FileName, FileRecord | None]
    """The files and subfolders by name; None for one that may still grow or be replaced."""
    progress: Document = field(default_factory=dict)
    """The state from which an unfinished build resumes; empty for outputs."""
    format: Natural = 1


def claimed_names(folder: Path) -> set[str]:
    """Return the names of the files and subfolders that programs wrote into a folder of outputs."""
    path = folder / OUTPUTS_MANIFEST
    return {*read_document(path, Manifest).files} if lexists(path) else set()


def written_names(folder: Path, names: Collection[str]) -> set[str]:
    """Return the names of the files in an artifact or in a folder of outputs that programs wrote.

    Args:
        folder: the folder.
        names: the names of all files in it. Without a manifest among them, nothing is read.
    """
    written = set[str]()
    for name in {MANIFEST, OUTPUTS_MANIFEST}.intersection(names):
        with suppress(UsageError):  # a file of the user's, or of another program
            written |= {name, *read_document(folder / name, Manifest).files}
    return written


def claim(folder: Path, names: Iterable[str], *, proven: bool = False) -> None:
    """Record that programs write files or subfolders of these names into ``folder``. Call in one process only.

    Args:
        folder: a folder of outputs.
        names: the names, each of a file, a subfolder, or a file in a subfolder such as ``flow/pipeline.py``.
        proven: the caller has another proof that existing files of these names are this project's.
    """
    check_claim(folder, [])  # before a lock is made, which would be a file in a checkpoint
    paths = list(names)
    names = list(dict.fromkeys(path.partition("/")[0] for path in paths))
    with writing(folder / OUTPUTS_MANIFEST), locked(folder, "manifest"):
        check_claim(folder, names, proven=proven)
        listed = claimed_names(folder)
        if not listed.issuperset(names):
            manifest = Manifest(OUTPUTS, dict.fromkeys(sorted(listed.union(names))))
            replace_file(folder / OUTPUTS_MANIFEST, json.dumps(asdict(manifest), indent=1))
    for name in names:
        if inside := [path.partition("/")[2] for path in paths if path.startswith(f"{name}/")]:
            (folder / name).mkdir(exist_ok=True)
            claim(folder / name, inside)


def check_claim(folder: Path, names: Iterable[str], *, proven: bool = False) -> None:
    """Raise a UsageError if :func:`claim` would, without writing anything; the folder need not exist."""
    if is_artifact(folder):
        raise UsageError(f"{folder} is a checkpoint or another complete artifact: choose another folder")
    listed = claimed_names(folder)
    for name in names:
        path = folder / name
        linked = path.is_symlink() and not path.is_dir()  # writing would replace the link or its target
        if linked or (lexists(path) and not proven and name not in listed):
            raise UsageError(f"{path} would be overwritten, and this project did not write it: move it away")


def write_output(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write or replace a file as :func:`replace_file` does, unless ``path`` is a file of the user."""
    claim(path.parent, [path.name])
    replace_file(path, content, durable=durable)


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
    def claimed(self, remedy: str, timeout: float = -1, *, is_contested: bool = False) -> Iterator[bool]:
        """Yield whether the artifact must be built; if so, other builders are locked out inside the block.

        A whole artifact is not locked, so that it can be read in a folder that cannot be written. An OSError inside the
        block is raised as a UsageError.

        Args:
            remedy: advice for the error message, such as "pass a writable folder with `cache_dir`".
            timeout: time to wait for another builder [s]; negative waits as long as it takes.
            is_contested: whether several processes of the same program claim it at once.
        """
        if self.is_whole:
            yield False
            return
        with writing(f"the {self.kind} {self.path}", UsageError, remedy):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            busy = f"another run is writing the {self.kind} {self.path}"
            with locked(self.path.parent, self.path.name, busy, timeout, remedy, is_contested=is_contested):
                yield not self.is_whole  # another process may have built it meanwhile

    def begin(self) -> Document:
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
            progress = read_manifest(self.stage, self.kind).progress
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

    def reached(self, progress: Mapping[str, object]) -> None:
        """Record the progress of the build, whose files must be flushed before. Call in one process only."""
        _write(self.stage, Manifest(self.kind, dict.fromkeys(self.files), dict(progress)))

    def finish(self) -> None:
        """Seal and publish the artifact. Call in one process only."""
        self.seal()
        self.publish()

    def seal(self) -> None:
        """Write the manifest of the stage, and flush all files."""
        for path in owned_files(self.stage, self.kind):
            if path.name not in (*self.files, MANIFEST):  # a leftover of a killed build
                path.unlink()
        # With the progress, so that a build that is killed before the rename is not begun again.
        write_manifest(self.stage, self.kind, self.files, read_manifest(self.stage, self.kind).progress)
        for path in (*self.stage.iterdir(), self.stage):
            flush(path)

    def publish(self) -> None:
        """Give the sealed stage its name, in the place of an earlier artifact if there is one."""
        remove(self.path, self.kind)
        self.stage.rename(self.path)
        flush(self.path.parent)


def write_manifest(folder: Path, kind: str, names: Sequence[str], progress: Mapping[str, object] | None = None) -> None:
    """Write the manifest of a finished artifact, which consists of the named files of ``folder``."""
    files = dict[str, FileRecord | None]()
    for name in names:
        stat = (folder / name).stat()
        time = None if kind == CHECKPOINT else int(stat.st_mtime)
        files[name] = FileRecord(stat.st_size, hash_file(folder / name), time)
    _write(folder, Manifest(kind, files, dict(progress or {})))


def _write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of an artifact by a temporary file beside the folder, in which nothing else may be left."""
    replace_file(folder / MANIFEST, json.dumps(asdict(manifest), indent=1), beside=folder)


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
                if expected is None:
                    return f"{name} is not finished"
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
    known, finished = set[str](), True
    with suppress(DamageError):  # an unreadable manifest, or one of another kind, lists no files
        files = read_manifest(folder, kind).files
        known, finished = {MANIFEST, *files}, None not in files.values()
    entries = sorted(folder.iterdir())
    for entry in entries:
        is_known = entry.name in known or (not finished and entry.match(TEMPORARY))
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
    for path in sorted(owned_files(folder, kind), key=lambda path: path.name == MANIFEST):
        path.unlink()  # the proof of ownership last, so that a killed removal can be repeated
    with suppress(FileNotFoundError):
        folder.rmdir()
