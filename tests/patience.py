"""How long tests wait: until there is no doubt that something hangs, however slow or busy the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 900.0
"""Seconds after which a test gives up what it waits for. pytest itself gives up later, see pyproject.toml."""


def wait_for(what: str, condition: Callable[[], T], seconds: float = PATIENCE, every: float = 0.01) -> T:
    """Return the first true value of ``condition()``.

    Raises:
        TimeoutError: if there is none within ``seconds``.
    """
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)
    return value
