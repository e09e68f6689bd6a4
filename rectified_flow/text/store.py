"""The encoded captions of a dataset, in a store of their own beside its pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.fill import StoreWriter, claimed, fill, key_of
from rectified_flow.data.store import StoreDataset
from rectified_flow.system.terminal import line
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import TEXTS_AT_ONCE, PretrainedTextEncoder

CAPTIONS_VERSION = 1


@dataclass(frozen=True)
class TextsToEncode:
    """Texts that are encoded when they are read."""

    kind: Caption
    texts: Sequence[str]

    def __getitem__(self, numbers: Sequence[int]) -> Tensor:
        return self.kind.encode([self.texts[number] for number in numbers])


@dataclass(frozen=True)
class StoredTexts:
    """Encoded texts in a store."""

    store: StoreDataset

    def __getitem__(self, numbers: Sequence[int]) -> Tensor:
        return self.store.read_entries(numbers)["captions"]


def encode_captions(
    texts: Sequence[str], kind: Caption, folder: Path, state: PartialState
) -> TextsToEncode | StoredTexts:
    """Encode captions by all processes together, unless they are stored already. Collective.

    Encoding resumes after a kill. Captions that are longer than the encoder or ``kind.tokens`` allow are cut, and their
    number is printed.

    Args:
        texts: the captions.
        kind: the condition, which has the encoder.
        folder: the folder of the store, a cache.
        state: state of the processes.

    Returns:
        The values by number, float16 ``[b, 1 + tokens, size]``; an encoder without weights encodes captions when they
        are read, in float32.

    Raises:
        UsageError: if the encoder is unavailable, or the folder cannot be written.
        RunError: if the disk is full.
    """
    encoder = kind.encoder
    if not isinstance(encoder, PretrainedTextEncoder):
        return TextsToEncode(kind, texts)
    key = key_of(CAPTIONS_VERSION, tuple(texts), encoder.fingerprint, kind.tokens)
    writer = StoreWriter(folder / f"captions-{key}", len(texts), "captions")

    def make(numbers: Sequence[int]) -> Mapping[str, Tensor]:
        encoder.to_device(state.device)
        return {"captions": kind.encode([texts[number] for number in numbers]).half()}

    def describe() -> dict[str, Any]:
        long = max(encoder.count_tokens(texts))
        most = min(kind.tokens, encoder.most_tokens) if kind.tokens else encoder.most_tokens
        if long > most:
            state.print(line("captions", f"cut to {most} tokens; the longest has {long}"))
        return {"source": f"captions by {encoder.name}", "image_size": 1}

    with claimed(writer) as is_missing:
        if is_missing:
            fill(writer, make, describe, batch_size=TEXTS_AT_ONCE)
    encoder.to_device(torch.device("cpu"))  # the CPU suffices for prompts
    return StoredTexts(StoreDataset(writer.path))
