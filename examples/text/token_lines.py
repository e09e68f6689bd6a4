"""The data: lines of text files as tokens, of which every 20th line is held out."""

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from masked_model import SPECIAL, UNKNOWN
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.artifact import claim, write_output
from rectified_flow.system.terminal import progress_bar

HELD_OUT_EVERY = 20
TOKENIZER_LINES = 200_000


def open_lines(paths: Sequence[Path]) -> datasets.Dataset:
    """Return the non-empty lines of UTF-8 text files, as a table on the disk that all processes map."""
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UsageError(f"--text {missing[0]} is not a file: pass text files")
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # the sentence below says what it would log
    try:
        lines = datasets.load_dataset("text", data_files=[*map(str, paths)], split="train")
    except datasets.exceptions.DatasetGenerationError as error:
        reason = first_line(error.__cause__ or error)
        raise UsageError(f"--text {' '.join(map(str, paths))} cannot be read ({reason}): pass UTF-8 text") from error
    return lines.filter(_are_written, batched=True, input_columns="text")


def _are_written(texts: Sequence[str]) -> list[bool]:
    return [bool(text.strip()) for text in texts]


class TokenLines(Dataset[dict[str, Tensor]]):
    """Lines as ``tokens``, int64 ``[length]``, padded with 0.

    Args:
        lines: all lines.
        tokenizer: the tokenizer, as JSON.
        length: tokens of a line.
        held_out: whether the items are the held-out lines, or the others.
    """

    def __init__(self, lines: datasets.Dataset, tokenizer: str, length: int, *, held_out: bool = False) -> None:
        self.lines, self.tokenizer, self.length, self.held_out = lines, tokenizer, length, held_out
        content = (lines._fingerprint, sha256(tokenizer.encode()).hexdigest(), length, held_out)
        self.fingerprint = sha256(repr(content).encode()).hexdigest()
        self.description = f"{len(self):,} lines"

    def __len__(self) -> int:
        held_out = -(-len(self.lines) // HELD_OUT_EVERY)
        return held_out if self.held_out else len(self.lines) - held_out

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.read_batch([index])["tokens"][0]}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the tokens of some items, ``[b, length]``."""
        encoded = self._encoder.encode_batch(self.lines[[self._line(index) for index in indices]]["text"])
        tokens = torch.zeros(len(encoded), self.length, dtype=torch.int64)
        for row, each in zip(tokens, encoded, strict=True):
            row[: len(each)] = torch.tensor(each.ids)
        return {"tokens": tokens}

    def _line(self, index: int) -> int:
        others = HELD_OUT_EVERY - 1
        return index * HELD_OUT_EVERY if self.held_out else index // others * HELD_OUT_EVERY + index % others + 1

    @cached_property
    def _encoder(self) -> Tokenizer:
        encoder = Tokenizer.from_str(self.tokenizer)
        encoder.enable_truncation(self.length)
        return encoder

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encoder"}


def read_tokenizer(path: Path, lines: datasets.Dataset, vocabulary: int) -> str:
    """Read a run's tokenizer as JSON, or train it on the first lines if there is none yet."""
    claim(path.parent, [path.name])
    if not path.exists():
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*SPECIAL], show_progress=False)
        tokenizer.train_from_iterator(_training_lines(lines, min(len(lines), TOKENIZER_LINES)), trainer)
        write_output(path, tokenizer.to_str())
    return path.read_text()


def _training_lines(lines: datasets.Dataset, count: int) -> Iterator[str]:
    for number in progress_bar(iterable=range(count), desc="training the tokenizer", unit="line"):
        if number % HELD_OUT_EVERY:
            yield lines[number]["text"]
