"""sample.py: numbered samples of a trained flow, shared between processes."""

import difflib
import inspect
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from tqdm.auto import tqdm

from rectified_flow.cli.parts import open_trained
from rectified_flow.cli.run_flags import PicturesConfig, SampleConfig
from rectified_flow.cli.train_flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.data.image_folder import find_images
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_shared
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flags import plain
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.hub import card_of_run, claim_model, save_pretrained
from rectified_flow.load import Trained, autocast, load_average, solver_name
from rectified_flow.runs.folder import is_run
from rectified_flow.runs.snapshots import intact_snapshots
from rectified_flow.spaces.pixels import RGBA
from rectified_flow.system.files import locked, prepare_folder, replace_file, writing
from rectified_flow.system.machine import require_disk
from rectified_flow.system.outputs import claim, write_output
from rectified_flow.system.pictures import (
    encode_picture,
    fit,
    open_picture,
    over_white,
    to_grid,
    write_motion,
    write_picture,
)
from rectified_flow.system.signals import interruptible
from rectified_flow.system.terminal import lines, progress_bar

LOCK_FILE = ".sample.lock"
GRID_PICTURES = 100
NOISE_LEVEL = 0.6
PATH_PICTURES = 8
PATH_STOPS = 9
BLOCK = 4096
"""Least size of a file on disk [bytes]."""


def sample(config: SampleConfig) -> None:
    """Sample this process's share of the images, and write a grid on the main process.

    Raises:
        UsageError: if the checkpoint, the classes or the pictures to start from do not exist, or do not fit; if the
            folder cannot be written or has other pictures.
        RunError: if a picture cannot be written.
    """
    flags = config.samples
    state, trained, options = open_trained(config)
    if flags.ema_length is not None:
        snapshots = on_main(state, lambda: intact_snapshots(trained.source))
        trained = load_average(trained, snapshots, flags.ema_length)
    options |= {"seed": flags.seed, "batch_size": config.model.batch_size} | _choose_options(flags, trained)
    card = {}
    if flags.save_pretrained is not None:
        is_map = isinstance(trained.flow, FlowMap)
        program, kind = ("train_one_step.py", TrainMeanFlow) if is_map else ("train_oxford.py", TrainRectifiedFlow)
        card = card_of_run(trained, flags.license, program, plain(kind()))
    folder = flags.output_dir or trained.run_folder / "generated"
    with ExitStack() as held:
        place = folder if flags.output_dir else trained.run_folder
        on_main(state, lambda: _claim(folder, flags, held, ours=is_run(place)))
        check_shared(state, {"output_dir": folder})
        if state.is_main_process:
            tqdm.write(describe(config, trained, options, state))
        _write_samples(config, trained.flow, options, card, folder, state)


def _write_samples(
    config: SampleConfig, flow: Flow, options: dict[str, Any], card: dict[str, Any], folder: Path, state: PartialState
) -> None:
    """Write this process's samples; the main process also writes the grid, the trajectories and the model."""
    flags = config.samples
    remedy = "lower it, or pass an --output_dir with more room"
    require_disk(flags.num_samples * BLOCK, folder, f"--num_samples {flags.num_samples}", remedy)
    files = _files_of(folder, flags.num_samples)
    mine = range(state.process_index, flags.num_samples, state.num_processes)
    rows: list[int] = []
    with (
        flow.network.register_forward_hook(lambda _network, arguments, _output: rows.append(len(arguments[0]))),
        interruptible(flow),
        autocast(config.model.mixed_precision, state.device),
        progress_bar(total=len(mine), unit="img", disable=not state.is_main_process) as bar,
    ):
        for numbers, pictures in sample_batches(flow, mine, with_alpha=True, **options):
            for number, picture in zip(numbers, pictures.cpu(), strict=True):
                # The names are already claimed: write_picture would read the record again for each picture.
                with writing(files[number]):
                    replace_file(files[number], encode_picture(picture.permute(1, 2, 0).numpy()), durable=False)
            bar.update(len(numbers))
        state.wait_for_everyone()
        if not state.is_main_process:
            return
        texts: dict[str, object] = {"calls": f"{sum(rows) / len(mine):g} of the network for each picture"}
        if flags.path != "none":
            texts["path"] = _write_path(folder, flow, range(min(PATH_PICTURES, flags.num_samples)), options, flags.path)
    # Other processes wrote most of the samples, so the grid reads them back.
    shown = [pil_to_tensor(over_white(open_picture(file))) for file in files[:GRID_PICTURES]]
    grid = write_picture(folder / "grid.png", to_grid(torch.stack(shown)))
    texts |= {"grid": grid, "pictures": f"{files[0]} to {files[-1].name}"}
    if flags.save_pretrained is not None:
        with writing(f"the model in --save_pretrained {flags.save_pretrained}"):
            write_output(flags.save_pretrained / "grid.png", grid.read_bytes())
            save_pretrained(flow, flags.save_pretrained, grid="grid.png", **card)
        texts["model"] = flags.save_pretrained
    tqdm.write(lines(texts))


