"""Frozen text encoders, which turn texts into vectors."""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from rectified_flow.errors import UsageError, first_line
from rectified_flow.exportable import Exportable
from rectified_flow.networks.pretrained import Pretrained
from rectified_flow.registry import Document, register

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_WORDS = 4096
TEXTS_AT_ONCE = 64
TEXT_FILE, TOKENIZER_FILE = "text_encoder.onnx", "tokenizer.json"  # names of the files of an exported encoder


class TextEncoder(ABC):
    """A frozen map from texts to vectors. Register a subclass and keep its arguments as attributes."""

    name: str
    """The name in reports."""
    fingerprint: str
    """A hash that differs between encoders that encode differently."""
    size: int
    """Size of a vector."""

    @abstractmethod
    def encode(self, texts: Sequence[str], tokens: int = 0) -> Tensor:
        """Encode texts as float32 ``[n, 1 + tokens, size]`` on the CPU.

        The first vector of a text is of length 1, or NaN if nothing in the text is known. The vectors of its first
        tokens follow, padded with NaN.
        """

    def exported(self) -> Document | None:
        """Return what a caller of an exported program needs to encode texts; None if it cannot."""
        return None

    def companion(self, texts: Sequence[str]) -> Exportable | None:
        """Return the module that is exported as a program of its own, if there is one.

        Args:
            texts: texts on which the program is compared with the encoder.
        """
        return None


UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
)
"""Characters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
WORD = re.compile(rf"(?=[^\W_])[{UNSPACED}]|(?:(?![{UNSPACED}])[^\W_])+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; a character is one in scripts without spaces."""
    return WORD.findall(text.lower())


@register
class BagOfWords(TextEncoder):
    """An encoder that counts known words, and ignores their order and all other words."""

    name = "bag of words"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self.size = len(self.words)
        self.fingerprint = blake2b(repr(self.words).encode(), digest_size=16).hexdigest()
        self._number = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, texts: Iterable[str]) -> "BagOfWords":
        """Return an encoder that knows the most frequent words of some texts, at most 4,096."""
        counts = Counter(word for text in texts for word in words_of(text))
        return cls(sorted(counts, key=lambda word: (-counts[word], word))[:MAX_WORDS])

    @override
    def exported(self) -> Document:
        return {"kind": "words", "words": list(self.words)}

    @override
    def encode(self, texts: Sequence[str], tokens: int = 0) -> Tensor:
        rows = torch.zeros(len(texts), self.size)
        for row, text in zip(rows, texts, strict=True):
            for word in words_of(text):
                if word in self._number:
                    row[self._number[word]] += 1
        lengths = rows.norm(dim=1, keepdim=True)
        return torch.where(lengths > 0, rows / lengths, torch.nan)[:, None]


