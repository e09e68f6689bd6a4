"""Train a small masked-language model on text files, one text a line.

The lines stay on the disk, whatever their number: an index of byte offsets is built once. A tokenizer is trained on
them, and a BERT of transformers on that. Every 20th line is held out, and the share of its masked tokens that the model
finds is measured as it trains. Needs `pip install -e ".[text]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_masked_text:train", "train_masked_text:TextFlags", __doc__)

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from accelerate.utils import set_seed
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import Dataset

from line_store import LineStore, open_lines
from rectified_flow import Measurement, Trainer, TrainingConfig, randomness, register
from rectified_flow.cli.parts import join
from rectified_flow.cli.train_flags import ProgramConfig
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError, require
from rectified_flow.flags import Flags, Positive, recorded
from rectified_flow.system.files import replace_file
from rectified_flow.system.pictures import draw_lines
from rectified_flow.system.terminal import progress_bar

PADDING, UNKNOWN, MASK = SPECIAL = ("[PAD]", "[UNK]", "[MASK]")
HELD_OUT_EVERY = 20
MASKED, MASKED_BY_MASK, MASKED_BY_ANY = 0.15, 0.8, 0.1
"""Shares of the tokens, and of those what they are replaced by (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""
TOKENIZER_LINES = 200_000


@dataclass(frozen=True)
class TextConfig(Flags):
    """The text and the model."""

    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")] = ()
    """UTF-8 text files, one text a line."""
    max_samples: Positive | None = None
    """Use the first lines only."""
    skip_empty: bool = True
    """Leave empty lines out."""
    vocabulary: Positive = 4000
    """Different tokens, at most."""
    length: Positive = 32
    """Tokens of a line; the rest of a longer line is left out."""
    width: Positive = 128
    """Channels of a token."""
    layers: Positive = 2
    """Layers of attention."""
    measure_every: Positive = 250
    """Steps between measurements on lines that are held out."""
    measured_lines: Positive = 512
    """Lines that are held out and measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.text), "--text is missing: pass one or more text files")
        require(self.width % 32 == 0, f"--width is {self.width}; it must be a multiple of 32")


@dataclass(frozen=True)
class TextFlags:
    text: TextConfig = field(default_factory=TextConfig)
    run: TrainingConfig = field(
        default_factory=partial(
            TrainingConfig,
            batch_size=32,
            train_num_steps=2000,
            learning_rate=1e-3,
            lr_warmup_steps=100,
            ema_decay=0.99,
            num_samples=0,
            output_dir=Path("runs/masked-text"),
        )
    )
    program: ProgramConfig = field(default_factory=ProgramConfig)


class Lines(Dataset[dict[str, Tensor]]):
    """Lines as tokens, int64 ``[length]``, padded with 0.

    Args:
        store: all lines.
        tokenizer: of the lines, as JSON.
        length: tokens of a line.
        count: lines to use, the first.
        held_out: the lines that are held out, or the others.
    """

    def __init__(self, store: LineStore, tokenizer: str, length: int, count: int, *, held_out: bool = False) -> None:
        self.store, self.tokenizer, self.length, self.held_out = store, tokenizer, length, held_out
        self.count = count
        content = (store.fingerprint, sha256(tokenizer.encode()).hexdigest(), length, count, held_out)
        self.fingerprint = sha256(repr(content).encode()).hexdigest()
        self.description = f"{', '.join(path.name for path in store.paths)}: {len(self):,} lines"

    def __len__(self) -> int:
        held_out = -(-self.count // HELD_OUT_EVERY)
        return held_out if self.held_out else self.count - held_out

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.read_batch([index]).items()}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        encoded = self._encoder.encode_batch([self.store[self._line(index)] for index in indices])
        return {"tokens": torch.tensor([each.ids for each in encoded])}

    def _line(self, index: int) -> int:
        others = HELD_OUT_EVERY - 1
        return index * HELD_OUT_EVERY if self.held_out else index // others * HELD_OUT_EVERY + index % others + 1

    @cached_property
    def _encoder(self) -> Tokenizer:
        encoder = Tokenizer.from_str(self.tokenizer)
        encoder.enable_truncation(self.length)
        encoder.enable_padding(length=self.length, pad_id=0)
        return encoder

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encoder"}


@register
class MaskedModel(nn.Module):
    """A BERT that finds masked tokens; ``forward`` is its loss.

    Args:
        vocabulary: number of different tokens.
        length: tokens of a line.
        width: channels of a token.
        layers: layers of attention.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        self.vocabulary, self.length, self.width, self.layers = vocabulary, length, width, layers
        self.network: BertForMaskedLM = BertForMaskedLM(
            BertConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=width // 32,
                intermediate_size=4 * width,
                max_position_embeddings=length,
                pad_token_id=0,
                tie_word_embeddings=False,
                hidden_dropout_prob=0.0,  # its masks would depend on the number of processes
                attention_probs_dropout_prob=0.0,
            )
        )

        self.network.cls.predictions.bias.requires_grad_(False)  # used with tied embeddings only

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean over lines of the mean over masked tokens ``[b, length]``, as ranks have equal numbers of lines."""
        hidden, chosen = self.mask(tokens)
        losses = nn.functional.cross_entropy(self.predict(hidden).mT, tokens, reduction="none")
        return ((losses * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)).mean()

    def predict(self, hidden: Tensor) -> Tensor:
        """Logits ``[b, length, vocabulary]``; padding is not attended to."""
        logits: Tensor = self.network(input_ids=hidden, attention_mask=(hidden > 0).long()).logits
        return logits.float()

    def mask(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens with some replaced, and which were chosen."""
        chance, other = (randomness.rand(name, tokens.shape, tokens.device) for name in ("chosen", "replaced"))
        any_token = randomness.randint("any token", self.vocabulary - 1, tokens.shape, tokens.device) + 1
        chosen = (chance < MASKED) & (tokens > 0)
        mask = torch.full_like(tokens, SPECIAL.index(MASK))
        replaced = torch.where(other < MASKED_BY_MASK, mask, tokens)
        replaced = torch.where(other > 1 - MASKED_BY_ANY, any_token, replaced)
        return torch.where(chosen, replaced, tokens), chosen