def _choose_options(flags: PicturesConfig, trained: Trained) -> dict[str, Any]:
    """Return the arguments of :func:`sample_batches` for the flags of the pictures."""
    flow, source = trained.flow, trained.source
    accepted = inspect.signature(flow.sample).parameters
    options: dict[str, Any] = {"steps": flags.steps or flow.default_steps}
    if flags.classes is not None:
        options["conditions"] = {"labels": torch.tensor(_find_classes(flags.classes, flow.class_names, source))}
    if flags.path != "none" and "watch" not in accepted:
        raise UsageError(f"--path has no effect: a {type(flow).__name__} has no path; leave it out")
    if flags.from_images is not None:
        if "start" not in accepted or flow.space.picture_shape is None:
            raise UsageError(f"--from_images has no effect: {source} is a {type(flow).__name__} of other data")
        images = _load_images(flags.from_images, flags.num_samples, flow.space.picture_shape)
        options["start"] = flow.space.from_pictures(images.to(flow.device)).cpu()
        options["noise_level"] = flags.noise_level or NOISE_LEVEL
    return options


def _claim(folder: Path, flags: PicturesConfig, held: ExitStack, *, ours: bool) -> None:
    """Create and lock the output folder, check that it has room and no other samples, and claim all names of files."""
    claim(prepare_folder("output_dir", folder), (), ours=ours)  # refuse a checkpoint before writing the lock file
    busy = f"another process is writing to --output_dir {folder}"
    held.enter_context(locked(folder / LOCK_FILE, busy, 0))
    files = _files_of(folder, flags.num_samples)
    for file in {*folder.glob("*.png")} - {*files}:
        if file.stem.isdecimal():
            raise UsageError(f"--output_dir {folder} contains {file.name} of an earlier call: choose another folder")
    path = {"none": [], "strip": ["path.png"], "gif": ["path.gif"]}[flags.path]
    claim(folder, [*(file.name for file in files), "grid.png", *path], ours=ours)
    if flags.save_pretrained is not None:
        claim_model(prepare_folder("save_pretrained", flags.save_pretrained))
        claim(flags.save_pretrained, ["grid.png"])  # written last


def describe(config: SampleConfig, trained: Trained, options: dict[str, Any], state: PartialState) -> str:
    """Return lines on the model, the solver and the pictures."""
    flow, flags, steps = trained.flow, config.samples, options["steps"]
    solver = "average velocity" if hasattr(flow, "average_velocity") else solver_name(flow, options)
    if solver != "adaptive":
        grid = f"{config.solver.time_grid} grid"
        solver = ", ".join(filter(None, (f"{steps} interval{'s' * (steps > 1)}", solver, grid)))
    texts: dict[str, object] = {
        "model": trained,
        "processes": f"{state.num_processes} x {state.device.type}",
        "solver": solver,
        "pictures": f"{flags.num_samples} of {flow.space.noun}, seed {flags.seed}",
    }
    if "conditions" in options:
        labels = options["conditions"]["labels"].tolist()
        texts["classes"] = ", ".join(flow.class_names[label] for label in labels[:6]) + ", ..." * (len(labels) > 6)
    if "start" in options:
        texts["start"] = f"{len(options['start'])} of {flags.from_images}, noise level {options['noise_level']:g}"
    return lines(texts)


def _find_classes(given: str, names: list[str], source: Path) -> list[int]:
    """Return the numbers of classes that are given by name or number."""
    if not names:
        raise UsageError(f"--classes has no effect: {source} was trained without labels; train with --use_cfg")
    known = {str(number): number for number in range(len(names))} | {name: i for i, name in enumerate(names)}
    wanted = names if given.strip() == "all" else [name.strip() for name in given.split(",")]
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, names, 3, cutoff=0.5)
            hint = f" (perhaps {' or '.join(close)}?)" if close else f", like {', '.join(names[:3])}"
            raise UsageError(f"--classes {name} does not exist: pass names{hint}, or numbers up to {len(names) - 1}")
    return [known[name] for name in wanted]


def _load_images(path: Path, count: int, shape: tuple[int, ...]) -> Tensor:
    """Read at most ``count`` pictures as uint8 ``[n, c, h, w]`` of this shape."""
    files = [path] if path.is_file() else find_images(path) if path.is_dir() else []
    if not files:
        raise UsageError(f"--from_images {path} is neither a picture nor a folder of pictures: pass another path")
    channels, height, width = shape
    pictures = []
    for file in files[:count]:
        try:
            pictures.append(pil_to_tensor(fit(open_picture(file), (width, height), alpha=channels == RGBA)))
        except Exception as error:  # every decoder fails in its own way
            raise UsageError(f"--from_images {file} cannot be read ({first_line(error)}): remove it") from error
    return torch.stack(pictures)


def _files_of(folder: Path, count: int) -> list[Path]:
    """Return the files of ``count`` samples, whose numbers have as many digits as the last one, and at least 5."""
    digits = max(5, len(str(count - 1)))
    return [folder / f"{number:0{digits}d}.png" for number in range(count)]


def _write_path(folder: Path, flow: Flow, numbers: range, options: dict[str, Any], kind: str) -> Path:
    """Write the trajectories of some samples: an animation, or a row for each sample."""
    frames: list[Tensor] = []

    def watch(_t: float, x: Tensor) -> None:
        frames.append(flow.space.render(flow.space.decode(x)).cpu())

    list(sample_batches(flow, numbers, watch=watch, **options))
    if kind == "gif":
        pauses = [80] * (len(frames) - 1) + [1500]
        return write_motion(folder / "path.gif", [to_grid(frame) for frame in frames], pauses)
    stops = sorted({round(i * (len(frames) - 1) / (PATH_STOPS - 1)) for i in range(PATH_STOPS)})
    strip = torch.stack([frames[stop] for stop in stops], dim=1)
    return write_picture(folder / "path.png", to_grid(strip.flatten(0, 1), columns=len(stops)))
