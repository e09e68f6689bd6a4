"""Reflow: train a straighter flow on pairs of noise and the picture that a trained flow makes of it.

Liu et al. 2022, arXiv:2209.03003, section 2.2.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow import checkpoint, randomness
from rectified_flow.data import ImageDataset
from rectified_flow.data.pair_store import PairDataset, PairWriter
from rectified_flow.data.store_builder import default_cache_dir
from rectified_flow.errors import RunError, UsageError
from rectified_flow.files import lock_of
from rectified_flow.flows import RectifiedFlow
from rectified_flow.processes.collectives import on_main
from rectified_flow.progress import progress_bar
from rectified_flow.training.config import NetworkFlags
from rectified_flow.training.flow_configs import RectifiedFlowConfig

BATCH_SIZE = 64
INHERITED = ("dataset", "image_size", "skip_broken_images", *NetworkFlags.__dataclass_fields__)


def inherit(config: RectifiedFlowConfig) -> RectifiedFlowConfig:
    """The flags of a run that reflows another: pictures and network are those of the checkpoint it starts from.

    Raises:
        UsageError: if there is no such checkpoint.
    """
    assert config.reflow_from is not None
    source = on_main(PartialState(), lambda: checkpoint.resolve(Path(config.reflow_from or "")))
    before = checkpoint.load_document(source, checkpoint.CONFIG_FILE)
    flags = {name: before[name] for name in INHERITED} | {"dim_mults": tuple(before["dim_mults"])}
    for name in ("dataset_path", "cache_dir"):
        if getattr(config, name) is None and before[name] is not None:
            flags[name] = Path(before[name])
    return replace(config, **flags, reflow_from=source)


def open_pairs(config: RectifiedFlowConfig, pictures: ImageDataset) -> PairDataset:
    """The pairs of ``config.reflow_from``, drawn by all processes together if they are not there yet.

    Args:
        config: as :func:`inherit` returned it.
        pictures: what that flow was trained on, whose labels the pairs get.

    Raises:
        UsageError: if it is no rectified flow, or the cache folder cannot be written.
        RunError: if the disk is full.
    """
    assert config.reflow_from is not None
    state = PartialState()
    teacher = RectifiedFlow.from_checkpoint(config.reflow_from).to(state.device)
    drawing = _Drawing(config, state, teacher, pictures)
    writer = drawing.writer
    try:
        with ExitStack() as held:
            done = on_main(state, lambda: _begin(writer, held))
            if done < writer.length or not writer.is_whole:
                drawing.draw(done)
                on_main(state, drawing.finish)
    except OSError as error:
        raise UsageError(
            f"cannot write the pairs {writer.path}: {error.strerror}; name a folder with --cache_dir"
        ) from error
    return PairDataset(writer.path)


def _begin(writer: PairWriter, held: ExitStack) -> int:
    """Keep other runs from drawing the same, and say how many there are."""
    writer.path.parent.mkdir(parents=True, exist_ok=True)
    held.enter_context(lock_of(Path(f"{writer.path}.lock")))
    return writer.length if writer.is_whole else writer.begin()


class _Drawing:
    """How the pairs of one flow are drawn."""

    def __init__(
        self, config: RectifiedFlowConfig, state: PartialState, teacher: RectifiedFlow, pictures: ImageDataset
    ) -> None:
        self.config, self.state, self.teacher, self.pictures = config, state, teacher, pictures
        self.source = config.reflow_from or Path()
        self.steps = config.reflow_steps or teacher.default_steps
        files = checkpoint.load_document(self.source, checkpoint.MANIFEST)["files"]
        weights = files[checkpoint.best_weights(self.source)]["sha256"]
        key = randomness.mix("pairs", weights, config.reflow_pairs, self.steps, config.seed)
        folder = config.cache_dir or default_cache_dir()
        self.writer = PairWriter(
            folder / f"pairs-{config.image_size}px-{key:016x}", config.reflow_pairs, config.image_size
        )

    def draw(self, done: int) -> None:
        """Draw all from number ``done`` on; after each block it is known how far they are."""
        rank, length = self.state.process_index, self.writer.length
        block = BATCH_SIZE * self.state.num_processes
        with self._bar(done) as bar:
            for start in range(done, length, block):
                first = start + BATCH_SIZE * rank
                numbers = range(first, min(first + BATCH_SIZE, length))
                if numbers:
                    self._write(numbers)
                self.state.wait_for_everyone()
                end = min(start + block, length)
                if self.state.is_main_process:
                    self.writer.reached(end)
                bar.update(end - start)

    def finish(self) -> None:
        """Give the pairs their name."""
        labels, names = np.full(self.writer.length, -1), list[str]()
        if self._labels is not None:
            labels, names = self._labels.numpy(), self.pictures.class_names
        self.writer.finish(labels, names, f"pairs of {self.source}")

    def _write(self, numbers: Sequence[int]) -> None:
        device = self.state.device
        bf16 = torch.autocast(device.type, torch.bfloat16, enabled=self.config.mixed_precision == "bf16")
        with randomness.rows_of(randomness.Items(self.config.seed, numbers), device), bf16:
            shape = (len(numbers), *(self.teacher.image_shape or ()))
            noise = randomness.randn("sample noise", shape, device).half().float()  # as it is stored
            labels = None if self._labels is None else self._labels[list(numbers)]
            images = self.teacher.sample(noise=noise, labels=labels, steps=self.steps)
        try:
            self.writer.write(numbers[0], images.mul(255).round().to(torch.uint8).cpu(), noise.cpu())
        except OSError as error:
            raise RunError(
                f"could not write pairs into {self.writer.stage} ({error}): make room, and the same command goes on"
            ) from error

    @property
    def _labels(self) -> Tensor | None:
        """A label for each pair, in the shares of the training pictures."""
        if self.teacher.num_classes is None:
            return None
        source = randomness.generator("cpu", self.config.seed, "labels of pairs")
        rows = torch.randint(len(self.pictures), (self.writer.length,), generator=source)
        return torch.from_numpy(self.pictures.labels[rows.numpy()])

    def _bar(self, done: int) -> "tqdm[Any]":
        return progress_bar(
            total=self.writer.length,
            initial=done,
            desc="drawing pairs",
            unit="pair",
            disable=not self.state.is_main_process,
        )
