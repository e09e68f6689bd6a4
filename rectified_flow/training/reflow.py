"""Reflow: train a straighter flow on pairs of noise and the picture that a trained flow makes of it.

Liu et al. 2022, arXiv:2209.03003, section 2.2. A run keeps its pairs, and what they were made by, so that it goes on
whatever becomes of the flow that drew them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from filelock import Timeout
from torch import Tensor

from rectified_flow import checkpoint, randomness
from rectified_flow.data import ImageDataset
from rectified_flow.data.pair_store import PairDataset, PairWriter
from rectified_flow.errors import RunError, UsageError, require
from rectified_flow.files import lock_of
from rectified_flow.flows import RectifiedFlow
from rectified_flow.networks import place
from rectified_flow.processes.collectives import on_main
from rectified_flow.progress import progress_bar
from rectified_flow.training.accelerator import choose_precision
from rectified_flow.training.config import NetworkFlags
from rectified_flow.training.flow_configs import RectifiedFlowConfig

BATCH_SIZE = 64
DEFAULT_PAIRS = 50_000
INHERITED = ("dataset", "image_size", "skip_broken_images", "prediction", *NetworkFlags.__dataclass_fields__)
LOCK_PATIENCE = 10.0


def inherit(config: RectifiedFlowConfig) -> RectifiedFlowConfig:
    """The flags of a run that reflows another: pictures and network are those of the checkpoint it starts from.

    Raises:
        UsageError: if there is no such checkpoint, or the run's pairs are of another one.
    """
    source, flags = on_main(PartialState(), lambda: _find_source(config))
    flags = flags | {"dim_mults": tuple(flags["dim_mults"])}
    for name in ("dataset_path", "cache_dir"):
        before = flags.pop(name)
        if getattr(config, name) is None and before is not None:
            flags[name] = Path(before)
    return replace(config, **flags, reflow_from=source)


def open_pairs(config: RectifiedFlowConfig, pictures: ImageDataset) -> PairDataset:
    """The pairs of ``config.reflow_from``, drawn by all processes together if they are not there yet.

    Args:
        config: as :func:`inherit` returned it.
        pictures: what that flow was trained on, whose labels the pairs get.

    Raises:
        UsageError: if they cannot be drawn, or those that are there were drawn in another way.
        RunError: if the disk is full.
    """
    state = PartialState()
    count = config.reflow_pairs or DEFAULT_PAIRS
    writer = PairWriter(_folder(config), count, config.image_size)
    recipe = _recipe(config, pictures, count)
    with ExitStack() as held:
        done = on_main(state, lambda: _begin(writer, recipe, held))
        if done is not None:
            drawing = _Drawing(config, recipe, state, writer, pictures)
            drawing.draw(done)
            on_main(state, drawing.finish)
    return PairDataset(writer.path)


def _folder(config: RectifiedFlowConfig) -> Path:
    return config.pairs_dir or config.output_dir / "pairs"


def _find_source(config: RectifiedFlowConfig) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to reflow, and the flags it comes with; of pairs that are there already, as they say."""
    named = config.reflow_from or Path()
    known = PairWriter.recipe_of(_folder(config))
    if known is not None:
        source = Path(known["source"])
        require(
            source.resolve().is_relative_to(named.resolve()),
            f"{_folder(config)} holds pairs of {source}: choose another --output_dir to reflow {named}",
        )
        return source, known["flags"]
    source = checkpoint.resolve(named)
    try:
        before = checkpoint.load_document(source, checkpoint.CONFIG_FILE)
        return source, {name: before[name] for name in (*INHERITED, "dataset_path", "cache_dir")}
    except (OSError, LookupError) as error:
        raise UsageError(f"--reflow_from {source} was not trained by train_oxford.py ({error})") from error


