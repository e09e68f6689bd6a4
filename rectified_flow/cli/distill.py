"""Distillation data: pairs of noise and data, or paths between them, which a trained flow generates."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.data import check_classes, check_columns, split_of
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.config import DataConfig
from rectified_flow.data.fill import fill
from rectified_flow.data.store import NOISE_FILE, RECIPE_FILE, ImageDataset, StoreDataset, StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import conditions_of
from rectified_flow.flows import Solver
from rectified_flow.flows.flow import SOURCE
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import CALLS_PER_STEP, Guidance
from rectified_flow.load import load_flow
from rectified_flow.networks.unet import to_device
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.space import Space
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import LOCK_TIMEOUT, prepare_folder, read_document
from rectified_flow.training.accelerator import choose_precision

PATH_FILE, SOURCE_FILE = "path.float16", "source.float16"
BATCH_SIZE = 64
COMPARED = ("pairs", "steps", "points", "guidance_scale", "autoguidance", "seed", "pictures")
"""Settings that must match those of stored data."""
COMPARED_UNFINISHED = ("precision", "teacher", "earlier")
"""Settings that must also match while rows are missing. Complete data can be used in any precision."""


@dataclass(frozen=True)
class DistillationData:
    """The data that a teacher generates for a run.

    Args:
        source: the teacher's run or checkpoint.
        rows: ``pairs`` of noise and data, or ``paths`` between them.
        count: the number of them.
        folder: where they are stored.
        steps: intervals of each sample.
        solver: solver of an interval.
        guidance_scale: guidance of the teacher.
        autoguidance: autoguidance of the teacher by its early checkpoint.
    """

    source: Path
    rows: Literal["pairs", "paths"]
    count: int
    folder: Path
    steps: int
    solver: Solver
    guidance_scale: float = 1.0
    autoguidance: float = 1.0

    @classmethod
    def of(cls, config: TrainConfig) -> "DistillationData | None":
        """Return the data that the flags ask for; None without a teacher."""
        flags = config.teacher
        if flags.teacher is None:
            return None
        # Paths are sampled with the most accurate solver for few network calls. End points of midpoint steps are exact
        # enough for pairs.
        rows: Literal["pairs", "paths"] = "pairs" if config.method == "reflow" else "paths"
        return cls(
            flags.teacher,
            rows,
            flags.teacher_samples or {"paths": 5_000, "pairs": 50_000}[rows],
            flags.teacher_dir or config.run.output_dir / rows,
            flags.teacher_steps or {"paths": 8, "pairs": 16}[rows],
            "ab2" if rows == "paths" else "midpoint",
            config.flow.guidance_scale,
            flags.autoguidance,
        )

    @property
    def points(self) -> int:
        """Points that are kept of each path beside its end; the noise alone for pairs."""
        return max(1, self.path_points)

    @property
    def path_points(self) -> int:
        """Points of each path in the training data, 0 for pairs."""
        return self.steps if self.rows == "paths" else 0

    @property
    def calls(self) -> int:
        """Calls of the teacher's network for a pair or a path."""
        doubled = sum(scale != 1 for scale in (self.guidance_scale, self.autoguidance))
        return self.steps * CALLS_PER_STEP[self.solver] * 2**doubled


