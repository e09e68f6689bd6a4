"""Start and end a program: alone, or as one of the processes of torchrun or accelerate launch.

The command line is parsed before torch is imported, so that ``--help`` and a mistyped flag answer at once. This module
itself imports next to nothing: until :func:`run` heeds signals, Ctrl-C would end in a traceback.
"""

import argparse
import atexit
import errno
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread, Timer
from typing import Any

from rectified_flow.errors import RunError, UsageError, first_line
from rectified_flow.system.signals import STOPPED, exit_on_signals, stop_on_signals
from rectified_flow.system.terminal import open_missing_streams, tolerant_streams

EXPLANATION_TIMEOUT = 10.0
"""Seconds that torchrun's other workers leave to rank 0 to explain a mistyped flag, before they exit too."""
LEAVING_TIMEOUT = 10.0
"""Seconds that a process which ends waits for an answer of the others."""

REMEDIES = {
    errno.EACCES: "change its rights",
    errno.EPERM: "change its rights",
    errno.EROFS: "choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its links lead in a circle",
    errno.EIO: "check the disk",
    errno.ESTALE: "check the disk",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
}
"""What to do about errors of the operating system that no program can foresee everywhere."""


def run(main: str, config_class: str, description: str) -> None:
    """Parse the command line, call ``main`` with the config in every process, and exit with a code.

    The end of one process ends all: the first that exits explains why, once. The code is 0 for a run that finished,
    ``--interrupted_exit_code`` for one that was asked to stop, 2 for a :class:`UsageError`, 1 for all else. Only an
    unforeseen error has a traceback. A signal that comes before the command line is parsed, or as the program leaves,
    kills the process.

    Args:
        main: ``module:function``, imported after parsing; it returns False if it was asked to stop.
        config_class: ``module:class`` of all flags of the program.
        description: for ``--help``.
    """
    open_missing_streams()
    with tolerant_streams(), exit_on_signals():
        _prepare_process()
        config = _parse(config_class, description)
        _exit(*_call(main, config))


def _prepare_process() -> None:
    from rectified_flow.system.machine import share_processors

    share_processors()
    # torch's own warning, in forward-mode derivatives
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)


def _call(main: str, config: Any) -> tuple[int, bool]:
    """The exit code, and whether all processes end here alike."""
    stopped = config.program.interrupted_exit_code
    try:
        with stop_on_signals(), _naming_missing_packages():
            with exit_on_signals(stopped):
                function = _find(main)
            return (stopped if function(config) is False else 0), True
    except UsageError as error:
        return _agreed_code(f"{_program()}: error: {error}", code=2), True
    except RunError as error:
        return _agreed_code(f"{_program()}: {error}", code=1), True
    except KeyboardInterrupt:
        return _agreed_code(STOPPED, code=stopped), False
    except Exception as error:
        return _agreed_code(_explain(error), code=1), True


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _parse(config_class: str, description: str) -> Any:
    from rectified_flow.flags import parse
    from rectified_flow.system.machine import allow_open_files

    speaks = os.environ.get("RANK", "0") == "0"
    try:
        with _naming_missing_packages():
            flags = _find(config_class)
        config = parse(flags, description, _without_local_rank(sys.argv[1:]), quiet=not speaks)
        allow_open_files()
        with exit_on_signals(config.program.interrupted_exit_code):
            _import_modules(config.program.import_)
        return config
    except UsageError as error:
        if speaks:
            print(f"{_program()}: error: {error}", file=sys.stderr, flush=True)
        code = 2
    except SystemExit as explained:
        code = int(explained.code or 0)
    if not speaks and code != 0 and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(EXPLANATION_TIMEOUT)  # torchrun ends all workers with the first that exits
    sys.exit(code)


def _without_local_rank(arguments: list[str]) -> list[str]:
    """The command line without the flag that torch.distributed.launch adds; LOCAL_RANK, if unset, is its value."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--local-rank", "--local_rank", type=int)
    try:
        found, others = finder.parse_known_args(arguments)
    except argparse.ArgumentError:  # without a number, which the real parser explains
        return arguments
    if found.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(found.local_rank))
    return others


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


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def _naming_missing_packages() -> Iterator[None]:
    """A package of an extra that is not installed becomes a UsageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", __name__.partition(".")[0]):
            raise
        raise UsageError(
            f"the Python package {package} is not installed: the first lines of {_program()} say how to install it"
        ) from error


