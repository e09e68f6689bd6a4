"""Reflow: train a straighter flow on pairs of noise and the picture that a trained flow makes of it.

Liu et al. 2022, arXiv:2209.03003, section 2.2. A run keeps its pairs and their recipe, so that it resumes even if the
checkpoint of the flow that drew them is gone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from filelock import Timeout
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.flags import TrainRectifiedFlow
from rectified_flow.data.image_store import ImageDataset
from rectified_flow.data.pair_store import PairDataset, PairWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, RunError, UsageError, require
from rectified_flow.files import lock_of, prepare_folder
from rectified_flow.flags import checked, plain
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.conditions import Labels
from rectified_flow.networks.placing import to_device
from rectified_flow.progress import progress_bar
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import program_flags, read_config
from rectified_flow.training.accelerator import choose_precision

BATCH_SIZE = 64
DEFAULT_PAIRS = 50_000
INHERITED = ("dataset", "image_size", "skip_broken_images", "prediction", "dim", "dim_mults", "dropout", "use_cfg")
FOLDERS = ("dataset_path", "cache_dir")
"""Inherited where they are not given: a folder may have moved."""
LOCK_TIMEOUT = 10.0


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the pairs."""

    source: str
    """The checkpoint of the flow that draws them."""
    pairs: int
    steps: int
    """Intervals that each picture is drawn in."""
    seed: int
    precision: str
    pictures: str
    """Fingerprint of the training pictures."""
    flags: dict[str, Any]
    """Of the run of that flow, those that are inherited."""
    sha256: str = ""
    """Of this document; earlier versions did not record it."""


def with_teacher_flags(config: TrainRectifiedFlow) -> TrainRectifiedFlow:
    """The flags of a run that reflows another: data and network are those of the checkpoint it starts from.

    Raises:
        UsageError: if there is no such checkpoint, or the run's pairs are of another one.
    """
    source, flags = on_main(PartialState(), lambda: _find_source(config))
    data = {name: flags[name] for name in ("dataset", "image_size", "skip_broken_images")}
    data |= {name: getattr(config.data, name) or flags[name] for name in FOLDERS}
    network = {name: flags[name] for name in ("dim", "dim_mults", "dropout", "use_cfg")}
    return replace(
        config,
        data=replace(config.data, **data),
        network=replace(config.network, **network),
        rectified_flow=replace(config.rectified_flow, prediction=flags["prediction"]),
        reflow=replace(config.reflow, reflow_from=source),
    )


def open_pairs(config: TrainRectifiedFlow, pictures: ImageDataset) -> PairDataset:
    """The pairs of ``--reflow_from``, drawn by all processes together if they are not there yet.

    Args:
        config: as :func:`with_teacher_flags` returned it.
        pictures: the teacher's training pictures, whose labels the pairs get.

    Raises:
        UsageError: if they cannot be drawn, or those that are there have another recipe.
        RunError: if the disk is full.
    """
    state = PartialState()
    count = config.reflow.reflow_pairs or DEFAULT_PAIRS
    batch = config.run.split_batch(state.num_processes)
    require(
        count >= batch.total,
        f"--reflow_pairs {count} is fewer than one global batch ({batch}): pass more, or a smaller --batch_size",
    )
    writer = PairWriter(_folder(config), count, config.data.image_size)
    recipe = _recipe(config, pictures, count)
    with ExitStack() as held:
        done = on_main(state, lambda: _begin(writer, recipe, held))
        if done is not None:
            drawing = _Drawing(config, recipe, state, writer, pictures)
            drawing.draw(done)
            on_main(state, drawing.finish)
    return PairDataset(writer.path, pictures.recipe)


def _folder(config: TrainRectifiedFlow) -> Path:
    return config.reflow.pairs_dir or config.run.output_dir / "pairs"


def _find_source(config: TrainRectifiedFlow) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to reflow, and the flags that come with it; of existing pairs, those of their recipe."""
    named = config.reflow.reflow_from or Path()
    _refuse_other_run(config)
    known = PairWriter.recipe_of(_folder(config), Recipe)
    if known is not None:
        source = Path(known.source)
        require(
            source.resolve().is_relative_to(named.resolve()),
            f"{_folder(config)} holds pairs of {source}: choose another --output_dir to reflow {named}",
        )
        return source, _inherited(known.flags, _folder(config))
    return checkpoint.read(named, lambda source: (source, _inherited(_flags_of(source), source)))


def _refuse_other_run(config: TrainRectifiedFlow) -> None:
    """Refuse the folder of a run that reflows nothing, such as that of the flow itself, before pairs are drawn."""
    folder = config.run.checkpoints
    for newest in checkpoint.list_checkpoints(folder)[-1:]:
        with suppress(DamageError):  # of which the run itself will say more
            require(
                _flags_of(newest).get("reflow_from") is not None,
                f"{folder} holds checkpoints of a run without --reflow_from: choose another --output_dir",
            )


def _flags_of(source: Path) -> dict[str, Any]:
    path = source / checkpoint.CONFIG_FILE
    return program_flags(read_config(path)) if path.exists() else {}


def _inherited(flags: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Those of the flags of ``source`` that a run takes over."""
    wanted = (*INHERITED, *FOLDERS)
    missing = [name for name in wanted if name not in flags]
    names = ", ".join(missing)
    require(not missing, f"--reflow_from {source} was not trained by train_oxford.py: it lacks the flags {names}")
    return checked(TrainRectifiedFlow, {name: flags[name] for name in wanted}, source)


