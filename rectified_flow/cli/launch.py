"""Start and end a program: alone, or as one of the processes of torchrun or accelerate launch.

The command line is parsed before torch is imported, so that ``--help`` and a mistyped flag answer at once.
"""

import atexit
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from rectified_flow.cli.command_line import parse
from rectified_flow.cli.flags import ProgramConfig
from rectified_flow.errors import RunError, UsageError, first_line
from rectified_flow.interruption import stop_on_signals
from rectified_flow.progress import tolerate_closed_streams

EXPLANATION_TIMEOUT = 10.0
"""Seconds that torchrun's other workers leave to rank 0 to explain a mistyped flag, before they exit too."""


class Config(Protocol):
    """All flags of a program."""

    @property
    def program(self) -> ProgramConfig: ...


def run(main: str, config_class: type[Any], description: str) -> None:
    """Parse the command line, call ``main`` with the config in every process, and exit with a code.

    The end of one process ends all: the first that exits explains why, once. The code is 0 for a run that finished or
    was asked to stop, 2 for a :class:`UsageError`, 1 for all else. Only an unforeseen error has a traceback.

    Args:
        main: ``module:function``, imported after parsing.
        config_class: all flags of the program.
        description: for ``--help``.
    """
    # torch's own warning, in forward-mode derivatives
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)
    program = os.path.basename(sys.argv[0])
    config = _parse(config_class, description, program)
    code, orderly = 0, True
    try:
        with tolerate_closed_streams(), stop_on_signals():
            _function(main)(config)
    except UsageError as error:
        code = _agreed_code(f"{program}: error: {error}", code=2)
    except RunError as error:
        code = _agreed_code(f"{program}: {error}", code=1)
    except KeyboardInterrupt:
        code, orderly = _agreed_code("stopped as requested; run the same command to start again", code=0), False
    except Exception as error:
        code = _agreed_code(_explain(error), code=1)
    _exit(code, orderly)


def _parse(config_class: type[Any], description: str, program: str) -> Any:
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(config_class, description, quiet=not speaks)
        _import_modules(config.program.import_)
        return config
    except UsageError as error:
        if speaks:
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        code = 2
    except SystemExit as explained:
        code = int(explained.code or 0)
    if not speaks and code != 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(EXPLANATION_TIMEOUT)  # torchrun ends all workers with the first that exits
    sys.exit(code)


def _import_modules(names: tuple[str, ...]) -> None:
    """Import the modules of ``--import``, also from the current folder.

    Raises:
        UsageError: if one cannot be imported.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module's own
            raise UsageError(
                f"--import {name} failed ({type(error).__name__}: {first_line(error)}): name a module, as in Python's "
                "import, that the current folder or the environment has"
            ) from error


def _function(name: str) -> Callable[[Any], None]:
    module, _, function = name.partition(":")
    found: Callable[[Any], None] = getattr(importlib.import_module(module), function)
    return found


def _agreed_code(sentence: str, code: int) -> int:
    """The first process to get here prints ``sentence``, and its ``code`` is that of all."""
    first, agreed = _agree_in_leaving(code)
    if first:
        with suppress(OSError):
            print(sentence, file=sys.stderr, flush=True)
    return agreed


def _exit(code: int, orderly: bool) -> None:
    """Exit; one of several processes that trained does so past the interpreter's own end.

    DDP keeps the process group's threads alive for good. One of them that releases the last message while the
    interpreter ends aborts the process. After an error, clean-up could wait for a device that waits for another.
    """
    if code == 2 or not _in_group():
        sys.exit(code)
    import torch.distributed as dist

    if code == 0:
        atexit._run_exitfuncs()
        if orderly:  # else others may be in a collective, and this would wait for them
            dist.destroy_process_group()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _agree_in_leaving(code: int) -> tuple[bool, int]:
    # No collective: the others may never come here. The first to write into the store they met at leads.
    if not _in_group():
        return True, code
    import torch.distributed as dist

    with suppress(Exception):  # the store goes with the process that hosts it
        mine = f"{dist.get_rank()} {code}"
        leader = dist.distributed_c10d._get_default_store().compare_set("leaving", "", mine).decode()
        return leader == mine, int(leader.split()[1])
    return code == 1, code  # bad input that process has explained; of its death nobody has spoken


def _in_group() -> bool:
    """Whether this process has joined others."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_initialized())


def _explain(error: Exception) -> str:
    import torch.distributed as dist

    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    if isinstance(error, RuntimeError) and ("gloo" in str(error) or isinstance(error, dist.DistError)):
        return f"{rank}lost the connection to another process, which ended or hangs ({first_line(error)})"
    return rank + "".join(traceback.format_exception(error))
