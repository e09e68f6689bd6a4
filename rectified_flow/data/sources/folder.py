"""Folders of files: which of them are read, and which subfolders are classes."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from os.path import commonpath
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from rectified_flow.data.sources import ImageSource, excluded_among, note_on_excluded
from rectified_flow.data.sources.kinds import (
    CLOUD,
    COMPANIONS,
    OTHER_FORMATS,
    PICTURES,
    Companion,
    companions,
    is_larger,
    without_repeats,
)
from rectified_flow.data.sources.listing import Listing, files_fingerprint, list_folder
from rectified_flow.data.sources.name_notes import notes_on_names
from rectified_flow.data.stream import spread
from rectified_flow.data.tables import TABLE_SUFFIXES, read_metadata
from rectified_flow.errors import UsageError
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import IMAGE_SUFFIXES, PLUGIN_HINT, content_of, open_picture

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing", "pred", "prediction"), "test"),
}
"""Words in the names of subfolders for the splits of a dataset."""
UNREMARKABLE = {*TABLE_SUFFIXES, ".db", ".ini", ".md", ".htm", ".html", ".log", ".lock"}
"""Suffixes of files beside pictures that are read, or that a person does not take for pictures."""
MEASURED_SIZES = 8  # number of copies of another size that are compared with their pictures
SHOWN_SUFFIXES = 4  # number of unknown suffixes in a note, the most frequent first


class FileFolder(ImageSource):
    """All pictures below ``path``; a subclass reads files of another kind.

    If every file is in a subfolder, its class is the name of the topmost one. Of the splits of a dataset, only one is
    read, and of subfolders such as ``images`` and ``labels`` only the first.

    Args:
        path: the folder.
        split: the split to read if subfolders have the names of splits.
        listing: the files below the folder, if they are known.
        exclude: names of files and subfolders to leave out, with the files that belong to them.
    """

    notes: list[str]
    suffixes: ClassVar[Collection[str]] = IMAGE_SUFFIXES
    """Suffixes of the files to read, in lower case."""
    other_suffixes: ClassVar[Collection[str]] = OTHER_FORMATS
    """Suffixes of files that are not read, and are counted for a note."""
    kind: ClassVar[str] = "pictures"
    """Name of the files in the plural."""

    def __init__(
        self, path: Path, *, split: str = "train", listing: Listing | None = None, exclude: Collection[str] = ()
    ) -> None:
        self.path, self.name, self.notes = path, printable(path.name), []
        everything, left_out, written = list_folder(path) if listing is None else listing
        found = [file for file in everything if file.suffix.lower() in self.suffixes]
        if exclude:
            self.excluded = excluded_among([*map(self._name, found)], exclude, self.name)
            self.notes.append(note_on_excluded(self.excluded))
        others = [file for file in everything if file.suffix.lower() in self.other_suffixes]
        known = {*self.suffixes, *self.other_suffixes, *UNREMARKABLE}
        self._note("files that are not downloaded from iCloud", [file for file in left_out if file.suffix == CLOUD])
        hidden = [file for file in left_out if file.suffix != CLOUD]
        self._note("hidden files, by-products of systems, or unreadable folders", hidden)
        own = [file for file in written if file.suffix.lower() in self.suffixes]
        self._note(f"{self.kind} that runs or samples wrote (copies without .manifest.json are read)", own)
        self._note(f"files of other formats ({PLUGIN_HINT})", others)
        self._note_unknown([file for file in everything if file.suffix.lower() not in known])
        if not found:
            first = [f"{printable(file)} is {what}" for file in everything[:1] if (what := content_of(file))]
            nothing = f"the folder {path} holds no {self.kind} ({', '.join(sorted(self.suffixes))})"
            raise UsageError("; ".join((nothing, *self.notes, *first)))
        found = self._without_companions(found)
        if not found:
            raise UsageError(f"`exclude` lists all {self.kind} of {self.name}: list fewer {self.kind}")
        root, files = narrow(path, found, split)
        self.files = sorted(files)
        self._note_rest(root, sorted({*found} - {*files}))
        if root != path:
            self.notes.append(f"read the {self.kind} in {printable(root)}, whose subfolders, if any, are the classes")
        self._root = root
        self._texts = [file for file in everything if file.suffix.lower() in TABLE_SUFFIXES]
        if any(_split_of(part) == split for part in root.relative_to(path).parts):
            self._texts = [file for file in self._texts if self._may_describe(file, split)]
        self.fingerprint = files_fingerprint(path, self.files)
        self.class_names, self._labels = self._find_classes(root)
        self.notes += notes_on_names([*map(self.name_of, range(len(self)))], self.kind)

    def _may_describe(self, file: Path, split: str) -> bool:
        """Return False if the names of a table or text file and of its folders name only other splits."""
        parts = file.relative_to(self.path).with_suffix("").parts
        named = {_split_of(part) for part in parts} - {None}
        return not named or split in named

    def _without_companions(self, files: list[Path]) -> list[Path]:
        """Return the files that are read, without those that belong to another, with a note on each kind of these."""
        left_out, alike = defaultdict[str, list[Path]](list), list[Path]()
        scaled = list[Companion]()
        kept = {file for file in files if self._name(file) not in self.excluded}
        for companion in companions(files):
            if companion.file not in kept:
                continue
            if companion.is_left_out:
                left_out[companion.kind.noun].append(companion.file)
                scaled += [companion] * companion.kind.is_scaled
            else:
                alike.append(companion.file)
        for noun, some in left_out.items():
            self._note(f"{noun} beside their {self.kind}", some)
        some_scaled = [scaled[number] for number in spread(range(len(scaled)), MEASURED_SIZES)]
        for copy in [copy for copy in some_scaled if is_larger(copy.file, copy.picture)][:1]:
            larger, read = map(self._name, (copy.file, copy.picture))
            self.notes.append(f"{larger} is larger than {read}, which is read: move such smaller files away")
        for each in alike[:1]:
            found = f"read {len(alike)} {self.kind} with the names of copies and other contents"
            self.notes.append(f"{found}, such as {printable(each.relative_to(self.path))}: `exclude` leaves files out")
        beside = {file for some in left_out.values() for file in some}
        return [file for file in files if file in kept and file not in beside]

    def _note_unknown(self, files: Sequence[Path]) -> None:
        """Add a note on files that nothing here reads, by their suffixes."""
        counts = Counter(printable(file.suffix.lower()) or "without a suffix" for file in files)
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(SHOWN_SUFFIXES))
        self._note(f"files of unknown formats ({kinds})", files)

    def _note_rest(self, root: Path, rest: Sequence[Path]) -> None:
        """Add a note on the files outside of the folder whose subfolders are classes."""
        kinds = defaultdict[str, list[Path]](list)
        for file in rest:
            parts = file.relative_to(self.path).parts[:-1]
            kinds[next((COMPANIONS[part.lower()] for part in parts if part.lower() in COMPANIONS), "")].append(file)
        self._note(f"{self.kind} of other splits or of labels", kinds.pop("", []) + kinds.pop("labels", []))
        for purpose, some in kinds.items():
            self._note(f"{self.kind} for {purpose}", some)

    def _find_classes(self, root: Path) -> tuple[list[str], list[int]]:
        """Return the classes by the topmost subfolders of ``root``, and the label of each file or -1."""
        parts = [file.relative_to(root).parts for file in self.files]
        stray = [part[0] for part in parts if len(part) == 1]
        if not stray:
            names = without_repeats(root, sorted({part[0] for part in parts}))
            number = {name: label for label, name in enumerate(sorted({*names.values()}))}
            if (first := min(names)) != names[first]:
                ignored = f"the number of repeats in the names of folders such as {printable(first)}"
                self.notes.append(f"ignored {ignored}: each of the {self.kind} is read once in an epoch")
            return [printable(name) for name in number], [number[names[part[0]]] for part in parts]
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
        return self._name(self.files[index])

    def _name(self, file: Path) -> str:
        return printable(str(file).removeprefix(os.path.join(self.path, "")))

    @override
    def read_table(self) -> dict[str, list[Any]]:
        return self._table

    @cached_property
    def _table(self) -> dict[str, list[Any]]:
        return read_metadata(self._texts, self.files, self.path, self._root, self.notes)

    def _note(self, what: str, files: Sequence[Path]) -> None:
        """Add a note on files that are not read, if there are any."""
        such = [printable(file.relative_to(self.path)) for file in files[:1]]
        self.notes += [f"left out {len(files)} {what}, such as {each}" for each in such]


def narrow(folder: Path, files: Sequence[Path], split: str) -> tuple[Path, list[Path]]:
    """Return the folder whose subfolders are classes, and the files below it that are read."""
    groups = _by_subfolder(folder, files)
    named = {name: some for name, some in groups.items() if name}
    chosen = _choose(folder, named, split) if len(named) > (None in groups) else None
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


def _choose(folder: Path, names: Mapping[str, Sequence[Path]], split: str) -> str | None:
    """Return the name of the subfolder to read, given the files of each; None if the subfolders are classes."""
    has_pictures = any(name.lower() in PICTURES for name in names)
    beside = {name for name, noun in COMPANIONS.items() if has_pictures or noun == "labels"}
    splits = {name: _split_of(name) for name in names if name.lower() not in beside}
    named = [name for name in splits if name.lower() in SPLITS]
    found, exact = {*splits.values()}, {SPLITS[name.lower()] for name in named}
    if len(splits) == 1:
        [(only, known)] = splits.items()
        return only if only.lower() in PICTURES | SPLITS.keys() or (known and len(names) > 1) else None
    # A folder "train" beside other folders may be a class of trains, but a class seldom has subfolders.
    has_classes = any({*_by_subfolder(folder / name, names[name])} - {None} for name in named)
    if not has_classes and (len(found - {None}) < 2 or (None in found and len(exact) < 2)):
        return None
    wanted = [name for name, known in splits.items() if known == split]
    if len(wanted) == 1 and None not in found:
        return wanted[0]
    listed, such = ", ".join(map(printable, names)), printable(folder / (wanted or [*names])[0])
    remedy = f"pass one of them, such as {such}, or rename them"
    raise UsageError(f"the subfolders {listed} may be splits or classes: {remedy}")


def _split_of(name: str) -> str | None:
    """Return the split that a word in a name stands for, as in ``train2017`` or ``testA``."""
    words = re.split("[^a-z]+", re.sub("(?<=[a-z])[AB]$", "", name).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)
