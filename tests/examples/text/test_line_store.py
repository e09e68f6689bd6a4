"""Lines of text files: the lines that Python reads, whatever the file is like, in any number of processes."""

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import line_store
from line_store import LineStore, open_lines
from measure_lines import make_text, own_memory
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse
from tests.ranks import run_on_ranks
from token_lines import Split, TokenLines, make_tokenizer
from train_masked_text import TextFlags, train

TEXTS = {
    "plain": b"one\ntwo\nthree\n",
    "no newline at the end": b"one\ntwo\nthree",
    "windows": b"one\r\ntwo\r\n\r\nthree\r\n",
    "empty lines": b"\n\none\n\n\ntwo\n\n",
    "empty lines at the end without newline": b"one\n\n\r",
    "lines of spaces": b"one\n  \t\n  two \n \r\n ",
    "a byte order mark": b"\xef\xbb\xbfone\ntwo\n",
    "a byte order mark alone": b"\xef\xbb\xbf\none\n",
    "other separators": "one\x0bstill\u2028one\ntwo\x85\n".encode(),
    "characters of many bytes": "žluťoučký kůň\n日本語\n🌼🌻\n".encode() * 50,
}


def lines_of(content: bytes) -> list[str]:
    """The lines with text, as text mode reads them."""
    lines = [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n")]
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("block", [5, 2**24])
def test_the_lines_are_those_of_the_file(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_store, "BLOCK", block)
    path = tmp_path / "text.txt"
    path.write_bytes(TEXTS[name])
    store = open_lines([path])
    assert list(store) == lines_of(TEXTS[name])
    assert len(store) == len(lines_of(TEXTS[name]))
    assert store[-1] == store[len(store) - 1]


def write(path: Path, count: int, word: str = "line") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{word} {number}\n" for number in range(count)))
    return path


def test_several_files_and_folders_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_store, "OPEN_FILES", 2)
    write(tmp_path / "folder/b.txt", 2, "b")
    write(tmp_path / "folder/inner/c.txt", 1, "c")
    write(tmp_path / "folder/readme.md", 1, "other")
    (tmp_path / "folder/a.txt").write_text("")
    store = open_lines([write(tmp_path / "z", 3, "z"), tmp_path / "folder"])
    assert list(store) == ["z 0", "z 1", "z 2", "b 0", "b 1", "c 0"]
    assert [store[index] for index in (5, 0, 4, -2)] == ["c 0", "z 0", "b 1", "b 1"]
    with pytest.raises(IndexError, match="line 6 is out of range for 6 lines"):
        store[6]


@pytest.fixture
def dataset(tmp_path: Path) -> TokenLines:
    lines = Split(open_lines([write(tmp_path / "text", 5000)]), max_samples=4000)
    make_tokenizer(tmp_path / "tokenizer.json", lines, 200)
    return TokenLines(lines, tmp_path / "tokenizer.json", 8)


