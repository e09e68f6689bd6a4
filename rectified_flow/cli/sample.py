"""sample.py: numbered samples of a trained flow, shared between processes."""

import difflib
import inspect
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from filelock import Timeout
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.cli.parts import join
from rectified_flow.cli.run_flags import SampleConfig
from rectified_flow.cli.train_flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.data.framing import Framing
from rectified_flow.data.image_folder import find_images
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_shared
from rectified_flow.errors import RunError, UsageError, first_line, require
from rectified_flow.flags import plain
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.hub import card_of_run, save_pretrained
from rectified_flow.load import autocast, load_average, load_trained, solver_name, solver_options
from rectified_flow.registry import describe as description_of
from rectified_flow.runs.folder import STATUS_FILE
from rectified_flow.runs.snapshots import intact_snapshots
from rectified_flow.spaces.pixels import RGBA
from rectified_flow.system.artifact import MANIFEST
from rectified_flow.system.files import locked, prepare_folder, replace_file
from rectified_flow.system.machine import require_disk
from rectified_flow.system.pictures import fit, open_picture, over_white, to_grid, write_motion, write_picture
from rectified_flow.system.signals import interruptible
from rectified_flow.system.terminal import line, lines, progress_bar

LOCK_FILE = ".sample.lock"
GRID_PICTURES = 100
NOISE_LEVEL = 0.6
PATH_PICTURES = 8
PATH_STOPS = 9
BLOCK = 4096
"""Least size of a file on disk [bytes]."""


@dataclass(frozen=True)
class Plan:
    """A model and the options of its samples."""

    flow: Flow
    source: Path
    weights: str
    """Which of the checkpoint's, in words."""
    output_dir: Path
    classes: Sequence[int]
    start: Tensor | None
    options: dict[str, Any]
    card: dict[str, Any]
    """What the model's card says of its run, if the model is saved."""

    def draw(self, numbers: Sequence[int], config: SampleConfig, **more: Any) -> Any:
        """Return the images with these numbers, as :func:`sample_batches` yields them."""
        return sample_batches(
            self.flow,
            numbers,
            seed=config.pictures.seed,
            batch_size=config.model.batch_size,
            conditions={"labels": torch.tensor(self.classes)} if self.classes else None,
            start=self.start,
            **self.options,
            **more,
        )


def sample(config: SampleConfig) -> None:
    """Sample this process's share of the images, and write a grid on the main process.

    Raises:
        UsageError: if the checkpoint, the classes or the pictures to start from do not exist, or do not fit.
        RunError: if a picture cannot be written.
    """
    state = join(config)
    set_seed(config.pictures.seed)
    with ExitStack() as held:
        _draw_pictures(config, prepare(config, state, held), state)


def _draw_pictures(config: SampleConfig, plan: Plan, state: PartialState) -> None:
    count = config.pictures.num_samples
    report: Callable[[str], object] = tqdm.write if state.is_main_process else lambda _line: None
    report(describe(config, plan, state))
    rows = 0

    def count_rows(_network: object, arguments: tuple[Tensor, ...], _output: object) -> None:
        nonlocal rows
        rows += len(arguments[0])

    mine = range(state.process_index, count, state.num_processes)
    with (
        plan.flow.network.register_forward_hook(count_rows),
        interruptible(plan.flow),
        autocast(config.model.mixed_precision, state.device),
        progress_bar(total=len(mine), unit="img", disable=not state.is_main_process) as bar,
    ):
        for numbers, pictures in plan.draw(mine, config, with_alpha=True):
            for number, picture in zip(numbers, pictures.cpu(), strict=True):
                write_picture(plan.output_dir / picture_name(number, count), picture.permute(1, 2, 0).numpy())
            bar.update(len(numbers))
        state.wait_for_everyone()
        if not state.is_main_process:
            return
        report(line("calls", f"{rows / len(mine):g} of the network for each picture"))
        if config.pictures.path != "none":
            report(line("path", _draw_path(config, plan)))
    grid = _draw_grid(plan.output_dir, count)
    report(line("grid", grid))
    first, last = (picture_name(number, count) for number in (0, count - 1))
    report(line("pictures", f"{plan.output_dir}/{first} to {last}"))
    if config.pictures.save_pretrained is not None:
        _save_model(plan, config.pictures.save_pretrained, grid)
        report(line("model", config.pictures.save_pretrained))


