"""Tests of the example on text lines: resumed runs, the flags of the program, and the accuracy of the model."""

import json
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from line_store import open_lines
from rectified_flow.cli.settings import parse
from rectified_flow.errors import UsageError
from scripts import validate_setup
from tests.programs import assert_refused
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses
from token_lines import Split, make_tokenizer

WORDS = {"the": ["sun", "sea", "sky"], "a": ["cat", "dog", "owl"]}
FLAGS = (
    "--vocabulary 60 --length 8 --width 32 --layers 1 --train_num_steps 8 --save_every 4 --log_every 2"
    " --measure_every 4 --measured_lines 150 --lr_warmup_steps 0 --learning_rate 3e-3"
)
STRANGE = "zebra"
"""A word of the last lines only."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 lines in which each article is followed by words of its own, and 200 lines of another word."""
    path, draw = tmp_path_factory.mktemp("text") / "lines.txt", random.Random(0)
    with path.open("w") as file:
        for _ in range(3000):
            articles = draw.choices([*WORDS], k=3)
            print(" ".join(f"{article} {draw.choice(WORDS[article])}" for article in articles), file=file)
        file.write(f"{STRANGE}\n" * 200)
    return path


def train(*commands: str) -> str:
    """Run the program with each of some command lines, and return what it prints."""
    import train_masked_text

    with redirect_stdout(StringIO()) as output:
        for words in commands:
            train_masked_text.train(parse(train_masked_text.TextFlags, "", words.split()))
    return output.getvalue()


