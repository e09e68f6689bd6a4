"""Start and end a program: alone, or as one of the processes of torchrun or accelerate launch."""

import atexit
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch.distributed as dist
from accelerate.utils import set_seed

from rectified_flow.errors import RunError, UsageError, first_line
from rectified_flow.interruption import signals_request_end
from rectified_flow.processes.command_line import parse
from rectified_flow.processes.joining import join_processes
from rectified_flow.progress import outliving_streams


class Config(Protocol):
    """The flags of a program."""

    @property
    def seed(self) -> int: ...


C = TypeVar("C", bound=Config)


def run(main: Callable[[C], None], config_class: type[C], description: str) -> None:
    """Parse the command line, call ``main(config)`` in every process, and leave with an exit code.

    What ends one process ends all: the first that leaves explains it, once. The code is 0 for a run that finished or
    was asked to end, 2 for a :class:`UsageError`, 1 for all else. Only an error that nobody foresaw has a traceback.
    """
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)  # torch's own, in jvp
    program = os.path.basename(sys.argv[0])
    code, orderly = 0, True
    try:
        with outliving_streams(), signals_request_end():
            state = join_processes()
            config = parse(config_class, description, quiet=not state.is_main_process)
            set_seed(config.seed)
            main(config)
    except UsageError as error:
        code = _agreed_code(f"{program}: error: {error}", code=2)
    except RunError as error:
        code = _agreed_code(f"{program}: {error}", code=1)
    except KeyboardInterrupt:
        code, orderly = _agreed_code("ended on request; the same command starts again", code=0), False
    except SystemExit as explained:
        if dist.is_initialized():
            dist.barrier()  # all parse the same flags: let the one that explains the error finish first
        code = int(explained.code or 0)
    except Exception as error:
        code = _agreed_code(_explain(error), code=1)
    _exit(code, orderly)


def _agreed_code(sentence: str, code: int) -> int:
    """The first process to get here prints ``sentence``, and its ``code`` is that of all."""
    first, agreed = _agree_in_leaving(code)
    if first:
        with suppress(OSError):
            print(sentence, file=sys.stderr, flush=True)
    return agreed


def _exit(code: int, orderly: bool) -> None:
    """Exit; one of several processes that trained does so past the interpreter's own end.

    DDP keeps the process group's threads alive for good, and one that still lets go of the last message while the
    interpreter ends aborts the process. After an error, clean-up could wait for a device that waits for another.
    """
    if code == 2 or not dist.is_initialized():
        sys.exit(code)
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
    if not dist.is_initialized():
        return True, code
    with suppress(Exception):  # the store goes with the process that hosts it
        mine = f"{dist.get_rank()} {code}"
        leader = dist.distributed_c10d._get_default_store().compare_set("leaving", "", mine).decode()
        return leader == mine, int(leader.split()[1])
    return code == 1, code  # bad input that process has explained; of its death nobody has spoken


def _explain(error: Exception) -> str:
    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    if isinstance(error, RuntimeError) and ("gloo" in str(error) or isinstance(error, dist.DistError)):
        return f"{rank}lost the connection to another process, which ended or hangs ({first_line(error)})"
    return rank + "".join(traceback.format_exception(error))
