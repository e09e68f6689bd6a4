"""Folders of files: which of them are read, and which subfolders are classes."""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from os.path import commonpath
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from rectified_flow.data.metadata import METADATA_FILES, read_metadata
from rectified_flow.data.sources import ImageSource
from rectified_flow.errors import UsageError
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import IMAGE_SUFFIXES, OTHER_SUFFIXES, PLUGIN_HINT, content_of, open_picture

BYPRODUCTS = {
    *("@eadir", "@recycle", "@recently-snapshot", "@__thumb", "@tmp", "#recycle", "#snapshot", "$recycle.bin"),
    *("recycler", "system volume information", "__macosx", "lost+found", "network trash folder", "temporary items"),
    *("files_trashbin", "__pycache__", "node_modules"),
}
"""Folders that photo servers, file servers and systems create, in lower case; names with a dot in front are others."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing", "pred", "prediction"), "test"),
}
"""Words in the names of subfolders for the splits of a dataset."""
PICTURES = {"image", "images", "img", "imgs", "jpegimages", "pictures", "photos"}
COMPANIONS = {
    *("label", "labels", "mask", "masks", "annotation", "annotations", "gt", "ground_truth", "groundtruth"),
    *("segmentation", "segmentations", "segmentationclass", "segmentationobject", "depth", "bbox", "bboxes", "json"),
}
"""Subfolders with the pictures of a dataset, and with what belongs to them; neither are classes."""


class FileFolder(ImageSource):
    """All pictures below ``path``; a subclass reads files of another kind.

    If every file is in a subfolder, its class is the name of the topmost one. Of the splits of a dataset, only one is
    read, and of subfolders such as ``images`` and ``labels`` only the first.

    Args:
        path: the folder.
        split: the split to read if subfolders have the names of splits.
    """

    notes: list[str]
    suffixes: ClassVar[Collection[str]] = IMAGE_SUFFIXES
    """Suffixes of the files to read, in lower case."""
    other_suffixes: ClassVar[Collection[str]] = OTHER_SUFFIXES
    """Suffixes of files that are not read, and are counted for a note."""
    kind: ClassVar[str] = "pictures"
    """Name of the files in the plural."""

    def __init__(self, path: Path, *, split: str = "train") -> None:
        self.path, self.name, self.notes, left_out = path, printable(path.name), [], list[Path]()
        everything = find_files(path, left_out)
        found = [file for file in everything if file.suffix.lower() in self.suffixes]
        others = [file for file in everything if file.suffix.lower() in self.other_suffixes]
        self._note("hidden files, by-products of systems, or unreadable folders", left_out)
        self._note(f"files of other formats ({PLUGIN_HINT})", others)
        if not found:
            first = [f"{printable(file)} is {what}" for file in everything[:1] if (what := content_of(file))]
            nothing = f"the folder {path} holds no {self.kind} ({', '.join(sorted(self.suffixes))})"
            raise UsageError("; ".join((nothing, *self.notes, *first)))
        root, files = narrow(path, found, split)
        self.files, rest = sorted(files), sorted({*found} - {*files})
        self._note(f"{self.kind} of other splits or of labels", rest)
        if root != path:
            self.notes.append(f"read the {self.kind} in {printable(root)}, whose subfolders, if any, are the classes")
        tables = [file for file in everything if file.name in METADATA_FILES]
        self._metadata = [each for each in tables if each.is_relative_to(root) or root.is_relative_to(each.parent)]
        self.fingerprint = files_fingerprint(path, self.files)
        self.class_names, self._labels = self._find_classes([file.relative_to(root).parts for file in self.files])

    def _find_classes(self, parts: Sequence[tuple[str, ...]]) -> tuple[list[str], list[int]]:
        """Return the classes by the topmost subfolders in the paths of the files, and the label of each file or -1."""
        stray = [part[0] for part in parts if len(part) == 1]
        if not stray:
            number = {name: label for label, name in enumerate(sorted({part[0] for part in parts}))}
            return [printable(name) for name in number], [number[part[0]] for part in parts]
        if len(stray) < len(parts):
            such = printable(stray[0])
            self.notes.append(f"no classes: {len(stray)} {self.kind} are in no subfolder, such as {such}")
        return [], [-1] * len(parts)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, file: Path) -> Any:
        """Return the contents of a file, decoded or not, for the rows of a store. Any exception means a broken file."""
        return open_picture(file)

    @override
    def load(self, index: int) -> tuple[Any, int]:
        return self.read(self.files[index]), self._labels[index]

    @override
    def place_of(self, index: int) -> str:
        return printable(self.files[index])

    @override
    def name_of(self, index: int) -> str:
        return printable(self.files[index].relative_to(self.path))

    @override
    def read_table(self) -> dict[str, list[Any]]:
        return read_metadata(self._metadata, self.files, self.notes)

    def _note(self, what: str, files: Sequence[Path]) -> None:
        """Add a note on files that are not read, if there are any."""
        such = [printable(file.relative_to(self.path)) for file in files[:1]]
        self.notes += [f"left out {len(files)} {what}, such as {each}" for each in such]


def narrow(folder: Path, files: Sequence[Path], split: str) -> tuple[Path, list[Path]]:
    """Return the folder whose subfolders are classes, and the files below it that are read."""
    groups = _by_subfolder(folder, files)
    names = [*filter(None, groups)]
    chosen = _choose(folder, names, split) if len(names) > (None in groups) else None
    if chosen is not None:
        return narrow(folder / chosen, groups[chosen], split)
    common = Path(commonpath([file.parent for file in files]))
    if common != folder and None not in _by_subfolder(common, files):  # folders around the classes, as of an archive
        return narrow(common, files, split)
    if None in groups:
        return folder, [*files]
    return folder, [file for name, some in groups.items() for file in narrow(folder / str(name), some, split)[1]]


def _by_subfolder(folder: Path, files: Sequence[Path]) -> Mapping[str | None, list[Path]]:
    """Return files by the subfolder that they are in; None for those beside the subfolders."""
    groups = defaultdict[str | None, list[Path]](list)
    for file in files:
        first, *rest = file.relative_to(folder).parts
        groups[first if rest else None].append(file)
    return groups


def _choose(folder: Path, names: Sequence[str], split: str) -> str | None:
    """Return the one of the subfolders that is to be read; None if they are classes."""
    splits = {name: _split_of(name) for name in names if name.lower() not in COMPANIONS}
    found, exact = {*splits.values()}, {SPLITS[name.lower()] for name in splits if name.lower() in SPLITS}
    if len(splits) == 1:
        [(only, known)] = splits.items()
        return only if only.lower() in PICTURES | SPLITS.keys() or (known and len(names) > 1) else None
    if len(found - {None}) < 2 or (None in found and len(exact) < 2):
        return None
    wanted = [name for name, known in splits.items() if known == split]
    if len(wanted) == 1 and None not in found:
        return wanted[0]
    listed, such = ", ".join(map(printable, names)), printable(folder / (wanted or names)[0])
    raise UsageError(f"the subfolders {listed} may be splits or classes: pass one of them, such as {such}")


def _split_of(name: str) -> str | None:
    """Return the split that a word in a name stands for, as in ``train2017`` or ``testA``."""
    words = re.split("[^a-z]+", re.sub("(?<=[a-z])[AB]$", "", name).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def is_image(file: Path) -> bool:
    """Return whether a file has the name of an image that can be read."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def find_files(folder: Path, left_out: list[Path] | None = None) -> list[Path]:
    """Return all files below ``folder``, sorted, without hidden files, by-products of systems, and their folders.

    Links are followed, but each real folder is visited once: under its own name rather than that of a link. Hidden
    pictures, and the folders that are left out or cannot be read, are added to ``left_out``.
    """
    files, visited, unreadable = list[Path](), set[str](), list[OSError]()
    other = [] if left_out is None else left_out
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=unreadable.append):
        if (real := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real)
        other += [Path(parent, name) for name in folders if is_byproduct(name)]
        other += [path for name in names if is_byproduct(name) and is_image(path := Path(parent, name))]
        kept = [name for name in folders if not is_byproduct(name)]
        folders[:] = sorted(kept, key=lambda name: (os.path.islink(os.path.join(parent, name)), name))
        files += [Path(parent, name) for name in names if not is_byproduct(name)]
    other += [Path(error.filename) for error in unreadable]
    return sorted(files)


def is_byproduct(name: str) -> bool:
    """Return whether a file or folder is hidden, or a by-product of a system, by its name."""
    return name.startswith(".") or name.lower() in BYPRODUCTS or name.lower().endswith(".lrdata")


def files_fingerprint(folder: Path, files: list[Path]) -> str:
    """Hash each file's path relative to ``folder``, its size and its modification time."""
    digest = blake2b(digest_size=16)
    for file in files:
        size, time = -1, -1  # of a link that leads nowhere
        if os.path.exists(file):
            size, time = os.stat(file).st_size, os.stat(file).st_mtime_ns
        digest.update(f"{file.relative_to(folder)}\0{size}\0{time}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
