"""Distillation data: pairs of noise and data, or paths between them, which a trained flow generates."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.data import check_conditions
from rectified_flow.cli.training_flags import Method, TeacherConfig
from rectified_flow.data.store import RECIPE_FILE, ImageDataset, StoreDataset
from rectified_flow.data.store_writer import StoreWriter, claimed, fill
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import conditions_of
from rectified_flow.evaluation.heldout import divided
from rectified_flow.flows import Solver, TimeGrid
from rectified_flow.flows.flow import SOURCE
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import CALLS_PER_STEP, Guidance
from rectified_flow.load import autocast, load_flow
from rectified_flow.networks.network import to_device
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.space import Space
from rectified_flow.system.artifact import Artifact
from rectified_flow.system.files import prepare_folder, read_document

BATCH_SIZE = 64
Kind = Literal["pairs", "paths"]
# Paths are sampled with the most accurate solver for few network calls. End points of midpoint steps are exact enough
# for pairs.
DEFAULTS: dict[Kind, tuple[int, int, Solver]] = {"paths": (5_000, 8, "ab2"), "pairs": (50_000, 16, "midpoint")}
"""Default number of samples, number of steps of each sample, and solver."""
REMEDY = "choose another --output_dir, or --teacher_dir"
COMPARED = ("pairs", "steps", "points", "guidance_scale", "autoguidance", "seed", "pictures")
"""Settings that must match those of stored data."""
COMPARED_UNFINISHED = ("precision", "teacher", "earlier")
"""Settings that must also match while rows are missing. Complete data can be used in any precision."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the data of a teacher. The fields after ``grid`` describe teacher and pictures."""

    pairs: int  # number of pairs, or of paths
    steps: int  # intervals of each sample
    seed: int
    points: int = 1  # of each path; 1 for pairs
    guidance_scale: float = 1.0
    autoguidance: float = 1.0
    solver: Solver = "midpoint"
    grid: TimeGrid = "uniform"
    source: str = ""  # the teacher's checkpoint
    precision: str = ""  # of the teacher's network
    pictures: str = ""  # fingerprint of the training pictures
    space: dict[str, Any] = field(default_factory=dict)  # description of the teacher's space
    teacher: str = ""  # fingerprint of the teacher's checkpoint
    earlier: str = ""  # fingerprint of its early checkpoint; empty without autoguidance


@dataclass(frozen=True)
class DistillationData:
    """The data that a teacher, a run or checkpoint, generates for a run: ``pairs`` of noise and data, or ``paths``."""

    teacher: Path
    kind: Kind
    folder: Path
    recipe: Recipe

    @classmethod
    def of(
        cls, flags: TeacherConfig, method: Method, guidance_scale: float, *, seed: int, output_dir: Path
    ) -> "DistillationData | None":
        """Return the data that the flags ask for; None without a teacher."""
        if flags.teacher is None:
            return None
        kind: Kind = "pairs" if method == "reflow" else "paths"
        count, steps, solver = DEFAULTS[kind]
        count, steps = flags.teacher_samples or count, flags.teacher_steps or steps
        points = steps if kind == "paths" else 1  # all but the end
        autoguidance = 1.0 if flags.autoguidance is None else flags.autoguidance
        recipe = Recipe(count, steps, seed, points, guidance_scale, autoguidance, solver)
        return cls(flags.teacher, kind, flags.teacher_dir or output_dir / kind, recipe)

    @property
    def path_points(self) -> int:
        """Points of each path in the training data, all but its end; 0 for pairs."""
        return self.recipe.points if self.kind == "paths" else 0

    @property
    def calls(self) -> int:
        """Calls of the teacher's network for a pair or a path."""
        doubled = sum(scale != 1 for scale in (self.recipe.guidance_scale, self.recipe.autoguidance))
        return self.recipe.steps * CALLS_PER_STEP[self.recipe.solver] * 2**doubled

    def grid_of(self, space: Space) -> TimeGrid:
        """Return the spacing of the times of a sample, which is that of stored data if there are any.

        It is ``edm`` for paths on latents or with autoguidance, as for samples of a teacher. Call in one process only.
        """
        if (stored := recipe_of(self)) is not None:
            return stored.grid
        is_edm = self.kind == "paths" and (bool(space.medium.codec) or self.recipe.autoguidance != 1)
        return "edm" if is_edm else "uniform"

    def space_of_teacher(self) -> Space:
        """Return the space of the teacher's flow, whose checkpoint may be gone once data have been generated."""
        stored = recipe_of(self)
        flow = {"space": stored.space} if stored else checkpoint.load_document(self.teacher, checkpoint.FLOW_FILE)
        return cast(Space, build(flow["space"]))


