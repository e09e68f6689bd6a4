"""Tests of two programs at once in one folder, and of the manifest of an output folder."""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import pytest
from filelock import FileLock

from rectified_flow.cli.evaluate import _write_down
from rectified_flow.errors import UsageError
from rectified_flow.load import RESULTS_FILE
from rectified_flow.runs import folder
from rectified_flow.runs.folder import lock_folder, write_status
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.system import files
from rectified_flow.system.artifact import OUTPUTS_MANIFEST, claim, claimed_names, write_output
from rectified_flow.system.files import locked
from tests.patience import PATIENCE

FORK = multiprocessing.get_context("fork")
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.mark.parametrize(
    ("folder_mode", "file_mode"), [(0o755, 0o644), (0o700, 0o600), (0o777, 0o666), (0o2775, 0o664)]
)
def test_who_may_write_in_a_folder_may_open_its_lock(tmp_path: Path, folder_mode: int, file_mode: int) -> None:
    tmp_path.chmod(folder_mode)
    before = os.umask(0o077)
    try:
        with locked(tmp_path, "run", "another process writes", 0):
            assert oct((tmp_path / ".run.lock").stat().st_mode & 0o777) == oct(file_mode)
    finally:
        os.umask(before)


def as_nobody(pipe: Any, action: Callable[..., str], *arguments: object) -> None:
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    pipe.send(action(*arguments))


def said_by_nobody(action: Callable[..., str], *arguments: object) -> str:
    """Return the result of ``action`` in a process of another user."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=as_nobody, args=(theirs, action, *arguments))
    process.start()
    theirs.close()
    try:
        return str(ours.recv())
    finally:
        process.join(PATIENCE)


def lock_run(path: Path) -> str:
    try:
        with ExitStack() as held:
            lock_folder(TrainingConfig(output_dir=path), held)
        return "claimed"
    except (UsageError, PermissionError) as error:
        return str(error)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A run's folders, in which everyone may write; no other user reaches pytest's own."""
    with TemporaryDirectory() as name:
        for each in (Path(name), Path(name, "checkpoints")):
            each.mkdir(exist_ok=True)
            each.chmod(0o777)
        yield Path(name)


@root_only
def test_another_user_does_not_train_beside_a_run(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LOCK_TIMEOUT", 0.1)
    with ExitStack() as held:
        lock_folder(TrainingConfig(output_dir=shared), held)
        write_status(shared, "running", 1, 2)
        assert said_by_nobody(lock_run, shared).startswith(f"process {os.getpid()} on ")
    assert said_by_nobody(lock_run, shared) == "claimed"
    (shared / ".run.lock").chmod(0o600)  # as a strict umask makes it
    assert "Permission denied" in said_by_nobody(lock_run, shared)


@pytest.mark.parametrize(
    ("error", "refused"),
    [(PermissionError(13, "Permission denied"), True), (OSError(37, "No locks available"), False)],
    ids=str,
)
def test_a_lock_that_may_not_be_opened_and_one_that_cannot_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, refused: bool
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(FileLock, "acquire", fail)
    if refused:
        with pytest.raises(
            UsageError, match=r"\.lock cannot be opened \(Permission denied\): choose another folder, or"
        ):
            locked(tmp_path, "run", "another process writes", 0).__enter__()
    else:
        with locked(tmp_path, "run", "another process writes", 0):
            pass
    assert ("cannot be locked" in capsys.readouterr().out) != refused


def test_a_wait_for_another_process_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "SILENT_WAIT", 0.1)
    with FileLock(tmp_path / ".store.lock", thread_local=False) as held:
        Timer(0.4, held.release).start()
        with locked(tmp_path, "store", f"another run writes {tmp_path}", PATIENCE):
            assert capsys.readouterr().out == f"warning: another run writes {tmp_path}: waiting until it ends\n"


def write_results(path: Path, seed: int) -> None:
    for steps in range(5):
        _write_down(path, {"seed": seed, "steps": steps, "distances": {}})


def test_results_that_several_processes_write_at_once_are_all_kept(tmp_path: Path) -> None:
    writers = [FORK.Process(target=write_results, args=(tmp_path, seed)) for seed in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE)
        assert writer.exitcode == 0
    results = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert sorted((each["seed"], each["steps"]) for each in results) == [(i, j) for i in range(6) for j in range(5)]


@pytest.mark.parametrize("mine", ['{"name": "an app", "icons": []}', "{}", "text"])
def test_a_manifest_of_another_program_is_a_file_of_the_users(tmp_path: Path, mine: str) -> None:
    (tmp_path / "manifest.json").write_text(mine)
    claim(tmp_path, ["grid.png"])
    with pytest.raises(UsageError, match=r"manifest\.json would be overwritten, and this project did not write it"):
        claim(tmp_path, ["manifest.json"])
    assert (tmp_path / "manifest.json").read_text() == mine


@pytest.mark.parametrize("name", [".plot.png", "..plot", "...", "a b.png", "ä.png", "a\nb.png"])
def test_any_name_of_a_file_can_be_claimed(tmp_path: Path, name: str) -> None:
    write_output(tmp_path / name, "1")
    write_output(tmp_path / name, "2")
    assert (tmp_path / name).read_text() == "2"
    assert claimed_names(tmp_path) == {name}


PROCESSES, NAMES = 4, 25


def claim_some(folder: Path, number: int, barrier: Any) -> None:
    barrier.wait()
    for index in range(NAMES):
        claim(folder, [f"{number}-{index}.png"])


def test_programs_at_once_lose_no_name(tmp_path: Path) -> None:
    """Names that several programs add at the same moment are all in the manifest at the end."""
    barrier = FORK.Barrier(PROCESSES)
    processes = [FORK.Process(target=claim_some, args=(tmp_path, number, barrier)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    names = claimed_names(tmp_path)
    assert sorted(names) == sorted(f"{number}-{index}.png" for number in range(PROCESSES) for index in range(NAMES))
    assert {path.name for path in tmp_path.iterdir()} == {OUTPUTS_MANIFEST, ".manifest.lock"}
