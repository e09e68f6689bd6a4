"""Names of the files of sample.py: numbers continue those of earlier calls, so that no picture is replaced."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

GRID, NEAREST = "grid", "nearest"
LEADING, TRAILING = re.compile("([0-9]{5,})[-.]"), re.compile("(.*)-([0-9]+)")


@dataclass(frozen=True)
class Names:
    """The names of the results of a call, without a suffix and before they are numbered.

    Args:
        texts: the part of each name beside its number.
        variants: number of results of each text, whose numbers follow the text; 0 if each text is of a single result,
            and its number precedes the text, as in ``00012-a-red-rose``.
    """

    texts: Sequence[str]
    variants: int = 0

    def __len__(self) -> int:
        return len(self.texts) * max(1, self.variants)

    def taken(self, files: Iterable[str]) -> int:
        """Return how many numbers the names of these files have taken: the next free number, counted from 0."""
        taken, texts = [0], {*self.texts}
        for file in files:
            if not self.variants:
                taken += [int(found[1]) + 1] if (found := LEADING.match(file)) else []
                continue
            stem = Path(file).stem
            taken += [1] if stem in texts else []
            taken += [int(found[2])] if (found := TRAILING.fullmatch(stem)) and found[1] in texts else []
        return max(taken)

    def numbered(self, taken: int) -> list[str]:
        """Return the names if ``taken`` numbers are in use, all of the first variant before those of the next."""
        if not self.variants:
            digits = max(5, len(str(taken + len(self.texts) - 1)))
            return [f"{number:0{digits}d}{text}" for number, text in enumerate(self.texts, taken)]
        if self.variants == 1 and not taken:
            return [*self.texts]
        return [f"{text}-{taken + number}" for number in range(1, self.variants + 1) for text in self.texts]


SHEETS = Names((GRID, NEAREST), variants=1)
"""The pictures that show several results: both have the same number."""


def is_sheet(file: str) -> bool:
    """Return whether a file has the name of a sheet of any number, such as ``grid-2.png``."""
    return re.fullmatch(rf"({GRID}|{NEAREST})(-[0-9]+)?\.png", file) is not None