def open_distilled(
    distilled: DistillationData,
    pictures: ImageDataset,
    space: Space,
    holdout: tuple[float, int],
    precision: str,
) -> StoreDataset:
    """Return the data of a teacher; all processes generate the data first if they are missing.

    Args:
        distilled: the data.
        pictures: the pictures of the teacher's run, whose labels the samples have.
        space: the space of the student, which stores the samples.
        holdout: share and seed of the pictures that are held out, whose sources and columns no sample has.
        precision: precision of the teacher's network: ``bf16``, or another one for float32.

    Returns:
        A dataset whose items have data as the space stores them, and ``noise``, float16 of the shape of ``x``, or
        ``path``, float16 ``[points, ...]``: all points but the last, the noise first.
    """
    state, teacher, stored = PartialState(), distilled.teacher, on_main(PartialState(), lambda: recipe_of(distilled))
    earlier = on_main(state, lambda: checkpoint.early_of(teacher)) if distilled.recipe.autoguidance != 1 else None
    recipe = replace(
        distilled.recipe,
        source=str(teacher),
        precision="bf16" if precision == "bf16" else "float32",
        pictures=pictures.fingerprint,
        space=on_main(state, lambda: describe(distilled.space_of_teacher())),
        # Stored paths keep their solver and their times, which no flag sets.
        solver=stored.solver if stored else distilled.recipe.solver,
        grid=on_main(state, lambda: distilled.grid_of(space)),
        teacher=checkpoint.fingerprint(teacher),
        earlier="" if earlier is None else checkpoint.fingerprint(earlier),
    )
    on_main(state, lambda: prepare_folder("teacher_dir", distilled.folder.parent))
    store = StoreWriter(distilled.folder, recipe.pairs, distilled.kind, recipe=asdict(recipe))
    with claimed(store, "choose another --teacher_dir") as is_missing:
        on_main(state, lambda: _check_recipe(recipe, distilled, is_missing=is_missing))
        if is_missing:
            generator = _Generator(recipe, earlier, distilled.kind, pictures, space, holdout)
            fill(store, generator.rows, generator.store_info, doing="drawing", batch_size=BATCH_SIZE)
    return StoreDataset(store.path, pictures.described)


def recipe_of(distilled: DistillationData) -> Recipe | None:
    """Return the recipe of the data, which may be incomplete; None if nothing has been generated."""
    store = Artifact(distilled.folder, distilled.kind, ())
    found = [path for folder in (store.path, store.stage) if (path := folder / RECIPE_FILE).exists()]
    return read_document(found[0], Recipe) if found else None


def _check_recipe(recipe: Recipe, distilled: DistillationData, *, is_missing: bool) -> None:
    """Check that the data of a recipe can be generated, and that stored data have the same recipe."""
    if recipe.autoguidance != 1 and not recipe.earlier and is_missing:
        raise UsageError("--autoguidance needs a checkpoint of the first quarter of the teacher's run: leave it out")
    stored = recipe_of(distilled) or recipe
    for name in COMPARED + COMPARED_UNFINISHED if is_missing else COMPARED:
        then, now = getattr(stored, name), getattr(recipe, name)
        if then != now:
            called = distilled.kind if name == "pairs" else name
            change = f"differ in {called} ({then} stored, {now} requested)"
            raise UsageError(f"the {distilled.kind} in {distilled.folder} {change}: {REMEDY}")


class _Generator:
    """Generates the rows of distillation data with the teacher."""

    def __init__(
        self,
        recipe: Recipe,
        earlier: Path | None,
        kind: str,
        pictures: ImageDataset,
        space: Space,
        holdout: tuple[float, int],
    ) -> None:
        self.space = space
        self.recipe, self.kind, self.pictures, self.device = recipe, kind, pictures, PartialState().device
        self.precision = "bf16" if recipe.precision == "bf16" else "no"
        self.teacher = self._load(Path(recipe.source))
        self.guidance = Guidance(recipe.guidance_scale)
        if earlier is not None:
            velocity = self._load(earlier).exact_velocity
            self.guidance = replace(self.guidance, autoguidance=recipe.autoguidance, earlier=velocity)
        check_conditions(self.teacher, recipe.source, pictures)
        # A picture for each row, whose label and source the row gets, so that these are distributed as in the pictures.
        if self.teacher.takes_source or pictures.columns:
            self.pictures, _ = divided(pictures, *holdout)
        generator = randomness.generator("cpu", recipe.seed, "labels of pairs")
        self.picture_of = torch.randint(len(self.pictures), (recipe.pairs,), generator=generator).tolist()

    def _load(self, path: Path) -> RectifiedFlow:
        return to_device(load_flow(path, RectifiedFlow), self.device, self.precision)

    def rows(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Generate the rows with these numbers; each depends on the seed and its number alone."""
        space, path = self.teacher.space, list[Tensor]()
        samples = randomness.Samples(self.recipe.seed, numbers)
        with randomness.deterministic(samples, self.device), autocast(self.precision, self.device):
            shape = (len(numbers), *(space.shape or ()))
            # Not the noise of samples with this seed, from which a trained map would be shown what it was trained on.
            noise = randomness.randn("teacher's noise", shape, self.device).half().float()  # rounded as it is stored
            # In an epoch of its own, a row has random draws of its own for its source and its caption.
            pictures = [self.picture_of[number] + number * len(self.pictures) for number in numbers]
            given: dict[str, Any] = conditions_of(self.teacher, self.pictures, pictures)
            x = self.teacher.sample(
                noise=noise,
                steps=self.recipe.steps,
                solver=self.recipe.solver,
                grid=self.recipe.grid,
                guidance=self.guidance,
                watch=lambda _t, x: path.append(x.half().cpu()),
                decode=False,
                **given,
            )
        rows = {self.space.key: self.space.to_stored(x)}
        rows |= {"path": torch.stack(path[:-1], dim=1)} if self.kind == "paths" else {"noise": path[0]}
        if self.teacher.takes_source and not self.teacher.from_source:
            rows[SOURCE] = space.source_space.encode(given[SOURCE].to(self.device)).half()
        for name, column in self.pictures.columns.items():
            rows[name] = given[name].half() if column.kind.is_text else given[name]
        return rows

    def store_info(self) -> dict[str, Any]:
        """Return the labels and the description of the data."""
        info = self.pictures.info
        of_pictures = {"source": f"{self.kind} of {self.recipe.source}", "image_size": info.image_size}
        of_pictures |= {"framing": asdict(info.framing)} if info.framing else {}
        if "labels" not in self.teacher.conditions:
            return of_pictures
        labels = self.pictures.condition_values(self.picture_of)["labels"].numpy()
        return of_pictures | {"labels": labels, "class_names": self.pictures.class_names}
