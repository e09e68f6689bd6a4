"""Files of JSON lines, one line for each step."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rectified_flow.errors import DamageError
from rectified_flow.system.files import flush, parse_document, read_bytes, replace_file


class LineFile:
    """A file of JSON lines that has each step once and in order, also after kills and on a full disk.

    Args:
        path: the file.
        step: the step that the run starts at. Lines of later steps, which a killed run left, are dropped. At step 0 an
            older file is kept beside the new one.
        warn: called with a sentence if the file has damaged lines, which are dropped.

    Raises:
        OSError: if the file cannot be written.
        UsageError: if its rights forbid reading it.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], object] = print) -> None:
        self.path = path
        if step == 0 and path.exists():
            path.replace(path.with_suffix(".old.jsonl"))
        rows = self._parsed()
        damaged = rows[:-1].count(None)  # a killed run leaves half a last line
        if damaged:
            warn(f"warning: dropped {damaged} damaged line{'s' * (damaged > 1)} of {path}")
        kept = "".join(json.dumps(row) + "\n" for row in rows if row is not None and row["step"] <= step)
        if path.exists():
            replace_file(path, kept)
        self._good_size = len(kept.encode())
        self._unwritten = b""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a line. If the disk is full, the line is written together with the next one.

        Raises:
            OSError: if the disk is full.
        """
        self._unwritten += (json.dumps(row) + "\n").encode()
        self._write()

    def flush(self) -> None:
        """Put all lines on the disk.

        Raises:
            OSError: if the disk is full.
        """
        if self._unwritten:
            self._write()
        if self.path.exists():
            flush(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete and undamaged lines."""
        return [row for row in self._parsed() if row is not None]

    def numbers(self, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> dict[int, float]:
        """Return the numbers called ``name`` by step, of the lines that have these ``settings``."""
        rows = [row for row in self.rows() if settings.items() <= row.items()]
        return {row["step"]: row[name] for row in rows if type(row.get(name)) in (int, float)}

    def _write(self) -> None:
        self.path.touch()
        with self.path.open("r+b") as file:
            file.truncate(self._good_size)  # a full disk may have taken half a line
            file.seek(self._good_size)
            file.write(self._unwritten)
        self._good_size += len(self._unwritten)
        self._unwritten = b""

    def _parsed(self) -> list[dict[str, Any] | None]:
        """Return each line of the file, or None for a damaged one; after the last line break, there is half a line."""
        return [self._parse(line) for line in read_bytes(self.path).split(b"\n")] if self.path.exists() else []

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = parse_document(line, dict[str, Any], self.path)
        except DamageError:
            return None
        return row if type(row.get("step")) is int else None
