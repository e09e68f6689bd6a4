"""Train a small masked-language model on text files with one text per line.

The lines stay on the disk, whatever their number: an index of byte offsets is built once. A tokenizer is trained on
the lines, and a BERT of transformers on its tokens. Every 20th line is held out, and the share of its masked tokens
that the model predicts is measured during training. Needs `pip install -e ".[text]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_masked_text:train", "train_masked_text:TextFlags", __doc__)

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import tyro
from accelerate.utils import set_seed
from annotated_types import Interval
from torch import Tensor

from line_store import open_lines
from masked_model import HEAD, SPECIAL, MaskedModel
from rectified_flow import Measurement, Trainer, TrainingConfig, randomness
from rectified_flow.cli.build import join
from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, Positive, default_is, flag, recorded
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import check_start, prepare_folders
from rectified_flow.system.pictures import Panel, draw_panels
from token_lines import HELD_OUT_EVERY, Split, TokenLines, load_tokenizer, make_tokenizer


@dataclass(frozen=True)
class TextConfig(Flags):
    """The text and the model."""

    text: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]")] = ()
    """UTF-8 text files, one text per line, or folders with .txt files."""
    max_train_samples: Annotated[Positive | None, default_is("all")] = None
    """Train on the first lines only, so many after the held-out lines are taken out."""
    vocabulary: Annotated[int, Interval(gt=0, le=2**20)] = 4000  # the tokenizer reserves memory for all of them
    """Largest number of different tokens."""
    length: Positive = 32
    """Tokens of a line; the rest of a longer line is left out."""
    width: Positive = 128
    """Channels of a token."""
    layers: Positive = 2
    """Layers of attention."""
    measure_every: Positive = 250
    """Steps between measurements on held-out lines."""
    measured_lines: Positive = 512
    """Held-out lines that are measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % HEAD != 0:
            raise UsageError(f"--width is {self.width}; it must be a multiple of {HEAD}")


@dataclass(frozen=True)
class TextProgramConfig(ProgramConfig):
    """Flags of the program itself."""

    config: Annotated[Path | None, flag(recorded=False)] = None
    """Start from the flags in this JSON file, such as a run's config.json; flags on the command line override them."""


@dataclass(frozen=True)
class TextFlags:
    """All flags of the program."""

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
    program: TextProgramConfig = field(default_factory=TextProgramConfig)


class Accuracy(Measurement):
    """The share of masked tokens of some held-out lines that the averaged model predicts, every so many steps."""

    def __init__(self, lines: TokenLines, every: int, count: int) -> None:
        super().__init__("accuracy", min(count, len(lines)), every)
        self.tokens = lines.read_batch(range(self.total))["tokens"]
        words = self.tokens[self.tokens >= len(SPECIAL)]
        if len(words.unique()) <= 1:
            found = f"the {self.total} measured lines of {lines.description} have fewer than two different known words"
            raise UsageError(f"{found}: pass a longer text, or raise --measured_lines or --max_train_samples")
        self.most_frequent = int(words.mode().values)

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        """Return for each line the numbers of masked, of predicted and of most frequent tokens among the masked."""
        model, device = trainer.averaged_flow, trainer.device
        assert isinstance(model, MaskedModel)
        model.eval()
        tokens = self.tokens[numbers].to(device)
        with randomness.deterministic(randomness.Samples(0, numbers), device):  # the same masks at each measurement
            hidden, chosen = model.mask(tokens)
        found = torch.cat([model.predict(part).argmax(dim=-1) for part in hidden.split(64)]) == tokens
        common = tokens == self.most_frequent
        return torch.stack([(each & chosen).sum(dim=1) for each in (chosen, found, common)], dim=1).float()

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, float]:
        """Print and return the accuracy of the model, and of always predicting the most frequent token."""
        masked, found, common = rows.sum(dim=0).tolist()
        accuracy, guess = found / max(1, masked), common / max(1, masked)
        words = f"{accuracy:.1%} (the most frequent token: {guess:.1%})"
        trainer.run.print(f"accuracy    step {trainer.state.step}: {words}")
        return {"accuracy": accuracy, "guess": guess}

    def plot(self, trainer: Trainer) -> None:
        """Plot both over the steps."""
        names = {"model": "accuracy", "the most frequent token": "guess"}
        curves = {name: self.file.numbers(key) for name, key in names.items()}
        title = f"masked tokens of {self.total} held-out lines"
        panel = Panel(curves, title, "step", "share that is predicted")
        draw_panels(trainer.config.output_dir / "accuracy.png", [panel])


def train(flags: TextFlags) -> bool:
    """Train, and return whether the run finished."""
    state, text = join(flags), flags.text
    if not text.text:  # not in TextConfig, as the file of --config may have it
        raise UsageError("--text is missing: pass one or more text files")
    set_seed(flags.run.seed)
    on_main(state, lambda: check_start(flags.run))
    on_main(state, lambda: open_lines(text.text))  # builds the index
    lines, least = open_lines(text.text), 2 * HELD_OUT_EVERY
    if len(lines) < least:
        raise UsageError(f"--text has {len(lines)} lines, too few for a held-out set: pass at least {least}")
    trained, held_out = Split(lines, max_samples=text.max_train_samples), Split(lines, held_out=True)
    path = flags.run.output_dir / "tokenizer.json"
    on_main(state, lambda: prepare_folders(flags.run))  # also recognises a copied run
    has_begun = on_main(state, lambda: bool(checkpoint.list_checkpoints(flags.run.checkpoints)))
    on_main(state, lambda: make_tokenizer(path, trained, text.vocabulary, has_begun=has_begun))
    training, measured = (TokenLines(each, path, text.length) for each in (trained, held_out))
    accuracy = Accuracy(measured, text.measure_every, text.measured_lines)
    model = MaskedModel(load_tokenizer(path).get_vocab_size(), text.length, text.width, text.layers)
    data = {"text": [*map(str, text.text)]}
    return Trainer(model, training, flags.run, callbacks=[accuracy], data=data, flags=recorded(flags)).train()
