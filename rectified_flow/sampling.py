"""What sample.py does: numbered pictures of a trained flow, each process drawing its share."""

import difflib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.averages import LONGEST, SHORTEST
from rectified_flow.data.image_folder import find_images
from rectified_flow.data.store_builder import fit
from rectified_flow.errors import RunError, UsageError, first_line, require, require_positive
from rectified_flow.flows import Flow, MeanFlow
from rectified_flow.flows.drawing import draw
from rectified_flow.flows.images import to_grid, to_unit, write_picture
from rectified_flow.processes.joining import join_processes
from rectified_flow.progress import progress_bar
from rectified_flow.trained import (
    ModelFlags,
    PrecisionFlags,
    SolverFlags,
    autocast,
    check_common,
    load_average,
    load_flow,
    prepare_folder,
    run_folder_of,
    solver_options,
    weights_of,
)

GRID_PICTURES = 100
NOISE_LEVEL = 0.6
PATH_PICTURES = 8
PATH_STOPS = 9


@dataclass(frozen=True)
class PictureFlags:
    num_samples: int = 64
    """How many to draw; picture 5 of a seed stays the same however many there are (but by --solver adaptive)."""
    steps: int | None = None
    """Intervals from noise to picture (default: 16 for a rectified flow, 1 for a mean flow)."""
    classes: str | None = None
    """Names or numbers of classes, separated by commas, that take turns; or all (default: drawn for each picture)."""
    seed: int = 0
    """Of the noise, and all else that is drawn."""
    ema_length: float | None = None
    """Instead of the averaged weights, a power-function average of this length, as a share of the run; --power_ema."""
    from_images: Path | None = None
    """A picture, or a folder of them, to start from instead of noise alone; they take turns."""
    noise_level: float | None = None
    """How far towards noise those are taken first, from 0, where they stay as they are, to 1 (default: 0.6)."""


@dataclass(frozen=True)
class OutputFlags:
    output_dir: Path | None = None
    """Where the pictures go (default: generated, in the run's folder)."""
    path: Literal["none", "strip", "gif"] = "none"
    """Also show how the first pictures come out of the noise."""
    save_pretrained: Path | None = None
    """Also write the model into this folder, with a card, ready for the Hugging Face hub."""


@dataclass(frozen=True)
class SampleConfig(OutputFlags, PrecisionFlags, SolverFlags, PictureFlags, ModelFlags):
    """A call of sample.py.

    Raises:
        UsageError: where a value makes no sense.
    """

    def __post_init__(self) -> None:
        for name in ("num_samples", "steps"):
            require_positive(self, name)
        check_common(self)
        require(
            self.ema_length is None or SHORTEST <= self.ema_length <= LONGEST,
            f"--ema_length is {self.ema_length}; it must be from {SHORTEST} to {LONGEST}",
        )
        level = self.noise_level
        require(level is None or 0 < level <= 1, f"--noise_level is {level}; it must be above 0 and at most 1")
        require(level is None or self.from_images is not None, "--noise_level is that of --from_images: name some")


@dataclass(frozen=True)
class Plan:
    """A model, and all it takes to draw its pictures."""

    flow: Flow
    source: Path
    output_dir: Path
    classes: Sequence[int]
    images: Tensor | None
    how: dict[str, Any]

    def draw(self, numbers: Sequence[int], config: SampleConfig, **more: Any) -> Any:
        """The pictures with these numbers, as :func:`draw` yields them."""
        return draw(
            self.flow,
            numbers,
            seed=config.seed,
            batch_size=config.batch_size,
            classes=self.classes,
            images=self.images,
            **self.how,
            **more,
        )


