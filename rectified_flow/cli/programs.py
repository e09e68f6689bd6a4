"""Start and end a program: alone, or as one of the processes of torchrun or accelerate launch.

The command line is parsed before torch is imported, so that ``--help`` and a mistyped flag answer at once. This module
itself imports no other package: until :func:`run` handles errors and signals, either would end in a traceback.
"""

import atexit
import difflib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from threading import Timer
from typing import Any

from rectified_flow.errors import RunError, UsageError, first_line, is_out_of_memory
from rectified_flow.system.signals import handling_signals, stop_on_signals
from rectified_flow.system.terminal import prepare_streams, shown, spelling_arguments

CLI, COMMAND = "rectified_flow.cli", "rectified-flow"
TRAIN = f"{CLI}.training_flags:TrainConfig"
LEAVING_TIMEOUT, EXPLAINING_TIMEOUT = 10.0, 5.0
"""Seconds that an exiting process waits for the other processes, and for the error message of rank 0."""
DISTRIBUTIONS = {"PIL": "pillow", "ot": "pot", "sklearn": "scikit-learn"}
"""Names of packages for pip, where they differ from those in Python."""
NO_COMPILER = ("InvalidCxxCompiler", "Failed to find C compiler")
"""Parts of the errors of torch.compile on a CPU and on a GPU if there is no compiler."""


def run(main: str, config_class: str, description: str | None, *, in_layers: bool = False) -> None:
    """Parse the command line, call ``main`` with its flags in every process, and exit with a code.

    ``main`` takes the groups of flags, or their :class:`rectified_flow.cli.settings.Settings` if ``in_layers``.

    The code is 0 for a run that finished or that a signal stopped, 2 for a :class:`UsageError` or a missing package, 1
    for anything else. Only an unforeseen error prints a traceback. A signal that arrives before ``main`` is called, or
    while the program exits, kills the process: an exception during an import may be suppressed.
    """
    prepare_streams()
    with handling_signals(signal.SIG_DFL), spelling_arguments(partial(_flag_of, config_class)):
        paragraphs = (description or "").split("\n\n")
        text = "\n\n".join(" ".join(each.split()) for each in paragraphs)
        _exit(_outcome(main, config_class, text, in_layers=in_layers))


def _flag_of(config_class: str, argument: str) -> str:
    """Return the flag of an argument that a message names: of this program, or else of the training program."""
    from rectified_flow.flags import flag_of

    if (own := flag_of(resolve_name(config_class), argument)) is not None:
        return f"--{own}"
    other = flag_of(resolve_name(TRAIN), argument) if config_class.startswith(CLI) else None
    return f"--{other} of {COMMAND} train" if other else f"`{argument}`"


def _outcome(main: str, config_class: str, description: str, *, in_layers: bool) -> int:
    """Run the program, and return its exit code."""
    try:
        from rectified_flow.cli.settings import import_modules

        settings = _parse(config_class, description)
        import_modules(settings.values.program.import_)
        function = resolve_name(main)
        with stop_on_signals():
            function(settings if in_layers else settings.values)
        return 0
    except KeyboardInterrupt as interrupt:
        return _explain(f"{_reason_of(str(interrupt))}; run the same command to start again", 0)
    except Exception as error:
        mistake = str(error) if isinstance(error, UsageError) else _missing_package(error)
        if mistake is not None:
            return _explain(f"{_program()}: error: {mistake}", 2)
        return _explain(_describe(error), 1)


def _parse(config_class: str, description: str) -> Any:
    """Return the settings of the command line; ``--help`` and a mistyped flag are answered once, by SystemExit."""
    from rectified_flow.cli.settings import read_settings
    from rectified_flow.system.machine import share_processors

    share_processors()
    # torch itself causes this warning in forward-mode derivatives.
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*", category=FutureWarning)
    # DDP warns about the gradients of 1x1 convolutions, which are correct in either memory format.
    warnings.filterwarnings("ignore", message="Grad strides do not match", category=UserWarning)
    try:
        return read_settings(resolve_name(config_class), description, _arguments(), quiet=not _is_rank_0())
    except SystemExit as explained:
        if explained.code:
            _await_rank_0()
        raise


def _arguments() -> list[str]:
    # torch.distributed.launch passes this flag in addition to LOCAL_RANK.
    return [each for each in sys.argv[1:] if not each.startswith(("--local-rank=", "--local_rank="))]


