"""Tests of atomic writing, of reading regular files only, and of documents with their types."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from rectified_flow.errors import DamageError, NewerError, UsageError
from rectified_flow.system.files import (
    hash_file,
    parse_document,
    read_bytes,
    read_document,
    read_lines,
    replace_file,
    writing,
)
from tests.system.refusing import refusing

FORK = multiprocessing.get_context("fork")
SIZE = 200_000


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


def test_any_name_that_a_disk_takes_is_written(tmp_path: Path) -> None:
    for name in ("é" * 127, "n" * 255):
        replace_file(tmp_path / name, "content")
        assert read_bytes(tmp_path / name) == b"content"
    path = tmp_path / ("n" * 256)
    with pytest.raises(UsageError, match="is too long: choose a shorter name"), writing(path):
        replace_file(path, "content")


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
    words = "file cannot be read .Permission denied.: change its permissions"
    with refusing(monkeypatch, "file"), pytest.raises(UsageError, match=words) as refused:
        read_bytes(tmp_path / "file")
    assert not isinstance(refused.value, DamageError)


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Document:
    step: int
    kind: Literal["a", "b"] = "a"
    parts: dict[str, Part] = field(default_factory=dict)
    place: Path | None = None
    sides: tuple[int, ...] = ()
    share: float = 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null", "is damaged: it is null, but input should be an object"),
        ("[]", "is damaged: it is [], but"),
        ("{}", "is damaged: step Field required"),
        ('{"step": "6"}', 'is damaged: step is "6", but input should be a valid integer'),
        ('{"step": 6.5}', "step is 6.5"),
        ('{"step": true}', "step is true"),
        ('{"step": NaN}', "step is NaN"),
        ('{"step": 1, "share": "0.5"}', "share is"),
        ('{"step": 1, "kind": "c"}', 'is damaged: kind is "c", but input'),
        ('{"step": 1, "parts": []}', "parts is []"),
        ('{"step": 1, "parts": {"x": {"size": null}}}', "parts.x.size is null"),
        ('{"step": 1, "sides": [1, "2"]}', 'sides.1 is "2"'),
        ('{"step": 1, "place": 3}', "place is 3"),
        ('{"step": "' + 1000 * "x" + '"}', "xxx..., but"),
        ("{", "is damaged: Invalid JSON: "),
        ("", "is damaged: Invalid JSON: "),
        (100_000 * "[", "is damaged: Invalid JSON: recursion"),
        ('{"step": ' + 5000 * "9" + "}", "is damaged: Invalid JSON: number out of range"),
        (b"\xff\xfe{}", "is damaged: Invalid JSON: "),
        (b'{"step": 1, "place": "\xff"}', "is damaged: Invalid JSON: "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_document_that_does_not_fit(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamageError) as refused:
        read_document(path, Document)
    sentence = str(refused.value)
    assert sentence.startswith(f"{path} ")
    assert words in sentence
    assert len(sentence) < len(str(path)) + 200
    assert "\n" not in sentence


def test_a_document_that_fits() -> None:
    text = '{"step": 3, "kind": "b", "parts": {"x": {"size": 1}}, "place": "/a", "sides": [1, 2], "share": 1}'
    expected = Document(3, "b", {"x": Part(1)}, Path("/a"), (1, 2), 1.0)
    assert parse_document(text, Document, "a text") == expected


@pytest.mark.parametrize("document", [{"step": 1, "later": 2}, {"step": "1", "parts": {"x": {"size": 1, "later": 2}}}])
def test_a_key_of_a_newer_version(document: dict[str, Any]) -> None:
    with pytest.raises(
        NewerError, match=r"^the text was written by a newer version .* 'parts.x.later'|'later'.*: upgrade"
    ):
        parse_document(json.dumps(document), Document, "the text")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_lines_end_at_the_ends_of_lines_alone(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(" caf\xe9\r\n\r\none\u2028line\x0bof\x85text\nlast".encode(encoding))
    assert read_lines(path) == ["caf\xe9", "one\u2028line\x0bof\x85text", "last"]


def test_lines_of_windows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes("caf\xe9".encode("cp1252"))
    with pytest.raises(UsageError, match=r"prompts\.txt is not encoded as UTF-8, but perhaps as Windows-1252: save"):
        read_lines(tmp_path / "prompts.txt")
