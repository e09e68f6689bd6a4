"""Captions as a condition of a network, and the store of the encoded captions of a dataset beside its pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow.condition import LARGEST, WrittenCondition
from rectified_flow.data.store import StoreDataset
from rectified_flow.data.store_writer import StoreWriter, claimed, fill, key_of
from rectified_flow.errors import UsageError
from rectified_flow.exportable import Exportable
from rectified_flow.registry import Document, register
from rectified_flow.text.encoders import TEXTS_AT_ONCE, BagOfWords, PretrainedTextEncoder, TextEncoder

EXAMPLES = 16  # number of training captions that are kept as examples
CAPTIONS_VERSION = 1  # version of the store of encoded captions
AMONG, NEAREST = 50, 5  # number of candidates of a retrieval, and k of its top-k accuracy


@register
@dataclass(frozen=True)
class Caption(WrittenCondition):
    """Encoded captions, float32 ``[b, 1 + tokens, size]``: a vector of the text, and vectors of its first tokens.

    Padding tokens are NaN. A row that is NaN throughout is "none".

    Args:
        encoder: the encoder of the captions.
        size: numbers of a vector.
        tokens: number of tokens that a network attends to.
        examples: captions of the training data, for a user to start from.
    """

    column_type: ClassVar[str] = "caption"
    is_text: ClassVar[bool] = True
    guidance: ClassVar[float] = 2.0
    """Guidance scale of samples by default (docs/measurements/conditions.md)."""
    encoder: TextEncoder
    size: int
    tokens: int = 0
    examples: tuple[str, ...] = ()

    @classmethod
    @override
    def fit(cls, texts: Sequence[str], *, text_encoder: str | None = None, text_tokens: int = 0) -> Self:
        encoder = BagOfWords.of(texts) if text_encoder is None else PretrainedTextEncoder(text_encoder)
        examples = [texts[at] for at in np.linspace(0, len(texts) - 1, EXAMPLES).astype(int).tolist()]
        return cls(encoder, encoder.size, text_tokens, tuple(dict.fromkeys(examples)))

    @override
    def none(self, count: int, device: torch.device) -> Tensor:
        return torch.full((count, 1 + self.tokens, self.size), torch.nan, device=device)

    @override
    def split(self, text: str) -> list[str]:
        return [each.strip() for each in text.split(";")]

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the encoded texts; a text without known words is "none"."""
        return self.encoder.encode(texts, self.tokens)

    @override
    def parse(self, texts: Sequence[str]) -> Tensor:
        values, empty = self.encode(texts), torch.tensor([not text.strip() for text in texts])
        for row in (values[:, 0].isnan().any(dim=1) & ~empty).nonzero():
            raise UsageError(f"no word of {texts[row]!r} occurs in the training captions: use other words")
        return values.masked_fill(empty[:, None, None], torch.nan)

    @override
    def stored(self, texts: Sequence[str], folder: Path, state: PartialState) -> "EncodedTexts":
        """Return the encoded texts of a column, from a store in the folder if the encoder has weights. Collective.

        Encoding resumes after a kill. Captions that are longer than the encoder or ``tokens`` allow are cut.
        """
        encoder, encoded = self.encoder, EncodedTexts(self, texts)
        if not isinstance(encoder, PretrainedTextEncoder):
            return encoded
        key = key_of(CAPTIONS_VERSION, tuple(texts), encoder.fingerprint, self.tokens)
        writer = StoreWriter(folder / f"captions-{key}", len(texts), "captions")

        module: nn.Module = encoder.parts[1]

        def make(numbers: Sequence[int]) -> Mapping[str, Tensor]:
            module.to(state.device)  # shared by all flows of this process
            return {"captions": encoded[numbers].half()}

        with claimed(writer) as is_missing:
            if is_missing:
                described = {"source": f"captions by {encoder.name}", "image_size": 1}
                fill(writer, make, lambda: described, batch_size=TEXTS_AT_ONCE)
        module.to("cpu")  # the CPU suffices for prompts
        return replace(encoded, store=StoreDataset(writer.path))

    @override
    def scores(self, values: Tensor, pictures: Tensor) -> dict[str, float]:
        """Return the share of samples for which the real picture of their caption is among the 5 nearest of 50.

        ``retrieval_by_chance`` is the same of samples in random order. With fewer than 8 different captions, there are
        no scores.
        """
        from rectified_flow.evaluation.heldout import MIN_HELD_OUT
        from rectified_flow.evaluation.scores import found

        number = {caption.numpy().tobytes(): row for row, caption in enumerate(values)}  # one row for each caption
        if len(number) < MIN_HELD_OUT:
            return {}
        size = min(AMONG, len(number))
        groups = torch.tensor([*number.values()][: len(number) // size * size]).unflatten(0, (-1, size))
        share = found(pictures[1:, groups], pictures[0, groups], NEAREST)
        return {f"retrieval_at_{NEAREST}": share, "retrieval_by_chance": NEAREST / size}

    @override
    def exported(self) -> Document:
        sizes = {"size": self.size, "tokens": self.tokens, "examples": list(self.examples)}
        return {"kind": "caption", **sizes, "encoder": self.encoder.exported()}

    @override
    def companion(self) -> Exportable | None:
        return self.encoder.companion(self.examples)

    @override
    def embedding(self, dim: int) -> nn.Module:
        return _TextEmbedding(self.size, dim)

    @override
    def sequence_embedding(self, dim: int) -> nn.Module | None:
        return _TokenEmbedding(self.size, dim) if self.tokens else None


@dataclass(frozen=True)
class EncodedTexts:
    """Encoded texts by number: float16 rows of a store or, without a store, encoded when they are read."""

    kind: Caption
    texts: Sequence[str]
    store: StoreDataset | None = None

    def __getitem__(self, numbers: Sequence[int]) -> Tensor:
        if self.store is not None:
            return self.store.read_entries(numbers)["captions"]
        return self.kind.encode([self.texts[number] for number in numbers])


class _TextEmbedding(nn.Module):
    """Two linear maps of the vector of a text, and a learned embedding of "none"."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, dim), nn.Linear(dim, dim)
        self.none = nn.Parameter(torch.zeros(dim))

    def forward(self, values: Tensor) -> Tensor:
        vector = values[:, 0].to(self.none.dtype)
        known = (vector.abs() < LARGEST).all(dim=1, keepdim=True)
        scaled = torch.where(known, vector, 0) * vector.shape[1] ** 0.5  # so that its numbers are of size 1
        return torch.where(known, self.outer(nn.functional.silu(self.inner(scaled))), self.none)


class _TokenEmbedding(nn.Module):
    """A linear map of normalised vectors of tokens."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(size), nn.Linear(size, dim)

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        tokens = values[:, 1:].to(self.linear.weight.dtype)
        known = tokens[..., 0].abs() < LARGEST
        return self.linear(self.norm(torch.where(known[..., None], tokens, 0))), known
