"""A file of JSON lines, one for each step."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rectified_flow.documents import parse_document
from rectified_flow.errors import DamageError
from rectified_flow.files import read_bytes, replace_file


class LineFile:
    """A file of JSON lines that has each step once and in order, also after kills and full disks.

    Args:
        path: the file.
        step: the step the run starts at; lines of later steps, left by a killed run, are dropped. At step 0 an older
            file is kept beside the new one.
        warn: called with a line if the file has damaged lines, which are dropped.

    Raises:
        OSError: if it cannot be written.
        UsageError: if it may not be read.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], object] = print) -> None:
        self.path = path
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".old.jsonl"))
        rows, damaged = self._read()
        if damaged:
            warn(f"warning: dropped {damaged} damaged line{'s' * (damaged > 1)} of {path}")
        kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
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
        """The complete lines, but for damaged ones."""
        return self._read()[0]

    def numbers(self, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> dict[int, float]:
        """The numbers called ``name`` by step, in lines that have these ``settings``."""
        rows = [row for row in self.rows() if settings.items() <= row.items()]
        return {row["step"]: row[name] for row in rows if type(row.get(name)) in (int, float)}

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The lines, and how many are damaged, but for the last one of a run that was killed."""
        if not self.path.exists():
            return [], 0
        *complete, last = map(self._row, read_bytes(self.path).split(b"\n"))
        return [row for row in (*complete, last) if row is not None], complete.count(None)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = parse_document(line, dict[str, Any], self.path)
        except DamageError:
            return None
        return row if type(row.get("step")) is int else None
