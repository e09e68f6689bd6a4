"""The errors a person is meant to read, which the programs print without a traceback, and checks that raise them."""

from dataclasses import fields
from math import isfinite
from typing import Any


class UsageError(ValueError):
    """Input that a run cannot start with: one sentence naming the flag or file and what to do. Exit code 2."""


class DamageError(UsageError):
    """A file that was written earlier and is now missing, damaged or altered; the sentence names it."""


class NewerError(DamageError):
    """A file of a newer version of this project: not damaged, and to be left as it is."""


class RunError(RuntimeError):
    """A failure that ends a run which had started: one sentence on what happened and what to do. Exit code 1."""


def first_line(error: BaseException) -> str:
    """The first line of an error message of some library."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require(condition: bool, sentence: str) -> None:
    """Raise a UsageError with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(sentence)


def require_finite(config: Any) -> None:
    """Raise a UsageError if a number among the flags of this dataclass is not finite."""
    for each in fields(config):
        value = getattr(config, each.name)
        for number in value if isinstance(value, tuple) else (value,):
            finite = not isinstance(number, float) or isfinite(number)
            require(finite, f"--{each.name} is {number}; it must be a finite number")


def require_positive(config: object, *names: str) -> None:
    """Raise a UsageError if one of these flags is given and not above 0."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"--{name} is {value}; it must be above 0")


def require_natural(config: object, *names: str) -> None:
    """Raise a UsageError if one of these flags is below 0."""
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"--{name} is {value}; it must not be below 0")


def require_fraction(config: object, *names: str) -> None:
    """Raise a UsageError if one of these flags is not in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        require(0 <= value < 1, f"--{name} is {value}; it must be at least 0 and below 1")