def _program() -> str:
    return os.path.basename(sys.argv[0])


def _reason_of(request: str) -> str:
    """Return the beginning of a sentence about the stop request of a program."""
    if request == "SIGTERM" and "TORCHELASTIC_RUN_ID" in os.environ:
        return "stopped by a user or by the launcher, which ends all processes if one fails"
    return f"stopped, as the {request}" if request == "launcher exited" else "stopped as requested"


def _missing_package(error: Exception) -> str | None:
    """Return a sentence if ``error`` is the failed import of another package."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if package in ("", __name__.partition(".")[0]):
        return None
    missing = isinstance(error, ModuleNotFoundError)
    problem = "is not installed" if missing else f"cannot be imported ({first_line(error)})"
    return f"the Python package {package} {problem}: pip install --upgrade {DISTRIBUTIONS.get(package, package)}"


def _describe(error: Exception) -> str:
    """Return a sentence for an error that a person can remedy, or else its traceback."""
    if isinstance(error, RunError):
        return f"{_program()}: {error}"
    group = _group()
    rank = "" if group is None else f"rank {group.get_rank()}: "
    if is_out_of_memory(error):
        return f"{rank}out of memory ({first_line(error)}): lower --batch_size, or end other programs that use it"
    # Classes are compared by name, since torch may not be imported.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "DistError" in kinds or ("RuntimeError" in kinds and "gloo" in str(error)):
        return f"{rank}lost the connection to another process, which ended or hangs ({first_line(error)})"
    if any(words in str(error) for words in NO_COMPILER):
        return f"{rank}--compile needs a C++ compiler (g++): install one, or leave the flag out"
    # filename2 is the new name if a rename failed. A missing file indicates a bug, so its traceback is printed.
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, FileNotFoundError):
        return f"{_program()}: {rank}{error.filename2 or error.filename}: {error.strerror}"
    return rank + "".join(traceback.format_exception(error))


def _explain(sentence: str, code: int) -> int:
    """Print the sentence, and return the exit code."""
    if code:
        _await_rank_0()
    if code or _is_rank_0():
        print(shown(sentence), file=sys.stderr, flush=True)
    return code


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _await_rank_0() -> None:
    """Give rank 0 the time to explain an error that all ranks have: torchrun ends the others with the first."""
    if not _is_rank_0() and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(EXPLAINING_TIMEOUT)


def _group() -> Any:
    """Return the module ``torch.distributed`` if this process has joined a process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_initialized() else None


def _exit(code: int) -> None:
    """Exit; one of several processes that trained does so without the clean-up of the interpreter.

    DDP keeps the threads of the process group for good, and one that releases the last message while the interpreter
    ends aborts the process. After an error, clean-up could wait for a device that waits for another process.
    """
    dist = _group()
    if dist is not None and code != 1:
        leaving = Timer(LEAVING_TIMEOUT, os._exit, [code])  # other processes may be in a collective
        leaving.start()
        atexit._run_exitfuncs()
        dist.destroy_process_group()
        leaving.cancel()
    if dist is None or code == 2:  # before training
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train_oxford() -> None:
    """Train a rectified flow on your own pictures, or on Oxford Flowers.

    With --dataset_path FOLDER, some flags that are not given are chosen by the number of pictures, and printed. Start
    it with torchrun or accelerate launch to train on several devices. The same command resumes from the newest
    checkpoint.
    """
    run(f"{CLI}.train:train", TRAIN, train_oxford.__doc__, in_layers=True)


def train_mean_flow() -> None:
    """Train a one-step generator, which needs one network call per picture.

    With --teacher RUN, the generator learns from samples of a trained rectified flow (--method distill or reflow).
    Without --teacher, a mean flow learns from Oxford Flowers or your own pictures (--dataset_path FOLDER). With a
    teacher or your own pictures, the program chooses some of the flags that are not given, and prints them. Start it
    with torchrun or accelerate launch to train on several devices. The same command resumes from the newest checkpoint.
    """
    run(f"{CLI}.train:train", f"{CLI}.training_flags:OneStepConfig", train_mean_flow.__doc__, in_layers=True)


