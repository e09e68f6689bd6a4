"""Tables of names of files and folders that are left out or mentioned, or that differ from the names of their classes.

A new kind is a row here and a row in ``tests/data/test_kinds.py``.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from filecmp import cmp
from math import prod
from pathlib import Path
from typing import NamedTuple

from rectified_flow.system.pictures import OTHER_SUFFIXES, open_picture

OTHER_FORMATS = OTHER_SUFFIXES | {
    *(".npy", ".npz", ".h5", ".hdf5", ".mat", ".nii", ".gz", ".mha", ".nrrd", ".zarr", ".pt", ".pkl", ".tfrecord"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".pdf", ".rar", ".7z", ".bz2", ".xz", ".tgz", ".mdb"),
    *(".cr3", ".raf", ".rw2", ".orf", ".tga", ".dds", ".hdr", ".ppm", ".pgm", ".pbm", ".ico", ".xcf", ".kra"),
}
"""Suffixes of files that may hold pictures and are counted, in lower case; that of ``.nii.gz`` is ``.gz``."""

COMPANIONS = {
    **dict.fromkeys(("label", "labels", "mask", "masks", "annotation", "annotations", "gt"), "labels"),
    **dict.fromkeys(("ground_truth", "groundtruth", "segmentation", "segmentations", "depth"), "labels"),
    **dict.fromkeys(("segmentationclass", "segmentationobject", "bbox", "bboxes", "json", "anno"), "labels"),
    **dict.fromkeys(("gtfine", "gtcoarse", "1st_manual", "2nd_manual", "celebamask-hq-mask-anno"), "labels"),
    **dict.fromkeys(("images_2", "images_4", "images_8"), "smaller scales"),
    **dict.fromkeys(("reg", "regs", "regularization", "regularisation", "regularization_images"), "regularisation"),
    **dict.fromkeys(("class_images", "class_data", "class_dir"), "regularisation"),
    **dict.fromkeys(("conditioning", "conditioning_images", "conditioning_image", "control"), "conditioning"),
    **dict.fromkeys(("thumbnails", "thumbs", "previews", "log", "logs", "model", "models", "sample"), "previews"),
}
"""Subfolders with files that belong to the pictures beside them, in lower case, and a noun for the files. Beside a
subfolder of :data:`PICTURES`, none of them is a class."""
PICTURES = {
    *("image", "images", "img", "imgs", "jpegimages", "pictures", "photos"),
    *("instance_images", "instance_data", "instance_dir", "leftimg8bit", "celeba-hq-img"),
}
"""Subfolders with the pictures of a dataset, in lower case, beside those of :data:`COMPANIONS`."""


CLOUD = ".icloud"
"""Suffix of the hidden file in place of one that is not downloaded from iCloud."""
DOUBTFUL_FOLDERS = {
    # "control" is often a class, such as the control group of a trial.
    **{name: noun for name, noun in COMPANIONS.items() if name != "control"},
    **dict.fromkeys(("originals", "original", "unedited", "masters"), "originals of edited pictures"),
    **dict.fromkeys(("rejected", "rejects", "reject", "deleted", "trash", "discarded", "removed"), "rejected pictures"),
    **dict.fromkeys(("bad", "blurry", "duplicates", "dupes", "unsorted", "todo"), "rejected pictures"),
    **dict.fromkeys(
        ("samples", "out", "output", "outputs", "results", "generated", "predictions"), "outputs of a program"
    ),
    **dict.fromkeys(("checkpoints", "runs", "figures", "plots", "screenshots"), "outputs of a program"),
    **dict.fromkeys(("docs", "doc", "assets", "static", "media", "resources"), "parts of a document"),
    **dict.fromkeys(
        ("derivatives", "cache", "small", "resized", "lowres", "web", "thumbnails"), "copies of another size"
    ),
    **dict.fromkeys(("backup", "backups", "bak", "old", "archive", "archived"), "backups"),
}
"""Subfolders that may hold other pictures than those of a dataset, in lower case, and a noun for the pictures."""
DOUBTFUL_NAMES = {
    "overviews": r"contact.?sheet|collage|montage|(?:sprite|tile).?(?:sheet|set)|(?:^|[-_ ])(?:grid|atlas)[-_ \d.]"
    r"|^(?:folder|cover)\.",
    "temporary files": r"(?:^|[-_ ])(?:temp|tmp)[-_ ]",
    "logos or avatars": r"(?:^|[-_ ])(?:logo|banner|favicon|avatar|spacer|placeholder|profile.?pic|watermark)[-_ \d.]",
    "plots or charts": r"(?:^|[-_ ])(?:plot|loss|histogram|confusion.?matrix|colou?r.?checker|grey.?card)[-_ \d.]",
}
"""Nouns for pictures that may be unlike the others, and a regular expression of the names of their files."""


class Beside(NamedTuple):
    """A kind of file whose name is that of a picture beside it with an addition."""

    addition: str
    """A regular expression of the addition to the name without its suffix."""
    noun: str
    """The files in the plural."""
    is_copy: bool = False
    """Whether the file may be another picture: it is left out only if its contents are equal."""
    is_scaled: bool = False
    """Whether the file shows the picture in another size."""
    is_part: bool = False
    """Whether photographs may have such names, too: JPEG files are read."""


BESIDE = (
    Beside(r"[-_. ](?:masklabel|condlabel|masks?|seg|segmentation|labels?|gt|matte|trimap)(?:_\d+)?$", "masks"),
    Beside(r"[-_.](?:depth|normals?|disparity)(?:_\d+)?$", "maps of depth or of normals"),
    Beside(r"[-_](?:superpixels|labelids|instanceids)$", "masks"),
    Beside(r"[-_]parts?_\d+$", "masks", is_part=True),
    Beside(
        r"(?:\.\w{3,4})?[-_.](?:thumb|thumbnail|preview|small|tn)$|-\d+x\d+$|@[23]x$",
        "copies of another size",
        is_scaled=True,
    ),
    Beside(r"[-_ ](?:edited|bearbeitet|modifi\u00e9|editado|modificato|bewerkt)(?:\(\d+\))?$", "edited copies", True),
    Beside(r" ?\(\d+\)$|(?: -)? (?:copy|copie|kopie|copia)(?: ?\(?\d+\)?)?$", "copies", True),
    Beside(r"~\d+$|(?<=IMG_)E(?=\d+$)", "edited copies", True),
    Beside(r"(?<![^/])copy of ", "copies", True),
    Beside(r" \([^()/]*conflicted copy[^()/]*\)$|\.sync-conflict-[^./]*$", "conflicting copies", True),
)
"""Masks of trainers and of medical datasets; thumbnails of websites; copies of photo libraries, phones and systems."""
ADDITION = re.compile("|".join(f"({kind.addition})" for kind in BESIDE), re.IGNORECASE)
REPEATS = re.compile(r"(\d+)_(?=.*[^\W\d_])(.+)")
"""The number of repeats in the name of a folder, which kohya's scripts read."""


