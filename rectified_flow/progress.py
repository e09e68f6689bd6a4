"""The one look of progress bars."""

import sys
from typing import Any

from tqdm.auto import tqdm


def progress_bar(**arguments: Any) -> "tqdm[Any]":
    """A tqdm bar that fits the terminal, and writes a line now and then where there is none."""
    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(dynamic_ncols=True, mininterval=interval, maxinterval=interval, **arguments)
