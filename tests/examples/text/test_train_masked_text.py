"""Tests of the example on text lines: resumed runs, and the accuracy of the model."""

import json
import random
from pathlib import Path

import pytest

from rectified_flow.cli.settings import parse
from rectified_flow.errors import UsageError
from tests.programs import assert_refused
from tests.ranks import run_on_ranks
from tests.training.runs import losses

WORDS = {"the": ["sun", "sea", "sky"], "a": ["cat", "dog", "owl"]}
FLAGS = (
    "--vocabulary 60 --length 8 --width 32 --layers 1 --train_num_steps 8 --save_every 4 --log_every 2"
    " --measure_every 4 --measured_lines 150 --lr_warmup_steps 0 --learning_rate 3e-3"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 lines in which each article is followed by words of its own."""
    path, draw = tmp_path_factory.mktemp("text") / "lines.txt", random.Random(0)
    with path.open("w") as file:
        for _ in range(3000):
            articles = draw.choices([*WORDS], k=3)
            print(" ".join(f"{article} {draw.choice(WORDS[article])}" for article in articles), file=file)
    return path


def train(words: str) -> None:
    import train_masked_text

    train_masked_text.train(parse(train_masked_text.TextFlags, "", words.split()))


def run(text: Path, output_dir: Path, flags: str = "", world_size: int = 1) -> Path:
    batch = f"--batch_size {16 // world_size}"
    run_on_ranks(world_size, train, f"--text {text} --output_dir {output_dir} {batch} {FLAGS} {flags}")
    return output_dir


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps without a break, in one process."""
    return run(text, tmp_path_factory.mktemp("whole"))


def test_the_same_run_on_two_processes_with_loader_processes(text: Path, whole: Path, tmp_path: Path) -> None:
    two = run(text, tmp_path / "two", "--num_workers 1", world_size=2)
    assert losses(two) == pytest.approx(losses(whole), rel=1e-4)
    assert list(losses(two)) == [2, 4, 6, 8]


@pytest.mark.slow
def test_it_finds_more_than_the_most_frequent_token(text: Path, tmp_path: Path) -> None:
    folder = run(text, tmp_path, "--train_num_steps 120 --measure_every 120 --ema_decay 0.9")
    *_, row = [json.loads(line) for line in (folder / "accuracy.jsonl").read_text().splitlines()]
    assert row["accuracy"] > row["guess"] + 0.1
    assert (folder / "accuracy.png").exists()


def test_the_first_word_of_the_vocabulary_may_be_the_most_frequent(tmp_path: Path) -> None:
    """Token 3 follows the special ones; the tokenizer sorts characters, so that it is the exclamation mark."""
    (tmp_path / "lines.txt").write_text("! ! ! a\n" * 60)
    run_on_ranks(1, train, f"--text {tmp_path}/lines.txt --output_dir {tmp_path} --batch_size 8 {FLAGS}")
    row = json.loads((tmp_path / "accuracy.jsonl").read_text().splitlines()[0])
    assert row["guess"] > 0.5, "three of four words are exclamation marks"


@pytest.mark.parametrize("line", ["sun sun sun", "[MASK] [PAD] [UNK]"])
def test_a_text_without_words_to_predict_is_a_sentence(line: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text(f"{line}\n" * 60)
    words = f"--text {tmp_path}/lines.txt --output_dir {tmp_path}/run"
    with pytest.raises(UsageError, match=r"3 lines have fewer than two different words"):
        train(words)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "--text is missing"),
        ("--text {text} --width 33", "it must be a multiple of 32"),
        ("--text missing.txt", "--text missing.txt is not a file"),
    ],
)
def test_bad_input_is_a_sentence(text: Path, flags: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        train(f"--output_dir {tmp_path} {flags.format(text=text)}")


def test_a_text_that_is_no_text_is_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"good\n\xff\n")
    assert_refused("train_masked_text.py", 1, f"--text {tmp_path}/broken", "cannot be read (")