class Companion(NamedTuple):
    """A file that belongs to a picture beside it."""

    file: Path
    picture: Path
    kind: Beside

    @property
    def is_left_out(self) -> bool:
        """Whether the file is certainly no picture of its own."""
        try:
            if self.kind.is_copy:
                return cmp(self.file, self.picture, shallow=False)
            return not (self.kind.is_part and self.file.suffix.lower() in (".jpg", ".jpeg"))
        except OSError:  # a broken file is named when it is decoded
            return False


def is_larger(file: Path, other: Path) -> bool:
    """Return whether a picture has more pixels than another one."""
    with suppress(Exception):  # a broken picture is reported when it is decoded
        return prod(open_picture(file).size) > prod(open_picture(other).size)
    return False


def companions(files: Sequence[Path]) -> Iterator[Companion]:
    """Yield the files whose names say that they belong to another of the files."""
    stems = {str(file).rpartition(".")[0]: file for file in files}
    for file in files:
        stem = str(file).rpartition(".")[0]
        found = ADDITION.search(stem)
        picture = None if found is None else stems.get(stem[: found.start()] + stem[found.end() :])
        if found is not None and picture is not None:
            yield Companion(file, picture, BESIDE[(found.lastindex or 1) - 1])


def without_repeats(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the class of each subfolder: its name, without the number of repeats that kohya's scripts read there.

    Numbers that count the subfolders are part of the names, such as those of grades, unless the folder is ``img``.
    """
    found = [match for name in names if (match := REPEATS.fullmatch(name))]
    numbers, classes = sorted(int(match[1]) for match in found), {match[0]: match[2].strip() for match in found}
    counts = numbers == [*range(numbers[0], numbers[0] + len(numbers))] if numbers else False
    is_certain = folder.name.lower() == "img" or len(names) == 1
    if len(found) < len(names) or not (is_certain or (not counts and len({*classes.values()}) == len(names))):
        return {name: name for name in names}
    return classes
