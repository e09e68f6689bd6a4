"""What a trained rectified flow draws for another flow to learn from.

A reflow run learns from pairs of noise and picture (Liu et al. 2022, arXiv:2209.03003, section 2.2), a mean flow with a
teacher from whole paths. A run keeps them and their recipe, so that it resumes even if the checkpoint of the teacher is
gone.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from filelock import Timeout
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.data.pair_store import PATH_FILE, PairDataset
from rectified_flow.data.store import NOISE_FILE, ImageDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.filling import fill, no_room
from rectified_flow.errors import UsageError, require
from rectified_flow.files import lock_of, prepare_folder
from rectified_flow.flags import plain
from rectified_flow.flows.config import Solver
from rectified_flow.flows.guidance import Guidance
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.conditions import Labels
from rectified_flow.networks.placing import to_device
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.training.accelerator import choose_precision

BATCH_SIZE = 64
LOCK_TIMEOUT = 10.0
CALLS: Mapping[Solver, int] = {"euler": 1, "midpoint": 2}
"""Of the network in an interval, by the solvers that a request may have."""
FRAMING = {"aspect_ratio": "1:1", "crop": "center", "alpha": False}
"""Flags that earlier versions did not have, and their values there."""
NETWORK_FLAGS = ("dim", "dim_mults", "dropout", "use_cfg")
DATA_FLAGS = ("dataset", "image_size", "skip_broken_images", *FRAMING)
FOLDERS = ("dataset_path", "cache_dir", "autoencoder")
"""Inherited where they are not given: a folder may have moved."""
INHERITED = (*DATA_FLAGS, "prediction", *NETWORK_FLAGS, *FOLDERS)


@dataclass(frozen=True)
class Request:
    """What a run's flags ask of a teacher.

    Args:
        flag: that names the teacher.
        source: the teacher's run or checkpoint.
        rows: what it draws, ``pairs`` or ``paths``.
        count: how many.
        folder: where they go.
        steps: intervals that each picture is drawn in.
        guidance_scale: of the teacher.
        solver: that crosses an interval.
    """

    flag: str
    source: Path
    rows: str
    count: int
    folder: Path
    steps: int
    guidance_scale: float = 1.0
    solver: Solver = "midpoint"

    @property
    def points(self) -> int:
        """Points of each path that are kept beside its picture; of a pair, the noise alone."""
        return self.steps if self.rows == "paths" else 1

    @property
    def calls(self) -> int:
        """Of the teacher's network, for all of them."""
        return self.count * self.steps * CALLS[self.solver] * (1 if self.guidance_scale == 1 else 2)

    def files(self, space: Space) -> dict[str, Sequence[int]]:
        """Shape of a row of each file of the store."""
        shape = space.shape or ()
        stored = space.to_stored(torch.zeros(1, *shape))
        data = {f"{space.key}.{str(stored.dtype).removeprefix('torch.')}": stored.shape[1:]}
        return data | ({PATH_FILE: (self.points, *shape)} if self.rows == "paths" else {NOISE_FILE: shape})


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes the pairs or paths."""

    source: str
    """The checkpoint of the flow that draws them."""
    pairs: int
    """How many, of paths too."""
    steps: int
    """Intervals that each picture is drawn in."""
    seed: int
    precision: str
    pictures: str
    """Fingerprint of the training pictures."""
    flags: dict[str, Any]
    """Of the run of that flow, those that are inherited."""
    points: int = 1
    """Of each path; 1 for pairs."""
    guidance_scale: float = 1.0
    solver: str = "midpoint"
    space: dict[str, Any] = field(default_factory=dict)
    """Description of the teacher's; earlier versions, which knew pixels alone, did not record it."""
    teacher: str = ""
    """Fingerprint of the checkpoint; earlier versions did not record it."""
    sha256: str = ""
    """Of this document; earlier versions did not record it."""


def open_drawn(
    config: TrainRectifiedFlow | TrainMeanFlow, request: Request, pictures: ImageDataset
) -> tuple[PairDataset, Space]:
    """The pairs or paths of a teacher and its space, drawn by all processes together if they are not there yet.

    Args:
        config: as :func:`with_teacher_flags` returned it.
        request: of these flags.
        pictures: the teacher's training pictures, whose labels the rows get.

    Raises:
        UsageError: if they cannot be drawn, or those that are there have another recipe.
        RunError: if the disk is full.
    """
    state = PartialState()
    batch = config.run.split_batch(state.num_processes)
    count_flag = {"pairs": "reflow_pairs", "paths": "teacher_paths"}[request.rows]
    require(
        request.count >= batch.total,
        f"--{count_flag} {request.count} is fewer than one global batch ({batch}): pass more, or a smaller "
        "--batch_size",
    )
    space = on_main(state, lambda: space_of(config, request))
    writer = StoreWriter(request.folder, request.count, request.files(space), request.rows)
    recipe = _recipe(config, request, pictures, space)
    with ExitStack() as held:
        done = on_main(state, lambda: _begin(writer, recipe, request, held))
        if done is not None:
            drawing = _Drawing(request, recipe, state, writer, pictures)
            drawing.draw(done)
            on_main(state, drawing.finish)
    return PairDataset(writer.path, pictures.recipe), space