def prepare(config: SampleConfig, state: PartialState, held: ExitStack) -> Plan:
    """Load the model, check the flags against it, and lock others out of the output folder while ``held`` is open.

    Raises:
        UsageError: if they do not fit, or the folder cannot be written or has other pictures.
    """
    flags = config.pictures
    model = config.model
    trained = load_trained(model.checkpoint, state, autoencoder=model.autoencoder, precision=model.mixed_precision)
    flow, source = trained.flow, trained.source
    if flags.ema_length is not None:
        load_average(flow, on_main(state, lambda: intact_snapshots(source, tqdm.write)), flags.ema_length)
    options = solver_options(flow, source, **vars(config.solver))
    options["steps"] = flags.steps or flow.default_steps
    classes = _find_classes(flags.classes, flow, source)
    start = None
    accepted = inspect.signature(flow.sample).parameters
    require(flags.path == "none" or "watch" in accepted, f"--path has no effect: a {type(flow).__name__} has no path")
    if flags.from_images is not None:
        if "start" not in accepted or flow.space.picture_shape is None:
            raise UsageError(
                f"--from_images is for flows of pictures: {source} holds a {type(flow).__name__} of other data"
            )
        start = _load_images(flags.from_images, flags.num_samples, flow, flow.space.picture_shape)
        options["noise_level"] = flags.noise_level or NOISE_LEVEL
    weights, card = trained.weights_name(flags.ema_length), {}
    if flags.save_pretrained is not None:
        description_of(flow)  # fails before any sampling if a part is not registered
        taken = [name for name in (MANIFEST, STATUS_FILE) if (flags.save_pretrained / name).exists()]
        require(
            not taken,
            f"--save_pretrained {flags.save_pretrained} holds a run or a checkpoint, whose files it would overwrite: "
            "choose a folder of its own",
        )
        prepare_folder("save_pretrained", flags.save_pretrained)
        is_map = isinstance(flow, FlowMap)
        program, defaults = ("train_mean_flow.py", TrainMeanFlow) if is_map else ("train_oxford.py", TrainRectifiedFlow)
        card = card_of_run(trained, flags.license, weights, program, plain(defaults()))
    output_dir = flags.output_dir or trained.run_folder / "generated"
    on_main(state, lambda: _claim(output_dir, flags.num_samples, held))
    check_shared(state, {"output_dir": output_dir})
    return Plan(flow, source, weights, output_dir, classes, start, options, card)


def _claim(folder: Path, count: int, held: ExitStack) -> None:
    """Make the output folder, lock others out, and check that ``count`` pictures fit and will be the only ones."""
    prepare_folder("output_dir", folder)
    try:
        held.enter_context(locked(folder / LOCK_FILE, 0, tqdm.write))
    except Timeout:
        raise UsageError(
            f"another process draws pictures into --output_dir {folder}: wait for its end, or choose another folder"
        ) from None
    what = f"--num_samples {count}"
    require_disk(count * BLOCK, folder, what, "draw fewer, or pass an --output_dir with more room")
    new = {picture_name(number, count) for number in range(count)}
    stale = [file for file in folder.glob("*.png") if file.stem.isdecimal() and file.name not in new]
    require(
        not stale,
        f"--output_dir {folder} holds {_count(stale)} of an earlier call that would stay among the new ones: "
        "move them away, or choose another folder",
    )


def describe(config: SampleConfig, plan: Plan, state: PartialState) -> str:
    """Lines on the model, the solver and the pictures."""
    flow, names = plan.flow, plan.flow.class_names
    parameters = sum(p.numel() for p in flow.parameters()) / 1e6
    steps = plan.options["steps"]
    solver = "average velocity" if hasattr(flow, "average_velocity") else solver_name(flow, plan.options)
    intervals = [
        f"{steps} interval{'s' * (steps > 1)}",
        *([solver] if solver else []),
        f"{config.solver.time_grid} grid",
    ]
    texts = {
        "model": f"{type(flow).__name__}, {parameters:.1f} M parameters, {plan.weights} of {plan.source}",
        "processes": f"{state.num_processes} x {state.device.type}",
        "solver": solver if solver == "adaptive" else ", ".join(intervals),
        "pictures": f"{config.pictures.num_samples} of {flow.space.noun}, seed {config.pictures.seed}",
    }
    if plan.classes:
        shown = [names[label] for label in plan.classes[:6]]
        texts["classes"] = ", ".join(shown) + ", ..." * (len(plan.classes) > len(shown))
    if plan.start is not None:
        level = plan.options["noise_level"]
        texts["start"] = f"{_count(plan.start)} of {config.pictures.from_images}, noise level {level:g}"
    return lines(texts)