def _agreed_code(sentence: str, code: int) -> int:
    """The first process to get here prints ``sentence``, and its ``code`` is that of all."""
    first, agreed = _agree_in_leaving(code)
    if first:
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

    if code != 1:
        atexit._run_exitfuncs()
        if orderly:  # else others may be in a collective, and this would wait for them
            limit = Timer(LEAVING_TIMEOUT, os._exit, [code])
            limit.daemon = True
            limit.start()
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _agree_in_leaving(code: int) -> tuple[bool, int]:
    # No collective: the others may never come here. The first to write into the store they met at leads.
    if not _in_group():
        return True, code
    import torch.distributed as dist

    mine, leader = f"{dist.get_rank()} {code}", ""

    def find_leader() -> None:
        nonlocal leader
        with suppress(Exception):  # the store goes with the process that hosts it
            leader = dist.distributed_c10d._get_default_store().compare_set("leaving", "", mine).decode()

    call = Thread(target=find_leader, daemon=True)  # it never returns if the network does not answer
    call.start()
    call.join(LEAVING_TIMEOUT)
    if leader:
        return leader == mine, int(leader.split()[1])
    return code == 1, code  # bad input that process has explained; of its death nobody has spoken


def _in_group() -> bool:
    """Whether this process has joined others."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_initialized())


def _explain(error: Exception) -> str:
    import torch.distributed as dist

    rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
    if _is_out_of_memory(error):
        return f"{rank}out of memory ({first_line(error)}): lower --batch_size, --image_size or --dim"
    if isinstance(error, RuntimeError) and ("gloo" in str(error) or isinstance(error, dist.DistError)):
        return f"{rank}lost the connection to another process, which ended or hangs ({first_line(error)})"
    if isinstance(error, OSError) and error.filename is not None and error.errno in REMEDIES:
        file = error.filename2 or error.filename  # of a renamed file, the one that was to be
        return f"{_program()}: {rank}{file}: {error.strerror}; {REMEDIES[error.errno]}"
    return rank + "".join(traceback.format_exception(error))


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device's, torch's, numpy's or Python's memory is full; torch has no class for that of the CPU."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def train_oxford() -> None:
    """``train_oxford.py`` and ``rectified-flow-train``."""
    run(
        "rectified_flow.cli.train:train_rectified_flow",
        "rectified_flow.cli.train_flags:TrainRectifiedFlow",
        "Train a rectified flow on Oxford Flowers, or on your own pictures with --dataset_path FOLDER.\n\n"
        "Start it with python on one device, and with torchrun or accelerate launch on several. The same command "
        "resumes from the newest checkpoint. With --dataset_path, some flags that are not given are chosen by "
        "the number of pictures, and printed.",
    )


def train_mean_flow() -> None:
    """``train_mean_flow.py`` and ``rectified-flow-train-mean-flow``."""
    run(
        "rectified_flow.cli.train:train_mean_flow",
        "rectified_flow.cli.train_flags:TrainMeanFlow",
        "Train a mean flow, which generates in one step, on Oxford Flowers, or on your own pictures with "
        "--dataset_path FOLDER.\n\nStart it with python on one device, and with torchrun or accelerate launch on "
        "several. The same command resumes from the newest checkpoint. With --dataset_path, some flags that are "
        "not given are chosen by the number of pictures, and printed.",
    )


def sample() -> None:
    """``sample.py`` and ``rectified-flow-sample``."""
    run(
        "rectified_flow.cli.sample:sample",
        "rectified_flow.cli.run_flags:SampleConfig",
        "Draw pictures from a trained flow: numbered PNGs and a grid of them.\n\nThe model is built from the "
        "description in its checkpoint. Start it with torchrun or accelerate launch to draw on several devices.",
    )


def evaluate() -> None:
    """``evaluate.py`` and ``rectified-flow-evaluate``."""
    run(
        "rectified_flow.cli.evaluate:evaluate",
        "rectified_flow.cli.run_flags:EvaluateConfig",
        "Measure how near a trained flow's pictures are to the pictures it was trained on.\n\nDistances are printed "
        "and written to the run's evaluation.json. Start it with torchrun or accelerate launch to share the work "
        "between several devices.",
    )


def export() -> None:
    """``export.py`` and ``rectified-flow-export``."""
    run(
        "rectified_flow.cli.export:export",
        "rectified_flow.cli.run_flags:ExportConfig",
        "Write one network call of a trained flow as a program that other software runs, beside a model.json that "
        "says what goes in and comes out.\n\nThe program is compared with the flow before it is written. It needs the "
        "packages of the extra export: pip install '.[export]'.",
    )


def watch() -> None:
    """``watch.py`` and ``rectified-flow-watch``."""
    run(
        "rectified_flow.cli.watch:watch",
        "rectified_flow.cli.run_flags:WatchConfig",
        "Show runs in a browser while they train: losses, samples, distances, and how long they will take.\n\nThe "
        "page is served to this machine alone, unless --host says otherwise. It reads the folders of the runs, and "
        "writes nothing.",
    )