class Accuracy(Measurement):
    """The share of masked tokens that the averaged model finds on lines that are held out.

    Args:
        lines: those that are held out.
        every: steps between measurements.
        count: lines to measure.
    """

    def __init__(self, lines: Lines, every: int, count: int) -> None:
        super().__init__("accuracy", min(count, len(lines)), every)
        self.tokens = lines.read_batch(range(self.total))["tokens"]

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        """For each line: tokens that are masked, those found, and those that are the most frequent token."""
        model, device = trainer.averaged_flow, trainer.device
        assert isinstance(model, MaskedModel)
        model.eval()
        tokens = self.tokens[numbers].to(device)
        with randomness.deterministic(randomness.Samples(0, numbers), device):  # masked as ever
            hidden, chosen = model.mask(tokens)
        found = torch.cat([model.predict(part).argmax(dim=-1) for part in hidden.split(64)]) == tokens
        common = tokens == self.tokens[self.tokens > len(SPECIAL)].mode().values.to(device)
        return torch.stack([(each & chosen).sum(dim=1) for each in (chosen, found, common)], dim=1).float()

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, float]:
        masked, found, common = rows.sum(dim=0).tolist()
        accuracy, guess = found / max(1, masked), common / max(1, masked)
        words = f"{accuracy:.1%} (the most frequent token: {guess:.1%})"
        trainer.run.print(f"accuracy    step {trainer.state.step}: {words}")
        return {"accuracy": accuracy, "guess": guess}

    def plot(self, trainer: Trainer) -> None:
        names = {"model": "accuracy", "the most frequent token": "guess"}
        rows = {name: self.file.numbers(key) for name, key in names.items()}
        curves = {name: (list(row), list(row.values())) for name, row in rows.items()}
        title = f"masked tokens of {self.total} lines that are held out"
        draw_lines(trainer.config.output_dir / "accuracy.png", curves, title, "step", "share that is found")


def train(flags: TextFlags) -> bool:
    """Train; returns whether it finished."""
    state = join(flags)
    set_seed(flags.run.seed)
    text = flags.text
    store = on_main(state, lambda: open_lines(*text.text, skip_empty=text.skip_empty))
    count = min(len(store), text.max_samples or len(store))
    if count < 2 * HELD_OUT_EVERY:
        raise UsageError(f"{count} lines are too few to hold some out: pass at least {2 * HELD_OUT_EVERY}")
    tokenizer = on_main(state, lambda: read_tokenizer(flags, store, count))
    lines, held_out = (Lines(store, tokenizer, text.length, count, held_out=each) for each in (False, True))
    model = MaskedModel(Tokenizer.from_str(tokenizer).get_vocab_size(), text.length, text.width, text.layers)
    accuracy = Accuracy(held_out, text.measure_every, text.measured_lines)
    return Trainer(model, lines, flags.run, callbacks=[accuracy], flags=recorded(flags)).train()


def read_tokenizer(flags: TextFlags, store: LineStore, count: int) -> str:
    """The tokenizer of the run, as JSON; trained on the first lines if there is none yet."""
    path = flags.run.output_dir / "tokenizer.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(vocab_size=flags.text.vocabulary, special_tokens=[*SPECIAL], show_progress=False)
        tokenizer.train_from_iterator(training_lines(store, min(count, TOKENIZER_LINES)), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, tokenizer.to_str())
    return path.read_text()


def training_lines(store: LineStore, count: int) -> Iterator[str]:
    """The first lines but those that are held out, with a progress bar."""
    for number in progress_bar(iterable=range(count), desc="training the tokenizer", unit="line"):
        if number % HELD_OUT_EVERY:
            yield store[number]
