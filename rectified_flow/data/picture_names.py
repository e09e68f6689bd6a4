"""The numbers of pictures by their names, as people, other systems and web sites write them."""

import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

SUFFIX = re.compile(r"(?<=[^/])\.\w{1,5}$")
ELSEWHERE = re.compile(r"(?:[a-z][\w+.-]+:/)?/|[a-z]:/", re.IGNORECASE)
"""The beginning of a URL, of an absolute path, or of one of Windows, with slashes."""


def normal(file: Path) -> str:
    """Return the path in a normal form, which is equal for all spellings and Unicode normalisations."""
    return unicodedata.normalize("NFC", os.path.normpath(os.path.abspath(file)))


def _folded(path: str) -> str:
    return path.casefold()


def _stem(path: str) -> str:
    return SUFFIX.sub("", path).casefold()


def _base(path: str) -> str:
    return os.path.basename(path).casefold()


def _base_stem(path: str) -> str:
    return _stem(os.path.basename(path))


def _unpadded(path: str) -> str:
    stem = _base_stem(path)
    return stem.lstrip("0") or "0" if stem.isdecimal() else stem


Key = Callable[[str], str]
RULES: tuple[tuple[Key, Key], ...] = ((str, str), (_folded, _folded), (_stem, _folded), (_stem, _stem))
BASE_RULES: tuple[tuple[Key, Key], ...] = (
    (_base, _base),
    (_base_stem, _base),
    (_base_stem, _base_stem),
    (_unpadded, _unpadded),
)
"""Rules for comparing names, the strictest first: a key of the path of a picture, and a key of the name. The names of
the second list are without a folder."""


class PictureNames:
    """The numbers of pictures by their names as people write them: unique ones in any case, with any suffix or none.

    Args:
        files: the pictures.
        places: folders that names may be relative to, besides that of their table.
    """

    def __init__(self, files: Sequence[Path], places: Sequence[Path] = ()) -> None:
        self.paths, self.places = [*map(normal, files)], places
        self._tables = dict[Key, dict[str, int | None]]()

    def find(self, name: object, folder: Path) -> int | None:
        """Return the number of the picture with a name relative to a folder; None if there is none, or several.

        The name may be a URL, an absolute path on another machine, percent-encoded, a number without leading zeros, or
        the name of a file followed by ``#`` and a number.
        """
        text = "" if name is None else str(name).strip().replace("\\", "/")
        found = (self._match(spelling, folder) for spelling in dict.fromkeys(_spellings(text)))
        return next((number for number in found if number is not None), None)

    def _match(self, text: str, folder: Path) -> int | None:
        """Return the number of the picture with exactly this name, relative to a folder or a part of one elsewhere."""
        elsewhere = ELSEWHERE.match(text)
        parts = text[elsewhere.end() :].split("/") if elsewhere else []
        for tail in (text, *("/".join(parts[first:]) for first in range(len(parts)))):
            for place in dict.fromkeys((folder, *self.places)):
                number = self._look_up(normal(place / tail), RULES)
                if number is not None:
                    return number
        base = parts[-1] if parts else text
        return None if "/" in base else self._look_up(base, BASE_RULES)

    def _look_up(self, path: str, rules: Sequence[tuple[Key, Key]]) -> int | None:
        """Return the number of the picture by the first rule by which a path is that of a picture or of several."""
        for of_picture, of_name in rules:
            table, key = self._table(of_picture), of_name(path)
            if key in table:
                return table[key]
        return None

    def _table(self, key: Key) -> dict[str, int | None]:
        """Return the number of each picture by a key; None for a key that several pictures have."""
        if key not in self._tables:
            table = self._tables[key] = {}
            for number, path in enumerate(self.paths):
                name = key(path)
                table[name] = None if name in table else number
        return self._tables[key]


def _spellings(text: str) -> Iterator[str]:
    """Yield the names that a text may stand for: itself, and the name in a URL or before the number of a caption."""
    if not text:
        return
    yield text
    before, _, number = text.rpartition("#")  # 1.jpg#0 is the first caption of 1.jpg
    if before and number.isdecimal():
        yield before
    for address in (text, text.partition("?")[0]):
        yield address
        yield unquote(address)