def sample() -> None:
    """Generate pictures with a trained flow: numbered PNGs and a grid of them.

    The model is built from the description in its checkpoint. Start it with torchrun or accelerate launch to sample on
    several devices.
    """
    run(f"{CLI}.sample:sample", f"{CLI}.model_flags:SampleConfig", sample.__doc__)


def evaluate() -> None:
    """Measure how near generated pictures are to the training pictures.

    Distances are printed and written to the run's evaluation.json. Start it with torchrun or accelerate launch to share
    the work between several devices.
    """
    run(f"{CLI}.evaluate:evaluate", f"{CLI}.model_flags:EvaluateConfig", evaluate.__doc__)


def export() -> None:
    """Write a trained flow as a web page, or as a program for other software.

    The program is one network call. A model.json beside it describes its inputs and outputs. The program is compared
    with the flow before it is written. It needs the packages of the extra export: pip install '.[export]'.
    """
    run(f"{CLI}.export:export", f"{CLI}.model_flags:ExportConfig", export.__doc__)


def watch() -> None:
    """Show runs in TensorBoard while they train.

    The runs are trained with --log_with tensorboard. The page has curves, samples and settings.
    """
    run(f"{__name__}:serve_tensorboard", f"{CLI}.model_flags:WatchConfig", watch.__doc__)


def studio() -> None:
    """Open a page in the browser for all steps from pictures to a generator.

    Each action on the page runs a command of this program, which continues when the page or the studio is closed. Needs
    the packages of the extra studio: pip install '.[studio]'.
    """
    run("rectified_flow.studio.serve:serve", "rectified_flow.studio.flags:StudioConfig", studio.__doc__)


def serve_tensorboard(config: Any) -> None:
    """Start TensorBoard on the folder of the runs, and serve until Ctrl-C."""
    from tensorboard import program

    folder = config.watched.runs
    if not any(folder.rglob("events.out.tfevents*")):
        raise UsageError(f"no run in {folder} logs to TensorBoard: train with --log_with tensorboard")
    board = program.TensorBoard()
    board.configure(argv=["tensorboard", "--logdir", str(folder)])
    if board.main() != 0:
        raise RunError("TensorBoard has failed for the reason above")


PROGRAMS: dict[str, Callable[[], None]] = {
    "train": train_oxford,
    "one-step": train_mean_flow,
    "sample": sample,
    "evaluate": evaluate,
    "export": export,
    "watch": watch,
    "studio": studio,
}
"""Programs by the first argument of :data:`COMMAND`; their scripts in a checkout have the names of the functions."""
if not os.path.exists(os.path.join(os.path.dirname(__file__), os.pardir, "studio")):
    del PROGRAMS["studio"]  # an optional folder


def main() -> None:
    """Start the program that the first argument names: ``rectified-flow train`` is :func:`train_oxford`."""
    name, *arguments = _arguments() or [""]
    if name in PROGRAMS:
        sys.argv = [f"{COMMAND} {name}", *arguments]  # the name of the program in its messages
        return PROGRAMS[name]()
    prepare_streams()
    with handling_signals(signal.SIG_DFL):
        if name in ("-h", "--help", "--version"):
            if _is_rank_0():
                print(_version() if name == "--version" else _help())
            sys.exit()
        close = difflib.get_close_matches(name, [*PROGRAMS, "--help", "--version"], 1)
        remedy = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(PROGRAMS)}"
        sys.exit(_explain(f"{COMMAND}: error: {name} is not a command; {remedy}" if name else _help(), 2))


def _help() -> str:
    summaries = {name: (program.__doc__ or "").partition("\n")[0] for name, program in PROGRAMS.items()}
    programs = "\n".join(f"  {name:<9} {summary}" for name, summary in summaries.items())
    return f"""usage: {COMMAND} COMMAND [flags]

Train image generators from your own pictures with rectified flow.

commands:
{programs}

{COMMAND} COMMAND --help lists the flags of a command; {COMMAND} --version prints the version.

The first steps, with a folder of pictures:
  {COMMAND} train --dataset_path FOLDER --dry_run    print the plan of a run of one hour
  {COMMAND} train --dataset_path FOLDER              train; the same command resumes
  {COMMAND} sample                                   generate pictures with the trained flow"""


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    name = "rectified-flow-trainer"
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:  # a checkout
        return f"{name} is not installed"
