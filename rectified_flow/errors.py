"""The errors a person is meant to read: the programs print them without a traceback."""

from math import isfinite


class UsageError(ValueError):
    """Input the run cannot start with: one sentence naming the flag or file and what to do. Exit code 2."""


class RunError(RuntimeError):
    """What a run that had started cannot go on with: one sentence on what happened and what to do. Exit code 1."""


def first_line(error: BaseException) -> str:
    """What an error of some library says, cut to a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def require_positive(config: object, name: str) -> None:
    """Raise a UsageError if a flag that was given is not above 0."""
    value = getattr(config, name)
    require(value is None or (value > 0 and isfinite(value)), f"--{name} is {value}; it must be above 0")


def require(condition: bool, sentence: str) -> None:
    """Raise a UsageError with ``sentence`` unless ``condition`` holds."""
    if not condition:
        raise UsageError(sentence)
