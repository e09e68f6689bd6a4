"""Progress bars in a common style."""

import sys
from typing import Any

from tqdm.auto import tqdm


def progress_bar(**arguments: Any) -> "tqdm[Any]":
    """A tqdm bar that fits the terminal. Without a terminal, it is refreshed every 30 seconds."""
    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(dynamic_ncols=True, mininterval=interval, maxinterval=interval, **arguments)
