"""Parsing of durations such as ``90s``, ``45 min``, ``1h30m`` or ``1.5 hours``. Imports no torch.

The length of a run is chosen by :mod:`rectified_flow.cli.planning.plan`.
"""

import re
from collections.abc import Sequence

from rectified_flow.errors import UsageError

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
"""Seconds in each unit by its first letter, the longest unit first."""
_NUMBER = r"[0-9]{1,6}(?:\.[0-9]+)?"
_TIME = re.compile(
    rf"(?:({_NUMBER}) *(?:d|days?))? *(?:({_NUMBER}) *(?:h|hrs?|hours?))?"
    rf" *(?:({_NUMBER}) *(?:m|mins?|minutes?))? *(?:({_NUMBER}) *(?:s|secs?|seconds?))?"
)
SHORTEST = 1e-3  # shortest time that a budget can have [s]


def seconds_of(budget: str) -> float:
    """Return the seconds of a time such as ``90s``, ``45 min``, ``1h30m`` or ``1.5h``."""
    found = _TIME.fullmatch(budget.strip().lower())
    parts = zip(found.groups(), UNITS.values(), strict=True) if found else ()
    seconds = sum(float(number) * unit for number, unit in parts if number)
    if seconds < SHORTEST:
        raise UsageError(f"--budget is {budget}; it must be a time such as 90s, 45min, 1h30m or 1d")
    return seconds


def with_joined_time(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line, with the words of a time joined into one, such as ``--budget 45 min``."""
    words, is_time = list[str](), False
    for word in arguments:
        if is_time and words[-1] != "--budget" and not word.startswith("-"):
            words[-1] += f" {word}"
        else:
            is_time = word == "--budget" or (is_time and words[-1] == "--budget")
            words.append(word)
    return words


def time_text(seconds: float) -> str:
    """Return a time for :func:`seconds_of`, such as ``1h30m``: whole seconds, and decimals of less than a minute."""
    if seconds < 60:
        return f"{max(seconds, SHORTEST):.3f}".rstrip("0").rstrip(".") + "s"
    text, left = "", round(seconds)
    for unit, size in UNITS.items():
        text, left = text + f"{left // size}{unit}" * (left >= size), left % size
    return text
