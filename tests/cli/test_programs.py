"""Tests of the end of a program: exit codes, error messages and time limits."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.cli import programs as launch
from rectified_flow.errors import RunError
from rectified_flow.system.signals import Interrupted
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

FLAGS = "rectified_flow.cli.training_flags:TrainConfig"


def finish(_config: Any) -> bool:
    return True


def stop(_config: Any) -> bool:
    return False


def give_up(_config: Any) -> bool:
    raise Interrupted("SIGTERM")


def fail(_config: Any) -> bool:
    raise RunError("the disk is full")


def run(main: str, flags: list[str]) -> int:
    """The exit code of a program."""
    sys.argv = ["program.py", *flags]
    with pytest.raises(SystemExit) as end:
        launch.run(f"tests.cli.test_programs:{main}", FLAGS, "A program.")
    return int(end.value.code or 0)


def run_all(commands: list[tuple[str, list[str]]]) -> list[int]:
    return [run(*each) for each in commands]


def test_the_exit_code_of_a_program() -> None:
    commands = {
        ("finish",): 0,
        ("stop",): 0,
        ("give_up",): 0,
        ("fail",): 1,
        ("finish", "--local-rank=3", "--seed", "1"): 0,  # as torch.distributed.launch passes it
        ("finish", "--seed", "x"): 2,
    }
    [ended] = run_on_ranks(1, run_all, [(main, flags) for main, *flags in commands])
    assert dict(zip(commands, ended, strict=True)) == commands


def end_in_a_mute_group(code: int) -> None:
    launch.LEAVING_TIMEOUT = 0.5
    import torch.distributed as dist

    setattr(dist, "destroy_process_group", lambda: time.sleep(2 * PATIENCE))  # noqa: B010
    launch._exit(code)


def test_leaving_does_not_wait_for_a_group_that_does_not_end() -> None:
    with pytest.raises(AssertionError, match="died with exit code 143"):
        run_on_ranks(2, end_in_a_mute_group, 143)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a"), "program.py: a: No space left on device"),
        (OSError(errno.EPERM, "Not permitted", ".a.tmp", None, "a"), "program.py: a: Not permitted"),
        (OSError(errno.ENOENT, "No such file", "a"), "FileNotFoundError: [Errno 2] No such file: 'a'\n"),
        (OSError(errno.EACCES, "Permission denied"), "PermissionError: [Errno 13] Permission denied\n"),
    ],
    ids=str,
)
def test_errors_of_the_system(monkeypatch: pytest.MonkeyPatch, error: OSError, ending: str) -> None:
    """An error that names a file and that a user can repair has no traceback."""
    monkeypatch.setattr(sys, "argv", ["program.py"])
    text = launch._describe(error)
    assert text.endswith(ending)
    assert text.startswith("program.py") == ending.startswith("program.py")


COMPILING = """
import torch
import torch._inductor.config as config
from rectified_flow.cli import programs

config.cpp.cxx = (None, "/nowhere/g++")
try:
    torch.compile(lambda x: x.sin() + 1)(torch.ones(7))
except Exception as error:
    print(programs._describe(error))
"""


def test_a_missing_compiler_is_one_sentence(tmp_path: Path) -> None:
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILING]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout == "--compile needs a C++ compiler (g++): install one, or leave the flag out\n"


def test_a_failure_of_tensorboard_is_one_of_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a free port, TensorBoard prints the reason and returns a code."""
    board = pytest.importorskip("tensorboard.program").TensorBoard
    monkeypatch.setattr(board, "configure", lambda *_, **__: None)
    monkeypatch.setattr(board, "main", lambda _: -1)
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setattr(sys, "argv", ["watch", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        launch.watch()
    assert end.value.code == 1
    assert capfd.readouterr().err == "watch: TensorBoard has failed for the reason above\n"


BLOCKED = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
sys.argv = ["train_oxford.py", *{flags!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
SCRIPT = str(Path(__file__).resolve().parents[2] / "train_oxford.py")


@pytest.mark.parametrize(
    ("package", "flags", "distribution"), [("tyro", ["--help"], "tyro"), ("PIL", ["--dry_run"], "pillow")]
)
def test_a_missing_package_is_one_sentence(package: str, flags: list[str], distribution: str) -> None:
    code = BLOCKED.format(package=package, flags=flags, script=SCRIPT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2, done.stderr
    sentence = f"the Python package {package} is not installed: pip install --upgrade {distribution}"
    assert done.stderr == f"train_oxford.py: error: {sentence}\n"
