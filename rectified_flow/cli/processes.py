"""The processes of a program."""

from typing import Any

from accelerate import PartialState

from rectified_flow.distributed.agreement import check_equal
from rectified_flow.distributed.joining import join_processes
from rectified_flow.flags import plain


def join(config: Any) -> PartialState:
    """Join the processes of this launch, and check that all were started with the same flags, paths aside.

    Raises:
        UsageError: if they were not, or cannot work together.
        RunError: if the others do not come, or no connection to them is possible.
    """
    state = join_processes()
    check_equal(state, lambda: {f"--{name}": value for name, value in plain(config, paths=False).items()})
    return state