def space_of(config: TrainRectifiedFlow | TrainMeanFlow, request: Request) -> Space:
    """The teacher's space: as what is drawn says, or the checkpoint.

    Raises:
        UsageError: if neither can be read.
    """
    if config.data.autoencoder is None:
        return Pixels(config.data.framing.shape)
    known = StoreWriter.recipe_of(request.folder, Recipe)
    description = checkpoint.load_description(request.source)["space"] if known is None else known.space
    space: Space = build(description)
    return space


def _recipe(
    config: TrainRectifiedFlow | TrainMeanFlow, request: Request, pictures: ImageDataset, space: Space
) -> Recipe:
    flags = {"prediction": "velocity"} | plain(config)
    return Recipe(
        source=str(request.source),
        pairs=request.count,
        steps=request.steps,
        seed=config.run.seed,
        precision="bf16" if choose_precision(config.run, PartialState().device) == "bf16" else "float32",
        pictures=pictures.fingerprint,
        flags={name: flags[name] for name in INHERITED},
        points=request.points,
        guidance_scale=request.guidance_scale,
        solver=request.solver,
        space=describe(space),
        teacher=checkpoint.fingerprint(request.source),
    )


def _begin(writer: StoreWriter, recipe: Recipe, request: Request, held: ExitStack) -> int | None:
    """Lock other runs out; the number of rows that are there, or None if all are there, undamaged."""
    rows, folder_flag = request.rows, f"{request.rows}_dir"
    prepare_folder(folder_flag, writer.path.parent)
    try:
        held.enter_context(lock_of(Path(f"{writer.path}.lock")).acquire(timeout=LOCK_TIMEOUT))
        known = StoreWriter.recipe_of(writer.path, Recipe)
        whole = writer.is_whole
        # Complete rows are taken as they are, in whichever precision this machine would draw them.
        shaped_by = {"pairs": rows, "steps": "steps", "points": "points", "guidance_scale": "guidance", "seed": "seed"}
        shaped_by |= {"pictures": "pictures", "solver": "solver"} | ({} if whole else {"precision": "precision"})
        for name, called in shaped_by.items() if known is not None else ():
            then, now = getattr(known, name), getattr(recipe, name)
            require(
                then == now,
                f"the {rows} in {writer.path} were drawn with other {called} ({then} there, {now} now): choose another "
                f"--output_dir, or --{folder_flag}",
            )
        if whole:
            return None
        require(
            known is None or known.teacher in ("", recipe.teacher),
            f"{request.source} has changed since it drew the first {rows}: remove {writer.stage}, or choose another "
            f"--{folder_flag}",
        )
        return writer.begin(asdict(recipe))
    except Timeout as error:
        raise UsageError(
            f"another run draws the {rows} {writer.path}: wait for its end, or choose another --output_dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the {rows} {writer.path} cannot be written: {reason}; choose a --{folder_flag}") from error


class _Drawing:
    """Draws what a request asks for."""

    def __init__(
        self,
        request: Request,
        recipe: Recipe,
        state: PartialState,
        writer: StoreWriter,
        pictures: ImageDataset,
    ) -> None:
        self.request, self.recipe, self.state, self.writer, self.pictures = request, recipe, state, writer, pictures
        self.bf16 = recipe.precision == "bf16"
        self.teacher = to_device(
            RectifiedFlow.from_checkpoint(request.source), state.device, "bf16" if self.bf16 else "no"
        )
        labels = self.teacher.conditions.get("labels")
        require(
            not isinstance(labels, Labels) or list(labels.names) == pictures.class_names,
            f"{request.source} was trained on different classes than {pictures.info.source}; pass its training images "
            "with --dataset_path",
        )

    def draw(self, done: int) -> None:
        """Draw all from number ``done`` on."""
        fill(self.writer, self.state, done, self._rows, doing="drawing", batch_size=BATCH_SIZE)

    def finish(self) -> None:
        """Give the store its name."""
        labels, names = np.full(self.writer.length, -1), list[str]()
        if self._labels is not None:
            labels, names = self._labels.numpy(), self.pictures.class_names
        source, side = f"{self.request.rows} of {self.request.source}", self.pictures.info.image_size
        try:
            self.writer.finish(labels, source=source, image_size=side, class_names=names)
        except OSError as error:
            raise no_room(self.writer, error) from error

    def _rows(self, numbers: Sequence[int]) -> Mapping[str, Tensor]:
        device, space = self.state.device, self.teacher.space
        bf16 = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        path: list[Tensor] = []
        with randomness.deterministic(randomness.Samples(self.recipe.seed, numbers), device), bf16:
            shape = (len(numbers), *(space.shape or ()))
            noise = randomness.randn("sample noise", shape, device).half().float()  # as it is stored
            given: dict[str, Any] = {} if self._labels is None else {"labels": self._labels[list(numbers)]}
            x = self.teacher.sample(
                noise=noise,
                steps=self.recipe.steps,
                solver=self.request.solver,
                guidance=Guidance(self.recipe.guidance_scale),
                watch=lambda _t, x: path.append(x.half().cpu()),
                decode=False,
                **given,
            )
        points = torch.stack(path[:-1], dim=1) if self.request.rows == "paths" else path[0]
        return dict(zip(self.writer.rows, (space.to_stored(x), points), strict=True))

    @cached_property
    def _labels(self) -> Tensor | None:
        """A label for each row, in the shares of the training pictures."""
        if "labels" not in self.teacher.conditions:
            return None
        source = randomness.generator("cpu", self.recipe.seed, "labels of pairs")
        rows = torch.randint(len(self.pictures), (self.writer.length,), generator=source)
        return self.pictures.condition_values(rows.tolist())["labels"]
