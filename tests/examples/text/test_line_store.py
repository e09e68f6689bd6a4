"""Lines of text files: the lines that Python reads, whatever the file is like, in any number of processes."""

import gzip
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import BinaryIO

import pytest

import line_store
from line_store import LineStore, open_lines
from measure_lines import make_text, memory_of_readers
from rectified_flow.errors import UsageError

TEXTS = {
    "plain": b"one\ntwo\nthree\n",
    "no newline at the end": b"one\ntwo\nthree",
    "windows": b"one\r\ntwo\r\n\r\nthree\r\n",
    "empty lines": b"\n\none\n\n\ntwo\n\n",
    "empty lines at the end without newline": b"one\n\n\r",
    "a byte order mark": b"\xef\xbb\xbfone\ntwo\n",
    "other separators": "one\x0bstill\u2028one\ntwo\x85\n".encode(),
    "characters of many bytes": "žluťoučký kůň\n日本語\n🌼🌻\n".encode() * 50,
}


def lines_of(content: bytes) -> list[str]:
    """As text mode reads them."""
    text = content.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    return [line.removesuffix("\r") for line in text.split("\n")]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("block", [16, 2**24])
def test_the_lines_are_those_of_the_file(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_store, "BLOCK", max(block, 64) if name.startswith("characters") else block)
    path = tmp_path / "text.txt"
    path.write_bytes(TEXTS[name])
    expected = lines_of(TEXTS[name])
    assert list(open_lines(path, skip_empty=False)) == expected
    store = open_lines(path)
    assert list(store) == [line for line in expected if line]
    assert store[-1] == store[len(store) - 1]


def write(path: Path, count: int, word: str = "line") -> Path:
    path.write_text("".join(f"{word} {number}\n" for number in range(count)))
    return path


def test_several_files_are_one_after_the_other(tmp_path: Path) -> None:
    store = open_lines(write(tmp_path / "a", 3, "a"), write(tmp_path / "b", 2, "b"))
    assert list(store) == ["a 0", "a 1", "a 2", "b 0", "b 1"]
    assert store[-2] == "b 0"
    with pytest.raises(IndexError, match="line 5 is out of range for 5 lines"):
        store[5]


def read_some(store: LineStore, numbers: list[int]) -> list[str]:
    return [store[number] for number in numbers]


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_processes_read_it_from_a_small_pickle(method: str, tmp_path: Path) -> None:
    store = open_lines(write(tmp_path / "text", 5000))
    assert store[17] == "line 17"
    assert len(pickle.dumps(store)) < 2000
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(read_some, (store, [4999, 0])) == ["line 4999", "line 0"]


def test_a_killed_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_store, "BLOCK", 1000)
    path, read = write(tmp_path / "text", 1000), line_store._read_block
    count = 0

    def die(file: BinaryIO) -> bytes:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return read(file)

    monkeypatch.setattr(line_store, "_read_block", die)
    with pytest.raises(KeyboardInterrupt):
        open_lines(path)
    assert not (tmp_path / "text.lines-index").exists()
    assert list(open_lines(path)) == [f"line {number}" for number in range(1000)]
    blocks = -(-path.stat().st_size // 1000)
    assert count <= 6 + blocks - 5 + 1, "it read the first blocks again"


def test_a_changed_file_gets_a_new_index(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    before = open_lines(path).fingerprint
    write(path, 12)
    assert len(open_lines(path)) == 12
    write(path, 5)
    assert len(open_lines(path)) == 5
    write(path, 10)
    os.utime(path, (1, 1))
    assert open_lines(path).fingerprint == before
    path.write_text(path.read_text().replace("line 3", "Line\n3"))
    assert open_lines(path)[3] == "Line", "of the same size, at another time"


def test_a_touched_file_keeps_its_index(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    open_lines(path)
    made = (tmp_path / "text.lines-index/starts.uint64").stat().st_mtime_ns
    os.utime(path, (1, 1))
    open_lines(path)
    assert (tmp_path / "text.lines-index/starts.uint64").stat().st_mtime_ns == made


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    open_lines(path)
    starts = tmp_path / "text.lines-index/starts.uint64"
    starts.write_bytes(starts.read_bytes()[:-8])
    assert len(list(open_lines(path))) == 10


def test_a_line_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_store, "BLOCK", 10)
    path = tmp_path / "text"
    path.write_text("one\n" + "x" * 400 + "\ntwo\n")
    assert list(open_lines(path)) == ["one", "x" * 400, "two"]


@pytest.mark.parametrize("name", ["text.lines-index", "text.lines-index.building"])
def test_a_folder_of_the_users_is_left_alone(name: str, tmp_path: Path) -> None:
    path, own = write(tmp_path / "text", 10), tmp_path / name / "thesis.txt"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(UsageError, match=r"holds thesis.txt, which this project did not write: move it away"):
        open_lines(path)
    assert own.read_text() == "mine"


def test_a_file_that_is_cut_while_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    store = open_lines(path)
    assert store[9] == "line 9"
    os.truncate(path, 20)
    with pytest.raises(UsageError, match="was truncated while it was read"):
        store[9]


def test_without_the_right_to_write_beside_it_the_index_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    path = write(folder / "text", 10)
    monkeypatch.setattr(os, "access", lambda *_arguments: False)  # a test may run as root
    assert len(open_lines(path, cache_dir=tmp_path / "cache")) == 10
    assert [each.name for each in folder.iterdir()] == ["text"]
    assert len(open_lines(path, cache_dir=tmp_path / "cache")) == 10


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"\n\r\n\n", "contains only empty lines"),
        (gzip.compress(b"text\n", mtime=0), r"line 1 of .* is not UTF-8: unpack or convert .* \(gunzip -k"),
        (b"one\n\ntwo\ncaf\xe9\n", "line 4 of .* is not UTF-8"),
        ("text\n".encode("utf-16"), "line 1 of .* is not UTF-8"),
    ],
)
def test_bad_input(content: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_store, "BLOCK", 100)
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        open_lines(path)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_processes_share_a_large_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    make_text(path, 500_000)
    store = open_lines(path)
    assert len(store) == 500_000
    assert max(memory_of_readers(store, processes=2, reads=5000)) < 1_000_000


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder: pass text files"):
        open_lines(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no regular file: pass text files"):
        open_lines(tmp_path / "pipe")
    with pytest.raises(UsageError, match="does not exist"):
        open_lines(tmp_path / "none")