def _count(pictures: Sized) -> str:
    return f"{len(pictures)} picture{'s' * (len(pictures) > 1)}"


def _find_classes(given: str | None, flow: Flow, source: Path) -> list[int]:
    names = flow.class_names
    require(
        given is None or len(names) > 0,
        f"--classes: {source} was trained without labels; train with --use_cfg for them",
    )
    if given is None:
        return []
    if given.strip() == "all":
        return list(range(len(names)))
    return [_find_class(name.strip(), names) for name in given.split(",")]


def _find_class(name: str, names: list[str]) -> int:
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    close = difflib.get_close_matches(name, names, 3, cutoff=0.5)
    hint = f" (perhaps {' or '.join(close)}?)" if close else f", like {', '.join(names[:3])}"
    raise UsageError(f"--classes: there is no class {name}: pass names{hint}, or numbers up to {len(names) - 1}")


def _load_images(path: Path, count: int, flow: Flow, shape: Sequence[int]) -> Tensor:
    files = [path] if path.is_file() else find_images(path) if path.is_dir() else []
    require(len(files) > 0, f"--from_images {path} is no picture and no folder with pictures")
    channels, height, width = shape
    framing = Framing(width, height, alpha=channels == RGBA)
    pictures = []
    for file in files[:count]:
        try:
            with open_picture(file) as image:
                pictures.append(np.asarray(fit(image, framing.stored_size, alpha=framing.alpha)).transpose(2, 0, 1))
        except Exception as error:  # every decoder fails in its own way
            raise UsageError(f"--from_images: {file} cannot be read ({first_line(error)})") from error
    return flow.space.from_pictures(torch.from_numpy(np.stack(pictures)).to(flow.device)).cpu()


def picture_name(number: int, count: int) -> str:
    """Return the file name of a sample, with as many digits as ``count`` samples need."""
    return f"{number:0{max(5, len(str(count - 1)))}d}.png"


def _save_model(plan: Plan, folder: Path, grid: Path) -> None:
    try:
        replace_file(folder / "grid.png", grid.read_bytes())
        save_pretrained(plan.flow, folder, grid="grid.png", **plan.card)
    except OSError as error:
        raise RunError(f"could not write the model into --save_pretrained {folder} ({error})") from error


def _draw_grid(folder: Path, count: int) -> Path:
    """Write a grid of the first samples, read back, as other processes wrote most of them."""
    files = [folder / picture_name(number, count) for number in range(min(count, GRID_PICTURES))]
    pictures = torch.from_numpy(np.stack([np.asarray(over_white(open_picture(file))) for file in files]))
    return write_picture(folder / "grid.png", to_grid(pictures.permute(0, 3, 1, 2)))


def _draw_path(config: SampleConfig, plan: Plan) -> Path:
    """Write the sampling trajectories of the first samples: a row each, or an animation."""
    frames: list[Tensor] = []
    space = plan.flow.space

    def watch(_t: float, x: Tensor) -> None:
        frames.append(space.render(space.decode(x)).cpu())

    list(plan.draw(range(min(PATH_PICTURES, config.pictures.num_samples)), config, watch=watch))
    if config.pictures.path == "gif":
        pauses = [80] * (len(frames) - 1) + [1500]
        return write_motion(plan.output_dir / "path.gif", [to_grid(frame) for frame in frames], pauses)
    stops = sorted({round(i * (len(frames) - 1) / (PATH_STOPS - 1)) for i in range(PATH_STOPS)})
    strip = torch.stack([frames[stop] for stop in stops], dim=1)
    return write_picture(plan.output_dir / "path.png", to_grid(strip.flatten(0, 1), columns=len(stops)))
