"""A text encoder as a program in ONNX, for an exported flow."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.export import Dim

from rectified_flow.cli.export import check_program, load_program, to_onnx
from rectified_flow.errors import UsageError
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import TEXT_FILE, TOKENIZER_FILE, PretrainedTextEncoder

MAX_BYTES = 2_000_000_000
"""Largest size of the weights of a text encoder in float32: a file in ONNX has less than 2 GiB."""


def program_of(kind: Caption, *, is_page: bool) -> "EncoderProgram | None":
    """Return the program of the encoder of captions, if it has weights.

    Raises:
        UsageError: if it is too large for a file, or the page cannot run it.
    """
    encoder = kind.encoder
    if is_page and encoder.exported() is None:
        raise UsageError(f"--format page cannot run the text encoder {encoder.name}: pass --format onnx")
    if not isinstance(encoder, PretrainedTextEncoder):
        return None
    size = sum(parameter.numel() * 4 for parameter in encoder.parts[1].parameters())
    if size > MAX_BYTES:
        raise UsageError(f"the text encoder {encoder.name} has {size / 1e9:.1f} GB, too many for one file in ONNX")
    return EncoderProgram(encoder, kind.examples)


@dataclass(frozen=True)
class EncoderProgram:
    """The files of a text encoder beside an exported flow."""

    encoder: PretrainedTextEncoder
    texts: Sequence[str]
    """Texts to compare the program with the encoder."""

    files = (TEXT_FILE, TOKENIZER_FILE)

    @torch.no_grad()
    def write(self, in_half: bool) -> tuple[dict[str, bytes], float]:
        """Return the contents of the files, and the difference of the program from the encoder.

        Args:
            in_half: store matrices in float16.

        Raises:
            RunError: if the difference is above the tolerance.
        """
        encoder = self.encoder
        sizes = {0: Dim("batch"), 1: Dim("tokens", max=encoder.most_tokens)}
        inputs = encoder.tokenize([*self.texts, ""])  # a single row would fix the batch size
        content = to_onnx(TextCall(encoder), inputs, sizes, in_half=in_half)
        run, pairs = load_program(content), []
        for given in (inputs, encoder.tokenize(self.texts[:1])):
            known = given["attention_mask"].bool()[..., None]
            for found, expected in zip(run(given), encoder.vectors(**given), strict=True):
                rows = known if found.ndim == known.ndim else known.any(dim=1)  # padding is not used
                pairs.append((found.masked_fill(~rows, 0), expected.masked_fill(~rows, 0)))
        files = {TEXT_FILE: content, TOKENIZER_FILE: _tokenizer_file(encoder)}
        return files, check_program(pairs, "text encoder", in_half)


class TextCall(nn.Module):
    """The vectors of texts and their hidden states, see :meth:`PretrainedTextEncoder.vectors`."""

    def __init__(self, encoder: PretrainedTextEncoder) -> None:
        super().__init__()
        self.encoder, self.module = encoder, encoder.parts[1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 ``[b, size]`` and ``[b, n, size]`` of int64 ``[b, n]``."""
        return self.encoder.vectors(input_ids, attention_mask)


def _tokenizer_file(encoder: PretrainedTextEncoder) -> bytes:
    """Return the contents of ``tokenizer.json``, without the padding and truncation of the latest call."""
    backend = getattr(encoder.parts[0], "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"the text encoder {encoder.name} has no {TOKENIZER_FILE}, so it cannot be exported")
    document = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
