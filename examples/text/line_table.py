"""The lines of a text as a table of the library datasets, which measure_lines.py compares with the index."""

from collections.abc import Sequence
from pathlib import Path

import datasets


class LineTable:
    """The lines with text of a UTF-8 text file, in order, as a table that all processes map.

    Args:
        path: the text.
        cache_dir: folder for the table.
    """

    def __init__(self, path: Path, cache_dir: Path) -> None:
        table = datasets.load_dataset("text", data_files=[str(path)], split="train", cache_dir=str(cache_dir))
        self.table = table.filter(_have_text, batched=True, input_columns="text")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> str:
        return str(self.table[index]["text"])


def _have_text(texts: Sequence[str]) -> list[bool]:
    return [bool(text.strip()) for text in texts]
