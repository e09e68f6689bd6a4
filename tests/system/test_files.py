"""Tests of files that are whole or absent, and of reading regular files only."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.system.files import hash_file, read_bytes, replace_file

FORK = multiprocessing.get_context("fork")
SIZE = 200_000


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """No file of that name may be opened, as rights do not bind root."""
    open_file = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


def test_a_file_is_replaced_with_the_rights_of_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for content in ("one", b"other"):
        replace_file(path, content)
    assert path.read_bytes() == b"other"
    before = os.umask(0o027)
    try:
        replace_file(path, "third")
    finally:
        os.umask(before)
    assert oct(path.stat().st_mode & 0o777) == oct(0o640)
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def replace_forever(path: Path, letter: str) -> None:
    while True:
        replace_file(path, SIZE * letter, durable=False)


def test_processes_that_replace_the_same_file_make_no_mixture(tmp_path: Path) -> None:
    """Several processes replace a file, and are killed in the middle of a write."""
    path = tmp_path / "evaluation.json"
    replace_file(path, SIZE * "a")
    writers = {letter: FORK.Process(target=replace_forever, args=(path, letter)) for letter in "abc"}
    for writer in writers.values():
        writer.start()
    seen = set()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        content = path.read_text()
        assert len(content) == SIZE
        assert len(set(content)) == 1
        seen.add(content[0])
    for writer in writers.values():
        assert writer.is_alive(), "it failed"
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    assert len(seen) > 1
    replace_file(path, "z")
    assert path.read_text() == "z"


def test_a_write_that_fails_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    replace_file(path, "one")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, "other")
    assert path.read_text() == "one"
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"content"
    assert hash_file(tmp_path / "file").startswith("ed7002b4")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_bytes, hash_file):
            with pytest.raises(DamageError, match=r"cannot be read \(.*(not a regular file|directory)"):
                read(path)
    with pytest.raises(DamageError, match="nowhere is missing"):
        read_bytes(tmp_path / "nowhere")
    words = r"file cannot be read \(Permission denied\): change its rights"
    with refusing(monkeypatch, "file"), pytest.raises(UsageError, match=words) as refused:
        read_bytes(tmp_path / "file")
    assert not isinstance(refused.value, DamageError)
