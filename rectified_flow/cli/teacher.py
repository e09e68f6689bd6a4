"""What a flow generated, with the noise of each row, or its path from the noise on."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from filelock import Timeout
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.cli.train_flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.condition import Labels
from rectified_flow.data.store import NOISE_FILE, ImageDataset, StoreDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.fill import fill, no_room
from rectified_flow.errors import DamageError, UsageError, require
from rectified_flow.flags import checked, command_line, plain
from rectified_flow.flows import Solver
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.networks.unet import to_device
from rectified_flow.registry import build, describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import program_flags, read_config
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import lock_of, prepare_folder
from rectified_flow.system.signals import interruptible
from rectified_flow.training.accelerator import choose_precision

PATH_FILE = "path.float16"


class PairDataset(StoreDataset):
    """The pairs or paths of a store.

    Items have what a flow generated, as its space stores it, and its ``noise``, float16 of the shape of ``x``, or its
    ``path``, float16 ``[points, ...]``: all points but the last, the noise first.
    """

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = super().read_batch(indices)
        if len(self.info.shapes.get(NOISE_FILE, ())) > 3 and not self.info.rows:  # an earlier version's name
            batch["path"] = batch.pop("noise")
        return batch


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
        with interruptible(self.teacher):
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


DEFAULT_PAIRS, DEFAULT_PATHS, DEFAULT_PATH_STEPS = 50_000, 5_000, 16
Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)


def request_of(config: TrainRectifiedFlow | TrainMeanFlow) -> Request | None:
    """What the flags ask of a teacher; None if they name none."""
    return _pairs_of(config) if isinstance(config, TrainRectifiedFlow) else _paths_of(config)


def _pairs_of(config: TrainRectifiedFlow) -> Request | None:
    flags = config.reflow
    if flags.reflow_from is None:
        return None
    return Request(
        flag="reflow_from",
        source=flags.reflow_from,
        rows="pairs",
        count=flags.reflow_pairs or DEFAULT_PAIRS,
        folder=flags.pairs_dir or config.run.output_dir / "pairs",
        steps=flags.reflow_steps or RectifiedFlow.default_steps,
    )


def _paths_of(config: TrainMeanFlow) -> Request | None:
    flags = config.teacher
    if flags.teacher is None:
        return None
    return Request(
        flag="teacher",
        source=flags.teacher,
        rows="paths",
        count=flags.teacher_paths or DEFAULT_PATHS,
        folder=flags.paths_dir or config.run.output_dir / "paths",
        steps=flags.teacher_steps or DEFAULT_PATH_STEPS,
        solver="euler",  # for as many calls, twice the points of midpoint
        guidance_scale=config.mean_flow.guidance_scale,
    )


def with_teacher_flags(config: Config) -> Config:
    """The flags of a run that learns from a teacher: data and network are those of the teacher's checkpoint.

    Raises:
        UsageError: if there is no such checkpoint, or what the run has drawn is of another one.
    """
    request = request_of(config)
    if request is None:
        return config
    source, flags = on_main(PartialState(), lambda: _find_source(config, request))
    _refuse_other_flags(config, request, flags)
    data = {name: flags[name] for name in DATA_FLAGS}
    data |= {name: getattr(config.data, name) or flags[name] for name in FOLDERS}
    network = {name: flags[name] for name in NETWORK_FLAGS}
    changes: dict[str, Any] = {"data": replace(config.data, **data), "network": replace(config.network, **network)}
    if isinstance(config, TrainRectifiedFlow):
        changes["rectified_flow"] = replace(config.rectified_flow, prediction=flags["prediction"])
        changes["reflow"] = replace(config.reflow, reflow_from=source)
        return replace(config, **changes)
    require(
        flags["prediction"] == "velocity",
        f"--teacher {source} predicts the {flags['prediction']}, and a mean flow starts from weights that predict the "
        "velocity: pass a run with --prediction velocity",
    )
    require(
        network["use_cfg"] or config.mean_flow.guidance_scale == 1,
        f"--guidance_scale needs a teacher with labels: {source} was trained without --use_cfg",
    )
    return replace(config, **changes, teacher=replace(config.teacher, teacher=source))


def _find_source(config: TrainRectifiedFlow | TrainMeanFlow, request: Request) -> tuple[Path, dict[str, Any]]:
    """The teacher's checkpoint, and the flags that come with it; of rows that are drawn, those of their recipe."""
    _refuse_other_run(config, request)
    known = StoreWriter.recipe_of(request.folder, Recipe)
    if known is not None:
        source = Path(known.source)
        require(
            source.resolve().is_relative_to(request.source.resolve()),
            f"{request.folder} holds {request.rows} of {source}: choose another --output_dir for {request.source}",
        )
        require(
            checkpoint.fingerprint(source) != checkpoint.MISSING
            or bool(checkpoint.list_checkpoints(config.run.checkpoints)),
            f"{source} is gone, which draws the {request.rows} in {request.folder} and whose weights the run starts "
            f"from: remove {' and '.join(map(str, StoreWriter.folders_of(request.folder)))} to begin with another",
        )
        return source, _inherited(known.flags, request, request.folder)
    return checkpoint.read(request.source, lambda source: (source, _inherited(_flags_of(source), request, source)))


def _refuse_other_run(config: TrainRectifiedFlow | TrainMeanFlow, request: Request) -> None:
    """Refuse the folder of a run without a teacher, such as that of the teacher itself, before anything is drawn."""
    folder = config.run.checkpoints
    for newest in checkpoint.list_checkpoints(folder)[-1:]:
        with suppress(DamageError):  # of which the run itself will say more
            require(
                _flags_of(newest).get(request.flag) is not None,
                f"{folder} holds checkpoints of a run without --{request.flag}: choose another --output_dir",
            )


def _refuse_other_flags(config: TrainRectifiedFlow | TrainMeanFlow, request: Request, flags: Mapping[str, Any]) -> None:
    """Refuse a flag of the command line that the teacher determines otherwise; a file has flags of another run."""
    mine = {name: getattr(config.data, name) for name in DATA_FLAGS}
    mine |= {name: getattr(config.network, name) for name in NETWORK_FLAGS}
    mine |= {"prediction": config.rectified_flow.prediction} if isinstance(config, TrainRectifiedFlow) else {}
    given = config.program.given if config.program.config is None else frozenset()
    for name, value in mine.items():
        words = " ".join(command_line({name: flags[name]}))
        require(
            name not in given or value == flags[name],
            f"--{name} has no effect with --{request.flag}: the run inherits {words} of {request.source}; leave it out",
        )


def _flags_of(source: Path) -> dict[str, Any]:
    path = source / checkpoint.CONFIG_FILE
    return program_flags(read_config(path)) if path.exists() else {}


def _inherited(flags: Mapping[str, Any], request: Request, source: Path) -> dict[str, Any]:
    """Those of the flags of ``source`` that a run takes over."""
    flags = {"autoencoder": None, **FRAMING} | dict(flags)  # which earlier versions did not have
    names = ", ".join(name for name in INHERITED if name not in flags)
    require(not names, f"--{request.flag} {source} was not trained by train_oxford.py: it lacks the flags {names}")
    return checked(TrainRectifiedFlow, {name: flags[name] for name in INHERITED}, source)
