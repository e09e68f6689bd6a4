"""A file that may not be opened."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """No file of that name may be opened, as rights do not bind root."""
    open_file = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield
