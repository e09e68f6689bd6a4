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
from rectified_flow.system.outputs import claim, write_output
from rectified_flow.system.terminal import progress_bar

HELD_OUT_EVERY = 20
TOKENIZER_LINES = 200_000


class TokenLines(Dataset[dict[str, Tensor]]):
    """Lines as ``tokens``, int64 ``[length]``, padded with 0.

    Args:
        store: all lines.
        tokenizer: the tokenizer, as JSON.
        length: tokens of a line.
        count: number of lines of the store to use, from its start.
        held_out: whether the items are the held-out lines, or the others.
    """

    def __init__(self, store: LineStore, tokenizer: str, length: int, count: int, *, held_out: bool = False) -> None:
        self.store, self.tokenizer, self.length, self.count, self.held_out = store, tokenizer, length, count, held_out
        content = (store.fingerprint, sha256(tokenizer.encode()).hexdigest(), length, count, held_out)
        self.fingerprint = sha256(repr(content).encode()).hexdigest()
        self.description = f"{', '.join(path.name for path in store.paths)}: {len(self):,} lines"

    def __len__(self) -> int:
        held_out = -(-self.count // HELD_OUT_EVERY)
        return held_out if self.held_out else self.count - held_out

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.read_batch([index])["tokens"][0]}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the tokens of some items, ``[b, length]``."""
        encoded = self._encoder.encode_batch([self.store[self._line(index)] for index in indices])
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


def read_tokenizer(path: Path, store: LineStore, count: int, vocabulary: int) -> str:
    """Read a run's tokenizer as JSON, or train it on the first ``count`` lines of the store if there is none yet."""
    claim(path.parent, [path.name])
    if not path.exists():
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*SPECIAL], show_progress=False)
        tokenizer.train_from_iterator(_training_lines(store, min(count, TOKENIZER_LINES)), trainer)
        write_output(path, tokenizer.to_str())
    return path.read_text()


def _training_lines(store: LineStore, count: int) -> Iterator[str]:
    for number in progress_bar(iterable=range(count), desc="training the tokenizer", unit="line"):
        if number % HELD_OUT_EVERY:
            yield store[number]