def _recipe(config: RectifiedFlowConfig, pictures: ImageDataset, count: int) -> dict[str, Any]:
    """Everything that shapes the pairs."""
    flags = config.plain()
    return {
        "source": str(config.reflow_from),
        "pairs": count,
        "steps": config.reflow_steps or RectifiedFlow.default_steps,
        "seed": config.seed,
        "precision": "bf16" if choose_precision(config, PartialState().device) == "bf16" else "float32",
        "pictures": pictures.fingerprint,
        "flags": {name: flags[name] for name in (*INHERITED, "dataset_path", "cache_dir")},
    }


def _begin(writer: PairWriter, recipe: dict[str, Any], held: ExitStack) -> int | None:
    """Keep other runs out; the number of pairs that are there, or None if that is all and they are whole."""
    try:
        writer.path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=writer.path.parent):
            pass  # it can be written
        held.enter_context(lock_of(Path(f"{writer.path}.lock")).acquire(timeout=LOCK_PATIENCE))
        known = PairWriter.recipe_of(writer.path)
        whole = writer.is_whole
        # Pairs that are all there are taken as they are, in whichever precision this machine would draw them.
        shaped_by = ("pairs", "steps", "seed", "pictures", *(() if whole else ("precision",)))
        for name in shaped_by if known is not None else ():
            require(
                (known or {}).get(name) == recipe[name],
                f"the pairs in {writer.path} were drawn with other {name} ({(known or {}).get(name)} there, "
                f"{recipe[name]} now): choose another --output_dir, or --pairs_dir",
            )
        return None if whole else writer.begin(recipe)
    except Timeout as error:
        raise UsageError(
            f"another run draws the pairs {writer.path}: wait for its end, or choose another --output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the pairs {writer.path} cannot be written: {reason}; choose a --pairs_dir") from error


class _Drawing:
    """How the pairs of one flow are drawn."""

    def __init__(
        self,
        config: RectifiedFlowConfig,
        recipe: dict[str, Any],
        state: PartialState,
        writer: PairWriter,
        pictures: ImageDataset,
    ) -> None:
        self.recipe, self.state, self.writer, self.pictures = recipe, state, writer, pictures
        self.bf16 = recipe["precision"] == "bf16"
        self.source = config.reflow_from or Path()
        self.teacher = place(RectifiedFlow.from_checkpoint(self.source), state.device, "bf16" if self.bf16 else "no")
        require(
            self.teacher.num_classes is None or self.teacher.class_names == pictures.class_names,
            f"{self.source} was trained on other classes than those of {pictures.info['source']}: name its training "
            "pictures with --dataset_path",
        )

    def draw(self, done: int) -> None:
        """Draw all from number ``done`` on; after each block it is known how far they are."""
        rank, length = self.state.process_index, self.writer.length
        block = BATCH_SIZE * self.state.num_processes
        bar = progress_bar(
            total=length, initial=done, desc="drawing pairs", unit="pair", disable=not self.state.is_main_process
        )
        with bar, self._needing_room():
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
        with self._needing_room():
            self.writer.finish(labels, names, f"pairs of {self.source}")

    def _write(self, numbers: Sequence[int]) -> None:
        device = self.state.device
        bf16 = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        with randomness.rows_of(randomness.Items(self.recipe["seed"], numbers), device), bf16:
            shape = (len(numbers), *(self.teacher.image_shape or ()))
            noise = randomness.randn("sample noise", shape, device).half().float()  # as it is stored
            labels = None if self._labels is None else self._labels[list(numbers)]
            images = self.teacher.sample(noise=noise, labels=labels, steps=self.recipe["steps"])
        self.writer.write(numbers[0], images.mul(255).round().to(torch.uint8).cpu(), noise.cpu())

    @cached_property
    def _labels(self) -> Tensor | None:
        """A label for each pair, in the shares of the training pictures."""
        if self.teacher.num_classes is None:
            return None
        source = randomness.generator("cpu", self.recipe["seed"], "labels of pairs")
        rows = torch.randint(len(self.pictures), (self.writer.length,), generator=source)
        return torch.from_numpy(self.pictures.labels[rows.numpy()])

    @contextmanager
    def _needing_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"could not write pairs into {self.writer.stage} ({error}): make room, and the same command goes on"
            ) from error
