"""The sheet of the data of a run: pictures as the network gets them in its first steps, and words about all pictures.

A user can check ``data.png`` before a run takes hours. Crops, mirror images and augmentations are those of the first
steps; latents are decoded by their autoencoder, and transparency is shown on a chequered ground.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.data.stream import Batch, Batches, fingerprint_of, image_indices, spread
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import render_sources
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.registry import describe
from rectified_flow.runs.folder import DATA_SHEET
from rectified_flow.system.lettering import text_picture, wrapped
from rectified_flow.system.pictures import MIN_WIDTH, TEXT_SIZE, Grid, encode_picture, to_grid
from rectified_flow.system.terminal import line
from rectified_flow.system.terminal import shown as printed
from rectified_flow.training.evaluations import Callback

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer

PICTURES, COLUMNS = 48, 8
ROUND_TRIPS = 16  # number of pictures that are encoded and decoded, to measure the error of the autoencoder
MAX_SIDE = 256  # larger pictures are reduced on the sheet [px]
MOST_LINES, WORD_SIZE, MIN_SHEET = 6, 14, 720
"""Largest number of lines below a picture, size of the letters of the words, and least width of a sheet [px]."""
CHEQUER, SHADES = 8, (255, 204)
"""Side of a square of the ground below transparent pictures [px], and the grey levels of its squares."""
WORDS, PROOF = "Description", "Data"
"""Texts in the PNG file: the words, and a hash of all that the sheet shows, by which a later sheet is compared."""


@dataclass(frozen=True)
class DataSheet:
    """Everything that the sheet of a run shows.

    Args:
        flow: the flow, which draws and encodes the pictures.
        dataset: the rows that are trained on; or pictures, which are then encoded first.
        words: sentences about all pictures.
        pictures: the pictures of the rows, with their names, columns and sources; None for other data.
        seed: seed of the run.
        batch: number of rows of a global batch.
        mirrored: whether mirror images are encoded, if the pictures are not encoded yet.
        choices: sentences about settings that the run chose when it began. They are no part of the hash, since a run
            that resumes does not choose again.
    """

    flow: Flow
    dataset: Dataset[object]
    words: Sequence[str]
    pictures: ImageDataset | None
    seed: int
    batch: int
    mirrored: bool = False
    choices: Sequence[str] = ()

    @property
    def fingerprint(self) -> str:
        """A hash of the data, of how they are drawn, and of the words; not of the seed, which chooses the pictures."""
        shown = fingerprint_of(self.dataset), describe(self.flow.space), [*self.words]
        return blake2b(json.dumps(shown).encode(), digest_size=16).hexdigest()

    def encoded(self) -> bytes | None:
        """Return the PNG file; None if the data have no pictures."""
        try:
            drawn = self._drawn()
        except UsageError:  # of a medium without pictures
            return None
        texts, words = PngImagePlugin.PngInfo(), [*self.words, *self.choices, *self._round_trip()]
        texts.add_itxt(WORDS, printed("\n".join(words)))
        texts.add_text(PROOF, self.fingerprint)
        return encode_picture(self._arranged(*drawn, words), pnginfo=texts)

    @torch.no_grad()
    def _round_trip(self) -> list[str]:
        """Return a sentence on the reconstruction error of the autoencoder; none without an autoencoder."""
        medium = self.flow.space.medium
        if self.pictures is None or not medium.codec:
            return []
        some = self.pictures.read_pictures(spread(range(len(self.pictures)), ROUND_TRIPS)).to(self.flow.device)
        errors = (some.float() - medium.reconstructed(some)).square().flatten(1).mean(dim=1).sqrt()
        return [f"the RMS error of the autoencoder on these pictures is {errors.median():.0f} of 255"]

    @torch.no_grad()
    def _drawn(self) -> tuple[Tensor, Tensor | None, list[str]]:
        """Return the first pictures ``[n, 3, h, w]``, their sources if they have any, and the text below each."""
        sourced = self.flow.takes_source and self.pictures is not None  # a teacher's data have encoded sources
        count = min(PICTURES // (1 + sourced), len(self.dataset))  # type: ignore[arg-type]
        numbers = image_indices(range(count), len(self.dataset), self.seed).tolist()  # type: ignore[arg-type]
        shown, sources = list[Tensor](), list[Tensor]()
        for first in range(0, count, self.batch):
            some = range(first, min(first + self.batch, count))
            rows = BatchRows(self.seed, first // self.batch, self.batch, [number - first for number in some])
            batch = self._stored(Batches(self.dataset).__getitems__([numbers[number] for number in some]))
            with deterministic(rows, self.flow.device):
                shown.append(self._rendered(batch))
            if sourced:
                with deterministic(rows, self.flow.device):
                    source = self.flow.space.source_space.augment(batch[SOURCE])[0]
                sources.append(render_sources(self.flow, source))
        if not sourced:
            return torch.cat(shown), None, [self._text_of(number) for number in numbers]
        texts = [text for number in numbers for text in (self._text_of_source(number), self._text_of(number))]
        return torch.cat(shown), torch.cat(sources), texts

    def _stored(self, batch: Batch) -> Batch:
        """Return a batch on the flow's device, with pictures that are not encoded yet as the space stores them."""
        space, device = self.flow.space, self.flow.device
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        if space.key in batch:
            return batch
        images = batch["images"]
        variants = [images, images.flip(-1)] if self.mirrored else [images]
        batch[space.key] = torch.cat([space.medium.stored(each) for each in variants], dim=1)
        return batch | ({SOURCE: space.medium.stored(batch[SOURCE])} if SOURCE in batch else {})

    def _rendered(self, batch: Batch) -> Tensor:
        """Return pictures of the rows of a batch, uint8 ``[b, 3, h, w]`` on the CPU, as the flow draws them."""
        if "path" in batch:  # a teacher's
            batch = batch | {"noise": batch["path"][:, 0]}
        space = self.flow.space
        data = space.decode(self.flow.draw_batch(batch)[0])
        if space.medium.picture_shape[:1] == (4,):
            return over_chequers(space.medium.contents(data).cpu())
        return space.medium.render(data).cpu()

    def _text_of(self, number: int) -> str:
        """Return the text below a row: its class, its columns and its name."""
        rows: StoreDataset | None = self.pictures
        if rows is None and isinstance(self.dataset, StoreDataset):
            rows = self.dataset
        if rows is None:
            return ""
        lines = [rows.class_names[int(label)] for label in rows.labels[[number]] if rows.class_names]
        lines += [f"{name}: {text}" for name, [text] in rows.condition_texts([number]).items() if text]
        name = [] if self.pictures is None else [f"[{self.pictures.name_of(number)}]"]
        return "\n".join(lines + name)

    def _text_of_source(self, number: int) -> str:
        """Return the text below the source of a row: the name of the picture, unless it is made from the row."""
        source = None if self.pictures is None else self.pictures.source
        if self.pictures is None or not isinstance(source, ImageDataset):
            return "source"
        return "\n".join(("source", *(f"[{source.name_of(row)}]" for row in self.pictures.sources_of([number]))))

    def _arranged(self, shown: Tensor, sources: Tensor | None, texts: Sequence[str], sentences: Sequence[str]) -> Grid:
        """Return the sheet ``[h, w, 3]``: the pictures, each after its source, and the words below them."""
        if sources is not None:
            shown = torch.stack((sources, shown), dim=1).flatten(0, 1)
        times = -(-max(shown.shape[-2:]) // MAX_SIDE)
        shown = torch.nn.functional.avg_pool2d(shown.float(), times, ceil_mode=True).round().byte()
        width = shown.shape[-1] * -(-MIN_WIDTH // shown.shape[-1])
        needed = max(len(wrapped(text, width, TEXT_SIZE)[0]) for text in texts)
        grid = to_grid(shown, COLUMNS, texts, self.flow.space.medium.legend, text_lines=min(needed, MOST_LINES))
        grid = np.pad(grid, ((0, 0), (0, max(0, MIN_SHEET - grid.shape[1])), (0, 0)), constant_values=255)
        head = f"{len(shown)} pictures as the network gets them in its first steps: {self.flow.space.medium.noun}"
        words = "\n".join(("", head, *(f"\u2022 {printed(each)}" for each in sentences)))
        return np.concatenate((grid, text_picture(words, grid.shape[1], WORD_SIZE).permute(1, 2, 0).numpy()))


class DataSheetHook(Callback):
    """Writes the sheet of the data into the folder of a run before its first step.

    A run that resumes keeps its sheet, unless the sheet would show something else.

    Args:
        words: sentences about all pictures.
        pictures: the pictures of the rows in training, with their names and columns; None for other data.
        choices: sentences about settings that the run chose when it began.
    """

    def __init__(self, words: Sequence[str], pictures: ImageDataset | None = None, choices: Sequence[str] = ()) -> None:
        self.words, self.pictures, self.choices = words, pictures, choices

    @override
    def on_start(self, trainer: "Trainer") -> None:
        if not trainer.accelerator.is_main_process or not isinstance(trainer.flow, Flow):
            return
        seed, batch = trainer.config.seed, trainer.batch.total
        sheet = DataSheet(trainer.flow, trainer.dataset, self.words, self.pictures, seed, batch, choices=self.choices)
        log = trainer.run.log
        with log.tolerant("the sheet of the data"):
            path = log.folder / DATA_SHEET
            is_kept = trainer.state.step > 0 and read_proof(path) == sheet.fingerprint
            content = None if is_kept else sheet.encoded()
            if content is not None:
                log.picture("data", path, content, trainer.state.step)
            if path.exists():
                trainer.run.print(line("data sheet", path))


def read_proof(path: Path) -> str | None:
    """Return the hash in the file of a sheet; None if there is no such file, or it is no sheet."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            return str(image.info[PROOF]) if PROOF in image.info else None
    except OSError:
        return None


def over_chequers(pictures: Tensor) -> Tensor:
    """Return RGBA pictures, uint8 ``[b, 4, h, w]``, over a chequered ground, uint8 ``[b, 3, h, w]``."""
    height, width = pictures.shape[-2:]
    squares = (torch.arange(height)[:, None] // CHEQUER + torch.arange(width) // CHEQUER) % 2
    ground = torch.tensor(SHADES, dtype=torch.float32)[squares]
    alpha = pictures[:, 3:].float() / 255
    return torch.lerp(ground.expand_as(pictures[:, :3]), pictures[:, :3].float(), alpha).round().byte()
