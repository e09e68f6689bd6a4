"""The data: lines of text files as tokens, of which every 20th line is held out."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from line_store import LineStore
from masked_model import SPECIAL, UNKNOWN
from rectified_flow.errors import DamageError, first_line
from rectified_flow.system.artifact import claim, write_output
from rectified_flow.system.files import prepare_folder, read_bytes
from rectified_flow.system.terminal import progress_bar

HELD_OUT_EVERY = 20
TOKENIZER_LINES = 190_000
"""Largest number of lines that a tokenizer is trained on."""


class Split(Sequence[str]):
    """The held-out lines of a text, or the other lines, which are trained on.

    Args:
        lines: all lines. Line 0 and every 20th after it are held out.
        held_out: whether the items are the held-out lines.
        max_samples: number of first items to keep, if there are more.
    """

    def __init__(self, lines: LineStore, *, held_out: bool = False, max_samples: int | None = None) -> None:
        self.lines, self.held_out = lines, held_out
        count = -(-len(lines) // HELD_OUT_EVERY)
        count = count if held_out else len(lines) - count
        self.length = count if max_samples is None else min(count, max_samples)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"line {index} is out of range for {len(self)} lines")
        others = HELD_OUT_EVERY - 1
        held_out, other = index * HELD_OUT_EVERY, index // others * HELD_OUT_EVERY + index % others + 1
        return self.lines[held_out if self.held_out else other]


class TokenLines(Dataset[dict[str, Any]]):
    """Lines as a ``text`` and its ``tokens``, int64 ``[length]``, padded with 0.

    The dataset pickles as the paths of the index and of the tokenizer. Each process opens both when it first reads.

    Args:
        lines: the lines.
        tokenizer: file of the tokenizer.
        length: tokens of a line.
    """

    def __init__(self, lines: Split, tokenizer: Path, length: int) -> None:
        self.lines, self.tokenizer, self.length = lines, tokenizer, length
        tokens = sha256(read_bytes(tokenizer)).hexdigest()
        content = (lines.lines.fingerprint, lines.held_out, len(lines), tokens, length)
        self.fingerprint = sha256(repr(content).encode()).hexdigest()
        self.description = f"{len(self):,} lines"

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = self.lines[index]
        return {"text": text, "tokens": self._encode([text])[0]}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the tokens of some items, ``[b, length]``, which is all that training needs."""
        return {"tokens": self._encode([self.lines[index] for index in indices])}

    def _encode(self, texts: Sequence[str]) -> Tensor:
        encoded = self._encoder.encode_batch(texts)
        tokens = torch.zeros(len(encoded), self.length, dtype=torch.int64)
        for row, each in zip(tokens, encoded, strict=True):
            row[: len(each)] = torch.tensor(each.ids)
        return tokens

    @cached_property
    def _encoder(self) -> Tokenizer:
        encoder = load_tokenizer(self.tokenizer)
        encoder.enable_truncation(self.length)
        return encoder

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encoder"}


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer from its file."""
    try:
        return Tokenizer.from_buffer(read_bytes(path))
    except ValueError as error:
        raise DamageError(f"{path} is damaged ({first_line(error)}): start a new run in another folder") from error


def make_tokenizer(path: Path, lines: Split, vocabulary: int, *, has_begun: bool = False) -> None:
    """Train a run's tokenizer on the first lines, and write it to ``path``.

    A run that has a checkpoint keeps its tokenizer. Without a checkpoint, an existing tokenizer is replaced, because it
    may have been trained on another text.
    """
    claim(prepare_folder("output_dir", path.parent), [path.name])
    if not (has_begun and path.exists()):
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*SPECIAL], show_progress=False)
        tokenizer.train_from_iterator(_first(lines, TOKENIZER_LINES), trainer)
        write_output(path, tokenizer.to_str())


def _first(lines: Split, count: int) -> Iterator[str]:
    numbers = range(min(len(lines), count))
    for number in progress_bar(iterable=numbers, desc="training the tokenizer", unit="line"):
        yield lines[number]