def test_the_length_needs_no_text_and_an_index_is_built_once(
    dataset: TokenLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(line_store, "index_blocks")  # a second index would need it
    store, content = open_lines([tmp_path / "text"]), pickle.dumps(dataset)
    (tmp_path / "text").unlink()
    assert len(store) == 5000
    assert len(pickle.loads(content)) == 4000


def test_a_small_pickle_is_read_by_loader_processes_of_each_start_method(dataset: TokenLines) -> None:
    assert len(pickle.dumps(dataset)) < 1000
    assert dataset[19] == {"text": "line 21", "tokens": pytest.approx(dataset[19]["tokens"])}
    assert len(pickle.dumps(dataset)) < 1000, "after reading"
    for method in ("fork", "forkserver", "spawn"):
        loader = DataLoader(dataset, 2, sampler=[0, 3999, 7, 19], num_workers=1, multiprocessing_context=method)
        batches = list(loader)
        assert [batch["text"] for batch in batches] == [["line 1", "line 4210"], ["line 8", "line 21"]], method
        assert all(batch["tokens"].shape == (2, 8) for batch in batches)


def own_memory_for_reading(store: LineStore) -> int:
    before = own_memory()
    for number in range(len(store) - 1, 0, -7):
        assert store[number].startswith(f"{number} ")
    return own_memory() - before


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")
def test_two_processes_share_the_memory_of_a_text(tmp_path: Path) -> None:
    make_text(tmp_path / "text", 300_000)
    store = open_lines([tmp_path / "text"])
    taken = run_on_ranks(2, own_memory_for_reading, store)
    assert max(taken) < (tmp_path / "text").stat().st_size / 2


def test_a_changed_file_gets_a_new_index(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    first = open_lines([path])
    fingerprint = first.fingerprint
    write(path, 12)
    assert len(open_lines([path])) == 12
    with pytest.raises(UsageError, match="changed during the run: run the command again"):
        first[0]
    write(path, 10)
    os.utime(path, (1, 1))
    assert open_lines([path]).fingerprint == fingerprint, "the same text at another time"
    assert open_lines([write(tmp_path / "copy", 10)]).fingerprint == fingerprint, "the same text at another place"
    path.write_text(path.read_text().replace("line 3", "Line\n3"))
    assert open_lines([path])[3] == "Line", "of the same size, at another time"


def change(path: Path, how: str) -> None:
    match how:
        case "shorter":
            os.truncate(path, 20)
        case "longer":
            path.write_text(path.read_text() + "more\n")
        case "other text":
            path.write_text(path.read_text().upper())


@pytest.mark.parametrize("how", ["shorter", "longer", "other text"])
def test_a_file_that_changes_before_it_is_read_is_a_sentence(how: str, tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    store = open_lines([path])
    os.utime(path, (1, 1))
    change(path, how)
    with pytest.raises(UsageError, match="changed after it was indexed: run the command again"):
        store[9]


def test_a_file_that_is_cut_while_it_is_read_is_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    store = open_lines([path])
    assert store[9] == "line 9"
    change(path, "shorter")
    with pytest.raises(UsageError, match="changed after it was indexed: run the command again"):
        store[9]


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    starts = open_lines([path]).folder / "starts.uint64"
    starts.write_bytes(starts.read_bytes()[:-8])
    assert len(list(open_lines([path]))) == 10


def test_a_folder_of_the_users_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "text", 10)
    own = open_lines([path]).folder / "thesis.txt"
    own.write_text("mine")
    write(path, 11)
    with pytest.raises(UsageError, match=r"holds thesis.txt, which this project did not write: move it away"):
        open_lines([path])
    assert own.read_text() == "mine"


BAD: dict[str, tuple[Any, str]] = {
    "empty": (b"", "contains no text: pass other files"),
    "spaces": (b"\n\r\n \n", "contains no text: pass other files"),
    "packed": (
        gzip.compress(b"text\n", mtime=0),
        r"line 1 of --text .* is not UTF-8: unpack or convert .* \(gunzip -k",
    ),
    "Latin": (b"one\n\ntwo\ncaf\xe9\n", "line 4 of --text .* is not UTF-8"),
    "UTF-16": ("text\n".encode("utf-16"), "line 1 of --text .* is not UTF-8"),
    "missing": (None, "missing is not a file or a folder: pass text files"),
    "no\0name": (None, r"cannot be used \(its name contains a null character\): choose another path"),
    "no text": (os.mkdir, "no text is a folder without .txt files: pass text files"),
    "pipe": (os.mkfifo, "pipe is not a file or a folder: pass text files"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_store, "BLOCK", 3)
    (content, sentence), path = BAD[name], tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    with pytest.raises(UsageError, match=sentence):
        train(parse(TextFlags, "", ["--text", str(path), "--output_dir", str(tmp_path / "run")]))
    assert not list(tmp_path.glob("run/[!.]*.json"))