@pytest.fixture(scope="module")
def folder(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in one process: ``whole``, ``resumed`` at step 4, ``few`` lines, ``copy`` and ``ours`` by files of flags."""
    folder = tmp_path_factory.mktemp("runs")
    base = f"--text {text} {FLAGS} --batch_size 16 --output_dir {folder}"
    (folder / "exclamations.txt").write_text("! ! ! a\n" * 60)
    flags = {"text": [f"{folder}/exclamations.txt"], "max_train_samples": 5000, "batch_size": 8, "train_num_steps": 99}
    (folder / "flags.json").write_text(json.dumps(flags))
    commands = [
        f"{base}/whole",
        f"{base}/resumed --train_num_steps 4",
        f"{base}/resumed",
        f"{base}/few --max_train_samples 1000",
        f"--config {folder}/whole/config.json --train_num_steps 2 --output_dir {folder}/copy",
        f"--config {folder}/flags.json {FLAGS} --output_dir {folder}/ours",
    ]
    (folder / "printed.txt").write_text(*run_on_ranks(1, train, *commands))
    return folder


def test_a_resumed_run_ends_with_the_same_bytes(folder: Path) -> None:
    assert "resume      step 4" in (folder / "printed.txt").read_text()
    assert_same_bytes(folder / "whole", folder / "resumed", 8)


@pytest.mark.slow
def test_the_same_run_on_two_processes_with_loader_processes(text: Path, folder: Path, tmp_path: Path) -> None:
    words = f"--text {text} {FLAGS} --batch_size 8 --num_workers 1 --output_dir {tmp_path}"
    printed, silent = run_on_ranks(2, train, words)
    assert "batch       8 per process x 2 processes" in printed
    assert " = 16\n" in printed
    assert silent == ""
    assert losses(tmp_path) == pytest.approx(losses(folder / "whole"), rel=1e-4)
    assert list(losses(tmp_path)) == [2, 4, 6, 8]


def test_max_train_samples_trains_on_the_first_lines(folder: Path) -> None:
    """1,000 lines are 1,053 with the held-out ones, and the word of the last lines is not among them."""
    data = [line for line in (folder / "printed.txt").read_text().splitlines() if line.startswith("data ")]
    assert [line.split()[1] for line in data] == ["3,040", "3,040", "3,040", "1,000", "3,040", "57"]
    assert STRANGE in (folder / "whole/tokenizer.json").read_text()
    assert STRANGE not in (folder / "few/tokenizer.json").read_text()
    assert losses(folder / "few") != losses(folder / "whole")


def test_flags_in_a_file_and_on_the_command_line(folder: Path) -> None:
    config = json.loads((folder / "ours/config.json").read_text())["training"]
    assert config["batch_size"] == 8, "of the file"
    assert config["train_num_steps"] == 8, "of the command line, which comes before that of the file"
    assert max(losses(folder / "ours")) == 8


def test_the_config_of_a_run_starts_the_same_run(folder: Path) -> None:
    assert losses(folder / "copy") == {2: losses(folder / "whole")[2]}


def test_the_first_word_of_the_vocabulary_may_be_the_most_frequent(folder: Path) -> None:
    """Token 3 follows the special ones; the tokenizer sorts characters, so that it is the exclamation mark."""
    row = json.loads((folder / "ours/accuracy.jsonl").read_text().splitlines()[0])
    assert row["guess"] > 0.5, "three of four words are exclamation marks"


@pytest.mark.slow
def test_it_finds_more_than_the_most_frequent_token(text: Path, tmp_path: Path) -> None:
    flags = "--train_num_steps 120 --measure_every 120 --ema_decay 0.9 --batch_size 16"
    run_on_ranks(1, train, f"--text {text} {FLAGS} {flags} --output_dir {tmp_path}")
    *_, row = [json.loads(line) for line in (tmp_path / "accuracy.jsonl").read_text().splitlines()]
    assert row["accuracy"] > row["guess"] + 0.1
    assert (tmp_path / "accuracy.png").exists()


@pytest.mark.parametrize("line", ["sun sun sun", "[MASK] [PAD] [UNK]"])
def test_a_text_without_words_to_predict_is_a_sentence(line: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(f"{line}\n" * 60)
    words = f"--text {tmp_path}/lines.txt --output_dir {tmp_path}/run --train_num_steps 1"
    with pytest.raises(UsageError, match=r"3 lines have fewer than two different known words"):
        train(words)


def test_the_tokenizer_of_a_start_without_a_checkpoint_is_made_again(tmp_path: Path) -> None:
    """It may be that of another text."""
    for number, word in enumerate(("zebra", "river")):
        (tmp_path / f"{word}.txt").write_text(f"the {word} and the sun\n" * 60)
        lines, path = Split(open_lines([tmp_path / f"{word}.txt"])), tmp_path / "run/tokenizer.json"
        make_tokenizer(path, lines, 100, has_begun=False)
        make_tokenizer(path, lines, 20 + number, has_begun=True)
        assert f'"{word}"' in path.read_text()


def a_damaged_tokenizer(folder: Path) -> str:
    (folder / "lines.txt").write_text("the sun\n" * 60)
    train(f"--output_dir {folder} --text {folder}/lines.txt {FLAGS} --train_num_steps 1 --measured_lines 1")
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    return f"--text {folder}/lines.txt"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (lambda _folder: "", "--text is missing"),
        (lambda _folder: "--text x --width 33", "it must be a multiple of 32"),
        (lambda _folder: "--text x --max_train_samples 0", "`max_train_samples` is 0; it must be greater than 0"),
        (a_damaged_tokenizer, r"tokenizer.json is damaged \(.*\): start a new run in another folder"),
    ],
)
def test_bad_flags_are_a_sentence(flags: Callable[[Path], str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        train(f"--output_dir {tmp_path} {flags(tmp_path)}")


def test_a_missing_text_is_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    assert_refused("train_masked_text.py", 1, f"--text {tmp_path}/none", f"--text {tmp_path}/none is not a file")


def test_the_setup_is_checked_with_a_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(validate_setup, "check_two_processes", lambda: "of another test")
    assert validate_setup.main(validate_setup.Flags(text=(text,), output_dir=tmp_path)) == 0
    assert "3,200 lines, the first is" in capsys.readouterr().out
    assert validate_setup.main(validate_setup.Flags(text=(tmp_path / "none",), output_dir=tmp_path)) == 1
    assert f"FIX   data           --text {tmp_path}/none is not a file" in capsys.readouterr().out