def sample(config: SampleConfig) -> None:
    """Draw this process's share of the pictures, and on the main process what shows them together.

    Raises:
        UsageError: if the checkpoint, the classes or the pictures to start from are not there, or do not fit.
        RunError: if a picture cannot be written.
    """
    state = join_processes()
    plan = prepare(config, state)
    flow = plan.flow
    say: Callable[[str], object] = tqdm.write if state.is_main_process else lambda _line: None
    say(describe(config, plan, state))
    rows = 0

    def count(_network: object, arguments: tuple[Tensor, ...], _output: object) -> None:
        nonlocal rows
        rows += len(arguments[0])

    mine = range(state.process_index, config.num_samples, state.num_processes)
    with (
        flow.network.register_forward_hook(count),
        autocast(config, state.device),
        progress_bar(total=len(mine), unit="img", disable=not state.is_main_process) as bar,
    ):
        for numbers, pictures in plan.draw(mine, config):
            for number, picture in zip(numbers, pictures.cpu(), strict=True):
                write_picture(
                    plan.output_dir / picture_name(number, config.num_samples), picture.permute(1, 2, 0).numpy()
                )
            bar.update(len(numbers))
        state.wait_for_everyone()
        if not state.is_main_process:
            return
        say(f"{'calls':<11} {rows / len(mine):g} of the network for each picture")
        if config.path != "none":
            say(f"{'path':<11} {_draw_path(config, plan)}")
    grid = _draw_grid(plan.output_dir, config.num_samples)
    say(f"{'grid':<11} {grid}")
    first, last = (picture_name(number, config.num_samples) for number in (0, config.num_samples - 1))
    say(f"{'pictures':<11} {plan.output_dir}/{first} to {last}")
    if config.save_pretrained is not None:
        _save_model(flow, config.save_pretrained, grid)
        say(f"{'model':<11} {config.save_pretrained}")


def prepare(config: SampleConfig, state: PartialState) -> Plan:
    """Load the model and see that what is asked of it makes sense.

    Raises:
        UsageError: if it does not.
    """
    flow, source = load_flow(config, config.mixed_precision, state)
    if config.ema_length is not None:
        load_average(flow, source, config.ema_length)
    how = solver_options(config, flow, source)
    if config.steps is not None:
        how["steps"] = config.steps
    classes = _find_classes(config, flow, source)
    images = None
    if config.from_images is not None:
        images = _load_images(config.from_images, config.num_samples, flow)
        how["noise_level"] = config.noise_level or NOISE_LEVEL
    if config.save_pretrained is not None:
        prepare_folder("save_pretrained", config.save_pretrained)
    output_dir = prepare_folder("output_dir", config.output_dir or run_folder_of(source) / "generated")
    new = {picture_name(number, config.num_samples) for number in range(config.num_samples)}
    stale = [file for file in output_dir.glob("*.png") if file.stem.isdecimal() and file.name not in new]
    require(
        not stale,
        f"--output_dir {output_dir} holds {_count(stale)} of an earlier call that would stay among the new ones: "
        "move them away, or choose another folder",
    )
    return Plan(flow, source, output_dir, classes, images, how)


def describe(config: SampleConfig, plan: Plan, state: PartialState) -> str:
    """Lines on what is drawn, from what and how."""
    flow, names = plan.flow, plan.flow.class_names
    parameters = sum(p.numel() for p in flow.parameters()) / 1e6
    steps = plan.how.get("steps", flow.default_steps)
    means = "average velocity" if isinstance(flow, MeanFlow) else plan.how.get("solver", "midpoint")
    weights = weights_of(plan.source, config.ema_length)
    shown = [names[label] if names else str(label) for label in plan.classes[:6]]
    lines = {
        "model": f"{type(flow).__name__}, {parameters:.1f} M parameters, {weights} of {plan.source}",
        "processes": f"{state.num_processes} x {state.device.type}",
        "solver": means
        if means == "adaptive"
        else f"{steps} interval{'s' * (steps > 1)}, {means}, {config.time_grid} grid",
        "pictures": f"{config.num_samples} of {(flow.image_shape or [0])[-1]} px, seed {config.seed}",
    }
    if shown:
        lines["classes"] = ", ".join(shown) + ", ..." * (len(plan.classes) > len(shown))
    if plan.images is not None:
        lines["start"] = f"{_count(plan.images)} of {config.from_images}, noise level {plan.how['noise_level']:g}"
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def _count(pictures: Sized) -> str:
    return f"{len(pictures)} picture{'s' * (len(pictures) > 1)}"