def _recipe(config: TrainRectifiedFlow, pictures: ImageDataset, count: int) -> Recipe:
    flags = plain(config)
    return Recipe(
        source=str(config.reflow.reflow_from),
        pairs=count,
        steps=config.reflow.reflow_steps or RectifiedFlow.default_steps,
        seed=config.run.seed,
        precision="bf16" if choose_precision(config.run, PartialState().device) == "bf16" else "float32",
        pictures=pictures.fingerprint,
        flags={name: flags[name] for name in (*INHERITED, *FOLDERS)},
    )


def _begin(writer: PairWriter, recipe: Recipe, held: ExitStack) -> int | None:
    """Lock other runs out; the number of pairs that are there, or None if all are there, undamaged."""
    prepare_folder("pairs_dir", writer.path.parent)
    try:
        held.enter_context(lock_of(Path(f"{writer.path}.lock")).acquire(timeout=LOCK_TIMEOUT))
        known = PairWriter.recipe_of(writer.path, Recipe)
        whole = writer.is_whole
        # Complete pairs are taken as they are, in whichever precision this machine would draw them.
        shaped_by = ("pairs", "steps", "seed", "pictures", *(() if whole else ("precision",)))
        for name in shaped_by if known is not None else ():
            then, now = getattr(known, name), getattr(recipe, name)
            require(
                then == now,
                f"the pairs in {writer.path} were drawn with other {name} ({then} there, {now} now): choose another "
                "--output_dir, or --pairs_dir",
            )
        return None if whole else writer.begin(asdict(recipe))
    except Timeout as error:
        raise UsageError(
            f"another run draws the pairs {writer.path}: wait for its end, or choose another --output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the pairs {writer.path} cannot be written: {reason}; choose a --pairs_dir") from error


class _Drawing:
    """Draws the pairs of one flow."""

    def __init__(
        self,
        config: TrainRectifiedFlow,
        recipe: Recipe,
        state: PartialState,
        writer: PairWriter,
        pictures: ImageDataset,
    ) -> None:
        self.recipe, self.state, self.writer, self.pictures = recipe, state, writer, pictures
        self.bf16 = recipe.precision == "bf16"
        self.source = config.reflow.reflow_from or Path()
        self.teacher = to_device(
            RectifiedFlow.from_checkpoint(self.source), state.device, "bf16" if self.bf16 else "no"
        )
        labels = self.teacher.conditions.get("labels")
        require(
            not isinstance(labels, Labels) or list(labels.names) == pictures.class_names,
            f"{self.source} was trained on different classes than {pictures.info.source}; pass its training images "
            "with --dataset_path",
        )

    def draw(self, done: int) -> None:
        """Draw all from number ``done`` on, and record the progress after each block."""
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
        with randomness.deterministic(randomness.Samples(self.recipe.seed, numbers), device), bf16:
            shape = (len(numbers), *(self.teacher.space.shape or ()))
            noise = randomness.randn("sample noise", shape, device).half().float()  # as it is stored
            given: dict[str, Any] = {} if self._labels is None else {"labels": self._labels[list(numbers)]}
            images = self.teacher.sample(noise=noise, steps=self.recipe.steps, **given)
        self.writer.write(numbers[0], self.teacher.space.draw(images).cpu(), noise.cpu())

    @cached_property
    def _labels(self) -> Tensor | None:
        """A label for each pair, in the shares of the training pictures."""
        if "labels" not in self.teacher.conditions:
            return None
        source = randomness.generator("cpu", self.recipe.seed, "labels of pairs")
        rows = torch.randint(len(self.pictures), (self.writer.length,), generator=source)
        return torch.from_numpy(self.pictures.labels[rows.numpy()])

    @contextmanager
    def _needing_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"could not write pairs into {self.writer.stage} ({error}): make room, and run the same command to "
                "resume"
            ) from error
