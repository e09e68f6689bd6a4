"""Sentences about pictures by their names: channels and versions of one picture, and pictures of other kinds."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from rectified_flow.data.sources.kinds import DOUBTFUL_FOLDERS, DOUBTFUL_NAMES

FEW, MOST = 1 / 3, 2 / 3
"""Largest shares of pictures with a doubtful name, and in doubtful folders: if there are more, they are meant."""
GROUPED = 0.5  # least share of files in groups
MOST_ENDS, MOST_BEGINNINGS, MOST_NAMED = 12, 200, 4
"""Largest numbers of different ends and beginnings of names, which may be classes, and of those in a sentence."""
END = re.compile(r"(?P<before>.*[^-_. @])[-_. @]+(?P<part>[+]?\d?[^-_. @\d/+][^-_. @/]*(?:[-_. ]\d+)?)(?P<after>)")
BEGINNING = re.compile(r"(?P<before>(?:.*/)?)(?P<part>[^\W\d_]{1,20})(?:[-_. ]+|(?=\d))(?P<after>[^/]+)")
CHANNEL = re.compile(
    r"(?P<before>.*[-_. ])(?P<part>(?:ch?|channel|w|wavelength|b)[-_]?\d{1,2}a?)(?P<after>(?:[-_. ][^/]*)?)",
    re.IGNORECASE,
)
"""The part of the name of a file in which the names of channels, bands, views, versions or classes differ."""


def notes_on_names(names: Sequence[str], kind: str) -> list[str]:
    """Return sentences about files by their names relative to a folder; ``kind`` is a noun for the files."""
    note = group_note(names)
    return [*_doubtful(names, kind), *([] if note is None else [note])]


def _doubtful(names: Sequence[str], kind: str) -> Iterator[str]:
    """Yield sentences about files that may be unlike the others."""
    found, of_folder = defaultdict[str, list[str]](list), dict[str, str | None]()
    patterns = {noun: re.compile(pattern, re.IGNORECASE) for noun, pattern in DOUBTFUL_NAMES.items()}
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder not in of_folder:
            words = (word.lower().strip("_.-[]() ") for word in reversed(folder.split("/")))
            of_folder[folder] = next((DOUBTFUL_FOLDERS[word] for word in words if word in DOUBTFUL_FOLDERS), None)
        noun = of_folder[folder] or next((noun for noun, pattern in patterns.items() if pattern.search(file)), None)
        if noun is not None:
            found[noun].append(name)
    for noun, some in found.items():
        if len(some) <= (FEW if noun in patterns else MOST) * len(names):
            yield f"read {len(some)} {kind} with the names of {noun}, such as {some[0]}: `exclude` leaves files out"


def group_note(names: Collection[str]) -> str | None:
    """Return a sentence if most files come in groups whose names differ in one part, as those of single channels."""
    for pattern, most in ((CHANNEL, MOST_ENDS), (END, MOST_ENDS), (BEGINNING, MOST_BEGINNINGS)):
        groups = defaultdict[str, dict[str, str]](dict)
        for name in names:
            stem, _, suffix = name.rpartition(".")
            found = pattern.fullmatch(stem)
            rest = stem if found is None else f"{found['before']}\0{found['after']}".strip("-_. \0")
            groups[rest][f"{found['part'] if found else ''}.{suffix.lower()}"] = name
        whole = [group for group in groups.values() if len(group) > 1 and (pattern is CHANNEL or _has_words(group))]
        parts = sorted({part for group in whole for part in group})
        are_several = len(whole) > 1 or any(len(group) > 2 or pattern is CHANNEL for group in whole)
        if are_several and len(parts) <= most and sum(map(len, whole)) >= GROUPED * len(names):
            return _note_on(parts, sorted(whole[0].values()))
    return None


def _has_words(parts: Collection[str]) -> bool:
    """Return whether parts of names, each with a suffix, differ in more than the serial numbers at their ends."""
    return len({re.sub(r"\d+(?=\.[^.]*$)", "", part) for part in parts}) > 1


def _note_on(parts: Sequence[str], example: Sequence[str]) -> str:
    """Return a sentence about groups of files by the parts of their names, with suffixes, and one of the groups."""
    suffixes = {part.rpartition(".")[2] for part in parts}
    shown = [part if len(suffixes) > 1 else part.rpartition(".")[0] or "none" for part in parts]
    listed = ", ".join(shown[:MOST_NAMED]) + ", ..." * (len(shown) > MOST_NAMED)
    one, other, *_ = example
    found = f"the files come in groups whose names differ in one part ({listed}), such as {one} and {other}"
    remedy = "keep one of each group if they are channels or versions of one picture; move them into subfolders"
    return f"{found}, and each is read as a picture: {remedy} if they are classes"