def _find_classes(config: SampleConfig, flow: Flow, source: Path) -> list[int]:
    if flow.num_classes is None:
        require(
            config.classes is None, f"--classes: {source} was trained without labels; train with --use_cfg for them"
        )
        return []
    if config.classes is None:
        return []
    if config.classes.strip() == "all":
        return list(range(flow.num_classes))
    return [_find_class(name.strip(), flow) for name in config.classes.split(",")]


def _find_class(name: str, flow: Flow) -> int:
    names, count = flow.class_names, flow.num_classes or 0
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < count:
        return int(name)
    close = difflib.get_close_matches(name, names, 3, cutoff=0.5)
    hint = f" (perhaps {' or '.join(close)}?)" if close else f", like {', '.join(names[:3])}" if names else ""
    raise UsageError(f"--classes: there is no class {name}: take names{hint}, or numbers up to {count - 1}")


def _load_images(path: Path, count: int, flow: Flow) -> Tensor:
    files = [path] if path.is_file() else find_images(path) if path.is_dir() else []
    require(len(files) > 0, f"--from_images {path} is no picture and no folder with pictures")
    side = (flow.image_shape or [0])[-1]
    pictures = []
    for file in files[:count]:
        try:
            with Image.open(file) as image:
                pictures.append(np.asarray(fit(image, side)).transpose(2, 0, 1))
        except Exception as error:  # every decoder fails in its own way
            raise UsageError(f"--from_images: {file} cannot be read ({first_line(error)})") from error
    return torch.from_numpy(np.stack(pictures))


def picture_name(number: int, count: int) -> str:
    """The file of a picture, with as many digits as ``count`` of them need."""
    return f"{number:0{max(5, len(str(count - 1)))}d}.png"


def _save_model(flow: Flow, folder: Path, grid: Path) -> None:
    try:
        (folder / "grid.png").write_bytes(grid.read_bytes())
        flow.save_pretrained(folder, model_card_kwargs={"grid": "grid.png"})
    except OSError as error:
        raise RunError(f"could not write the model into --save_pretrained {folder} ({error})") from error


def _draw_grid(folder: Path, count: int) -> Path:
    """The first pictures in one, read back, for other processes drew most of them."""
    files = [folder / picture_name(number, count) for number in range(min(count, GRID_PICTURES))]
    pictures = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))
    return write_picture(folder / "grid.png", to_grid(pictures.permute(0, 3, 1, 2)))


def _draw_path(config: SampleConfig, plan: Plan) -> Path:
    """The first pictures on their way out of the noise: a row each, or in motion."""
    frames: list[Tensor] = []

    def watch(_t: float, x: Tensor) -> None:
        frames.append(to_unit(x).mul(255).round().to(torch.uint8).cpu())

    list(plan.draw(range(min(PATH_PICTURES, config.num_samples)), config, watch=watch))
    if config.path == "gif":
        first, *rest = [Image.fromarray(to_grid(frame)) for frame in frames]
        pauses = [80] * len(rest) + [1500]
        motion = {"save_all": True, "append_images": rest, "duration": pauses, "loop": 0}
        return write_picture(plan.output_dir / "path.gif", np.asarray(first), **motion)
    stops = sorted({round(i * (len(frames) - 1) / (PATH_STOPS - 1)) for i in range(PATH_STOPS)})
    strip = torch.stack([frames[stop] for stop in stops], dim=1)
    return write_picture(plan.output_dir / "path.png", to_grid(strip.flatten(0, 1), columns=len(stops)))