def files_of(
    distilled: DistillationData, space: Space, *, with_sources: bool = False, columns: ConditionSpecs | None = None
) -> dict[str, Sequence[int]]:
    """Return the shape of a row of each file of the store.

    Args:
        distilled: the data.
        space: the space of the data.
        with_sources: whether the network takes sources as a condition.
        columns: the conditions of columns, by name.
    """
    shape = space.shape or ()
    stored = space.to_stored(torch.zeros(1, *shape))
    rows: dict[str, Sequence[int]] = {f"{space.key}.{str(stored.dtype).removeprefix('torch.')}": stored.shape[1:]}
    rows |= {PATH_FILE: (distilled.points, *shape)} if distilled.rows == "paths" else {NOISE_FILE: shape}
    rows |= {SOURCE_FILE: shape} if with_sources else {}
    for name, kind in (columns or {}).items():
        none = kind.none(1, torch.device("cpu"))
        dtype = "float16" if getattr(kind, "is_text", False) else str(none.dtype).removeprefix("torch.")
        rows[f"{name}.{dtype}"] = none.shape[1:]
    return rows


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the generated data.

    Args:
        source: the teacher's checkpoint.
        pairs: the number of pairs, or of paths.
        steps: intervals of each sample.
        seed: seed of the noise and labels.
        precision: precision of the teacher's network.
        pictures: fingerprint of the training pictures.
        points: points of each path; 1 for pairs.
        guidance_scale: guidance of the teacher.
        autoguidance: autoguidance of the teacher.
        solver: solver of an interval.
        space: description of the teacher's space.
        teacher: fingerprint of the teacher's checkpoint.
        earlier: fingerprint of its early checkpoint; empty without autoguidance.
        sha256: hash of this document.
    """

    source: str
    pairs: int
    steps: int
    seed: int
    precision: str
    pictures: str
    points: int = 1
    guidance_scale: float = 1.0
    autoguidance: float = 1.0
    solver: Solver = "midpoint"
    space: dict[str, Any] = field(default_factory=dict)
    teacher: str = ""
    earlier: str = ""
    flags: dict[str, Any] = field(default_factory=dict)
    """Flags of the teacher, in recipes of commit c5b7768."""
    sha256: str = ""


def open_drawn(distilled: DistillationData, pictures: ImageDataset, config: TrainConfig) -> tuple[StoreDataset, Space]:
    """Return the data of a teacher and its space; all processes generate the data first if they are missing.

    Args:
        distilled: the data to generate, with the teacher's checkpoint.
        pictures: the teacher's training pictures, whose labels the data get.
        config: the flags of the run.

    Returns:
        A dataset whose items have data as the space stores them, and ``noise``, float16 of the shape of ``x``, or
        ``path``, float16 ``[points, ...]``: all points but the last, the noise first.

    Raises:
        UsageError: if the data cannot be generated, or those in the folder have another recipe.
        RunError: if the disk is full.
    """
    run, with_sources = config.run, config.source.is_given and not config.source.as_start
    state = PartialState()
    batch = run.split_batch(state.num_processes)
    if distilled.count < batch.total:
        raise UsageError(f"--teacher_samples {distilled.count} is fewer than one global batch ({batch}): pass more")
    known = on_main(state, lambda: recipe_of(distilled))
    space: Space = build(
        known.space if known else checkpoint.load_document(distilled.source, checkpoint.FLOW_FILE)["space"]
    )
    earlier = on_main(state, lambda: checkpoint.early_of(distilled.source)) if distilled.autoguidance != 1 else None
    recipe = Recipe(
        source=str(distilled.source),
        pairs=distilled.count,
        steps=distilled.steps,
        seed=run.seed,
        precision="bf16" if choose_precision(run, state.device) == "bf16" else "float32",
        pictures=pictures.fingerprint,
        points=distilled.points,
        guidance_scale=distilled.guidance_scale,
        autoguidance=distilled.autoguidance,
        solver=known.solver if known else distilled.solver,  # stored paths keep their solver; no flag sets it
        space=describe(space),
        teacher=checkpoint.fingerprint(distilled.source),
        earlier="" if earlier is None else checkpoint.fingerprint(earlier),
    )
    columns = {name: column.kind for name, column in pictures.columns.items()}
    files = files_of(distilled, space, with_sources=with_sources, columns=columns)
    writer = StoreWriter(distilled.folder, distilled.count, files, distilled.rows, asdict(recipe))
    with ExitStack() as held:
        if not on_main(state, lambda: _is_drawn(writer, recipe, distilled, held)):
            generator = _Generator(recipe, earlier, writer, pictures, config.data, state.device)
            fill(writer, state, generator.rows, generator.finish, doing="drawing", batch_size=BATCH_SIZE)
    return StoreDataset(writer.path, pictures.arguments), space


def recipe_of(distilled: DistillationData) -> Recipe | None:
    """Return the recipe of the data, complete or not; None if nothing has been generated.

    Raises:
        UsageError: if it cannot be read.
    """
    for folder in Artifact(distilled.folder, distilled.rows, ()).folders:
        if (folder / RECIPE_FILE).exists():
            return read_document(folder / RECIPE_FILE, Recipe)
    return None


def _is_drawn(writer: StoreWriter, recipe: Recipe, distilled: DistillationData, held: ExitStack) -> bool:
    """Lock the store until ``held`` closes, and return whether it is whole.

    Raises:
        UsageError: if another run writes the store, its data differ from those that the flags ask for, or the teacher
            has no early checkpoint for autoguidance.
    """
    rows, flag, path = distilled.rows, "teacher_dir", writer.path
    prepare_folder(flag, path.parent)
    held.enter_context(writer.locked(f"choose another --{flag}", LOCK_TIMEOUT))
    known, whole = recipe_of(distilled), writer.is_whole
    if recipe.autoguidance != 1 and not recipe.earlier and not whole:
        raise UsageError(
            f"--autoguidance needs a checkpoint of the first quarter of the teacher's run, and "
            f"{distilled.source.parent} has none: leave it out"
        )
    for name in () if known is None else COMPARED if whole else COMPARED + COMPARED_UNFINISHED:
        then, now = getattr(known, name), getattr(recipe, name)
        if then != now:
            called = rows if name == "pairs" else name
            raise UsageError(
                f"the {rows} in {path} differ in {called} ({then} stored, {now} requested): "
                f"choose another --output_dir, or --{flag}"
            )
    return whole


class _Generator:
    """Generates rows of the store with the teacher."""

    def __init__(
        self,
        recipe: Recipe,
        earlier: Path | None,
        writer: StoreWriter,
        pictures: ImageDataset,
        data: DataConfig,
        device: torch.device,
    ) -> None:
        self.recipe, self.writer, self.pictures, self.device = recipe, writer, pictures, device
        self.bf16 = recipe.precision == "bf16"
        self.teacher = self._load(Path(recipe.source))
        self.guidance = Guidance(recipe.guidance_scale)
        if earlier is not None:
            velocity = self._load(earlier).exact_velocity
            self.guidance = replace(self.guidance, autoguidance=recipe.autoguidance, earlier=velocity)
        self.labels: Tensor | None = None
        check_classes(self.teacher, recipe.source, pictures)
        check_columns(self.teacher, recipe.source, pictures)
        # A picture for each row, whose label and source the row gets, so that these are distributed as in the pictures.
        if self.teacher.takes_source or pictures.columns:
            self.pictures = _seen_by(pictures, data)
        source = randomness.generator("cpu", recipe.seed, "labels of pairs")
        self.pictures_of = torch.randint(len(self.pictures), (writer.length,), generator=source)
        if "labels" in self.teacher.conditions:
            self.labels = self.pictures.condition_values(self.pictures_of.tolist())["labels"]

    def _load(self, path: Path) -> RectifiedFlow:
        return to_device(load_flow(path, RectifiedFlow), self.device, "bf16" if self.bf16 else "no")

    def rows(self, numbers: Sequence[int]) -> Mapping[str, Tensor]:
        """Generate the rows with these numbers; each depends on the seed and its number alone."""
        space, path = self.teacher.space, list[Tensor]()
        bf16 = torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)
        with randomness.deterministic(randomness.Samples(self.recipe.seed, numbers), self.device), bf16:
            shape = (len(numbers), *(space.shape or ()))
            # Not the noise of samples with this seed, from which a trained map would be shown what it was trained on.
            noise = randomness.randn("teacher's noise", shape, self.device).half().float()  # rounded as it is stored
            some = self.pictures_of[list(numbers)].tolist()
            given: dict[str, Any] = conditions_of(self.teacher, self.pictures, some, self.recipe.seed, numbers)
            x = self.teacher.sample(
                noise=noise,
                steps=self.recipe.steps,
                solver=self.recipe.solver,
                guidance=self.guidance,
                watch=lambda _t, x: path.append(x.half().cpu()),
                decode=False,
                **given,
            )
        points = torch.stack(path[:-1], dim=1) if PATH_FILE in self.writer.rows else path[0]
        rows = [space.to_stored(x), points]
        if SOURCE_FILE in self.writer.rows:
            rows.append(space.encode_source(given[SOURCE].to(self.device)).half())
        rows += [given[name] for name in self.pictures.columns]
        return dict(zip(self.writer.rows, rows, strict=True))

    def finish(self) -> None:
        """Complete the store: write its labels and its description, and give it its name."""
        labels, names = np.full(self.writer.length, -1), list[str]()
        if self.labels is not None:
            labels, names = self.labels.numpy(), self.pictures.class_names
        source, side = f"{self.writer.kind} of {self.recipe.source}", self.pictures.info.image_size
        self.writer.complete(labels, source=source, image_size=side, class_names=names)


def _seen_by(pictures: ImageDataset, data: DataConfig) -> ImageDataset:
    """Return the pictures that a teacher was trained on, without those that it held out. Collective."""
    split = split_of(pictures, data)
    if split is None or split.problem is not None:
        return pictures
    return split.divide(pictures)[0]
