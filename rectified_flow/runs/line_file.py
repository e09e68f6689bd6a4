"""A file of JSON lines, one for each step."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rectified_flow.files import replace_file


class LineFile:
    """A file of JSON lines that has each step once and in order, also after kills and full disks.

    Args:
        path: the file.
        step: the step the run starts at; lines of later steps, left by a killed run, are dropped. At step 0 an older
            file is kept beside the new one.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".old.jsonl"))
        kept = "".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step)
        if path.exists():
            replace_file(path, kept)
        self._good_size = len(kept.encode())
        self._unwritten = b""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line; if the disk is full, it is written with the next one.

        Raises:
            OSError: then.
        """
        self._unwritten += (json.dumps(row) + "\n").encode()
        self.write()

    def write(self) -> None:
        """Write the lines that are not on the disk yet.

        Raises:
            OSError: if that fails.
        """
        if not self._unwritten:
            return
        self.path.touch()
        with self.path.open("r+b") as file:
            file.truncate(self._good_size)  # a full disk may have taken half a line
            file.seek(self._good_size)
            file.write(self._unwritten)
        self._good_size += len(self._unwritten)
        self._unwritten = b""

    def rows(self) -> list[dict[str, Any]]:
        """The complete lines."""
        rows = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with suppress(ValueError):  # the last line of a run that was killed
                    rows.append(json.loads(line))
        return rows
