"""The format of report lines: a label, then the text."""

from collections.abc import Mapping
from typing import Any

WIDTH = 11
"""Characters of a label."""


def line(label: str, text: object) -> str:
    """``samples     runs/demo/samples/step_00000900.png``."""
    return f"{label:<{WIDTH}} {text}"


def lines(texts: Mapping[str, object]) -> str:
    """A line for each label."""
    return "\n".join(line(label, text) for label, text in texts.items())


def size_text(width: int, height: int) -> str:
    """The sides of a picture: ``64`` of a square, else ``96x64``."""
    return str(width) if width == height else f"{width}x{height}"


class Silent:
    """Stands in for an object that only the main process has: every method exists, does nothing and returns None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_arguments: object, **_options: object) -> None:
    pass