@register
class PretrainedTextEncoder(Pretrained, TextEncoder):  # type: ignore[override]
    """A text encoder of transformers, such as those of CLIP, T5 or a sentence model, in float32.

    The vector of a text is the pooled output for CLIP and SigLIP, which are trained with it, and the mean of the last
    hidden states over the tokens for others.

    Args:
        source: a folder or hub id.
        fingerprint: the hash of the weights, if they must be the same as in training; None takes any.
    """

    flag = "text_encoder"

    @staticmethod
    @override
    def identity(source: str) -> tuple[object, nn.Module]:
        tokenizer, module = _load(source)
        return (type(module).__name__, tokenizer("A red flower, and 2 blue ones!")["input_ids"]), module

    @property
    @override
    def size(self) -> int:  # type: ignore[override]
        return int(self.parts[1].config.hidden_size)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens that a text is encoded with."""
        tokenizer, module = self.parts
        positions = getattr(module.config, "max_position_embeddings", None) or 512
        return min(int(tokenizer.model_max_length), int(positions), 512)  # a tokenizer without a limit has a huge one

    @property
    def parts(self) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
        """The tokenizer and the module; an error if they are not those of the training."""
        self.check()
        return _load(self.source)

    @override
    def exported(self) -> Document:
        files = {"file": TEXT_FILE, "tokenizer": TOKENIZER_FILE}
        return {"kind": "program", **files, "most_tokens": self.most_tokens, "pools": self.pools}

    @override
    def companion(self, texts: Sequence[str]) -> Exportable:
        document = json.loads(self.parts[0].backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
        tokenizer = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
        return Exportable(
            TEXT_FILE,
            TextCall(self),
            self.tokenize([*texts, ""]),
            axes=[("batch", None), ("tokens", self.most_tokens)],
            checks=[self.tokenize([text]) for text in texts],  # each alone, as a caller uses no padding
            files={TOKENIZER_FILE: tokenizer},
            about=f", from {self.name}",
        )

    @property
    def pools(self) -> bool:
        """Whether the vector of a text is the module's pooled output."""
        return self.parts[1].config.model_type.startswith(("clip", "siglip"))

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return the inputs of the module for texts: ``input_ids`` and ``attention_mask``, int64 ``[n, tokens]``."""
        tokenizer, _ = self.parts
        given = tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=self.most_tokens)
        return {name: given[name] for name in ("input_ids", "attention_mask")}

    def vectors(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of texts ``[n, size]``, of length 1, and the last hidden states ``[n, tokens, size]``."""
        output = self.parts[1](input_ids=input_ids, attention_mask=attention_mask)
        hidden, known = output.last_hidden_state.float(), attention_mask.bool()[..., None]
        mean = hidden.masked_fill(~known, 0).sum(dim=1) / known.sum(dim=1)
        pooled = output.pooler_output.float() if self.pools else mean
        return nn.functional.normalize(pooled, dim=1), hidden

    @torch.no_grad()
    @override
    def encode(self, texts: Sequence[str], tokens: int = 0) -> Tensor:
        rows, device = [torch.empty(0, 1 + tokens, self.size)], self.parts[1].device
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            inputs = self.tokenize(texts[first : first + TEXTS_AT_ONCE])
            given = {name: each.to(device) for name, each in inputs.items()}
            with torch.autocast(device.type, enabled=False):
                vectors, hidden = self.vectors(**given)
            sequence = hidden.masked_fill(~given["attention_mask"].bool()[..., None], torch.nan)[:, :tokens]
            sequence = nn.functional.pad(sequence, (0, 0, 0, tokens - sequence.shape[1]), value=torch.nan)
            rows.append(torch.cat((vectors[:, None], sequence), dim=1).cpu())
        return torch.cat(rows)


@cache
def _load(source: str) -> "tuple[PreTrainedTokenizerBase, PreTrainedModel]":
    """Return the tokenizer and the module, shared by all flows of this process."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModel, SiglipTextModel  # takes seconds

    try:
        config = AutoConfig.from_pretrained(source)
        kinds: dict[str, type[PreTrainedModel]] = {"clip": CLIPTextModel, "siglip": SiglipTextModel}
        kind = kinds.get(config.model_type.removesuffix("_text_model"), AutoModel)
        # Tokenizers of decoder models pad on the left by default; conditions expect the text from the first position.
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="right")
        module = kind.from_pretrained(source, use_safetensors=True, dtype=torch.float32)
        module = module.get_encoder() if config.is_encoder_decoder else module
        return tokenizer, module.eval().requires_grad_(False)
    except Exception as error:  # of any type: transformers builds a module from files that anyone may have written
        found = f"`text_encoder` {source} cannot be loaded as a text encoder ({first_line(error)})"
        raise UsageError(f"{found}: pass a folder or hub id") from error


class TextCall(nn.Module):
    """The vectors of texts and their hidden states, see :meth:`PretrainedTextEncoder.vectors`."""

    def __init__(self, encoder: PretrainedTextEncoder) -> None:
        super().__init__()
        self.encoder, self.module = encoder, encoder.parts[1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 ``[b, size]`` and ``[b, n, size]`` of int64 ``[b, n]``."""
        return self.encoder.vectors(input_ids, attention_mask)
