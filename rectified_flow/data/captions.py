"""The encoded captions of a dataset, in a store of their own beside its pictures."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.condition import WrittenCondition
from rectified_flow.data.metadata import Column, ColumnSpec
from rectified_flow.data.store import ImageDataset, StoreDataset, StoreWriter
from rectified_flow.distributed.fill import claimed, fill
from rectified_flow.errors import UsageError
from rectified_flow.networks.captions import TEXTS_AT_ONCE, Caption, PretrainedTextEncoder
from rectified_flow.system.terminal import line

CAPTIONS_FILE = "captions.float16"
CAPTIONS_VERSION = 1


def read_column(found: ColumnSpec, kind: WrittenCondition, pictures: ImageDataset, state: PartialState) -> Column:
    """Return the values of a column of pictures as a kind of condition. Collective.

    Raises:
        UsageError: if a value is none of this kind, or the text encoder is unavailable.
    """
    if isinstance(kind, Caption):
        stored = encode_captions(found.texts, kind, pictures.path.parent, state)
        return Column(kind, found.first, found.texts, stored)
    try:
        return Column(kind, found.first, found.texts, kind.parse(found.texts))
    except UsageError as error:
        raise UsageError(f"the column {found.column} of {pictures.info.source}: {error}") from error


def encode_captions(texts: Sequence[str], kind: Caption, folder: Path, state: PartialState) -> StoreDataset | None:
    """Encode captions by all processes together, unless they are stored already. Collective.

    Encoding resumes after a kill. Captions that are longer than the encoder or ``kind.tokens`` allow are cut, and their
    number is printed.

    Args:
        texts: the captions.
        kind: the condition, which has the encoder.
        folder: the folder of the store, a cache.
        state: state of the processes.

    Returns:
        A store whose entry ``captions``, float16 ``[n, 1 + tokens, size]``, has the values; None for an encoder without
        weights, which encodes captions when they are read.

    Raises:
        UsageError: if the encoder is unavailable, or the folder cannot be written.
        RunError: if the disk is full.
    """
    encoder = kind.encoder
    if not isinstance(encoder, PretrainedTextEncoder):
        return None
    shaped_by = (CAPTIONS_VERSION, tuple(texts), encoder.fingerprint, kind.tokens)
    key = blake2b(repr(shaped_by).encode(), digest_size=8).hexdigest()
    row = {CAPTIONS_FILE: (1 + kind.tokens, kind.size)}
    writer = StoreWriter(folder / f"captions-{key}", len(texts), row, "captions")

    def make(numbers: Sequence[int]) -> Mapping[str, Tensor]:
        return {CAPTIONS_FILE: kind.encode([texts[number] for number in numbers])}

    def finish() -> None:
        long = max(encoder.count_tokens(texts))
        most = min(kind.tokens, encoder.most_tokens) if kind.tokens else encoder.most_tokens
        if long > most:
            state.print(line("captions", f"cut to {most} tokens; the longest has {long}"))
        writer.complete(np.full(len(texts), -1), source=f"captions by {encoder.name}", image_size=1)

    with claimed(writer, state) as missing:
        if missing:
            encoder.to_device(state.device)
            fill(writer, state, make, finish, doing="encoding", batch_size=TEXTS_AT_ONCE)
            encoder.to_device(torch.device("cpu"))  # the CPU suffices for prompts
    return StoreDataset(writer.path)
