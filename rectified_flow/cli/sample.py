"""sample.py: numbered samples of a trained flow, shared between processes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from tqdm.auto import tqdm

from rectified_flow.cli.flags.sampling import PicturesConfig, SampleConfig
from rectified_flow.cli.flags.training import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.cli.parts import open_trained
from rectified_flow.cli.programs import command
from rectified_flow.cli.samples.choice import GRID_PICTURES, Wanted, choose
from rectified_flow.cli.samples.inputs import PREVIEW, Written
from rectified_flow.data.fields import FieldFormat, encode_field
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_shared
from rectified_flow.errors import UsageError
from rectified_flow.flags import plain, refuse
from rectified_flow.flows.flow import SOURCE, Flow, sample_batches
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.solvers import NO_GUIDANCE, Guidance
from rectified_flow.hub import card_of_run, claim_model, save_pretrained
from rectified_flow.load import Trained, autocast, load_average, solver_name
from rectified_flow.runs.checkpoint import early_of
from rectified_flow.runs.film import film_of, format_of
from rectified_flow.runs.snapshots import intact_snapshots
from rectified_flow.runs.watched import WatchedRun
from rectified_flow.spaces.fields import Fields
from rectified_flow.system.files import locked, prepare_folder, replace_file, writing
from rectified_flow.system.machine import require_disk
from rectified_flow.system.outputs import claim, write_output
from rectified_flow.system.pictures import (
    Legend,
    encode_picture,
    labelled_grid,
    open_picture,
    over_white,
    to_grid,
    with_texts,
    write_motion,
    write_picture,
)
from rectified_flow.system.signals import interruptible
from rectified_flow.system.terminal import lines, progress_bar

LOCK_FILE = ".sample.lock"
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
    if flags.film is not None:
        _write_film(config.model.checkpoint, flags.film)
        return
    guided = config.solver.autoguidance != 1
    refuse({"autoguidance": guided and flags.reverse}, "has no effect with --reverse: leave it out")
    refuse({"autoguidance": guided and flags.save_pretrained}, "excludes --save_pretrained, which saves one network")
    state, trained, options = open_trained(config)
    if flags.ema_length is not None:
        snapshots = on_main(state, lambda: intact_snapshots(trained.source))
        trained = load_average(trained, snapshots, flags.ema_length)
    options |= {"seed": flags.seed, "batch_size": config.model.batch_size}
    if flags.reverse and config.solver.guidance_scale is None and not config.solver.guidance:
        options.pop("guidance", None)  # a default
    wanted = choose(flags, trained, options)
    names, space = wanted.names, trained.flow.space
    if isinstance(space, Fields):
        wanted = replace(wanted, names=[f"{Path(name).stem}{PREVIEW}" for name in names])
        names = [*wanted.names, *(measured_name(name, space) for name in wanted.names)]
        if len(set(names)) < len(names):
            raise UsageError(f"--from_images {flags.from_images}: two results would have the same name; rename a file")
    card = {}
    if flags.save_pretrained is not None:
        is_map = isinstance(trained.flow, FlowMap)
        program, kind = ("one-step", TrainMeanFlow) if is_map else ("train", TrainRectifiedFlow)
        card = card_of_run(trained, flags.license, command(program), plain(kind()))
    folder = flags.output_dir or trained.run_folder / "generated"
    with ExitStack() as held:
        on_main(state, lambda: _claim(folder, flags, names, held))
        check_shared(state, {"output_dir": folder})
        if state.is_main_process:
            tqdm.write(describe(config, trained, wanted, state))
        _write_samples(config, trained.flow, wanted, card, folder, state)


def _write_film(run: Path, path: Path) -> None:
    """Write a film of the grids of samples that a run saved during training; only the main process does.

    Raises:
        UsageError: if the run has fewer than two grids, or the file has another suffix than films have.
        RunError: if the file cannot be written.
    """
    state, kind = PartialState(), format_of(path)
    if state.is_main_process:
        content = film_of(grids := WatchedRun(run).grids(), kind)
        with writing(path):
            prepare_folder("film", path.parent)
            write_output(path, content)
        tqdm.write(lines({"film": f"{path}, {len(grids)} grids"}))


def _write_samples(
    config: SampleConfig, flow: Flow, wanted: Wanted, card: dict[str, Any], folder: Path, state: PartialState
) -> None:
    """Write this process's samples; the main process also writes the grid, the trajectories and the model."""
    flags, count = config.samples, len(wanted.names)
    remedy = "lower it, or pass an --output_dir with more room"
    sides = prod(flow.space.shape or ()) if isinstance(flow.space, Fields) else 0
    require_disk(count * (BLOCK + 8 * sides), folder, f"--num_samples {count}", remedy)
    space, files, outside = flow.space, [folder / name for name in wanted.names], list[float]()
    mine = range(state.process_index, count, state.num_processes)
    rows: list[int] = []
    with (
        flow.network.register_forward_hook(lambda _network, arguments, _output: rows.append(len(arguments[0]))),
        interruptible(flow),
        autocast(config.model.mixed_precision, state.device),
        progress_bar(total=len(mine), unit="img", disable=not state.is_main_process) as bar,
    ):
        for numbers, results, pictures in _results(flow, mine, wanted):
            for number, result, picture in zip(numbers, results.cpu(), pictures.cpu(), strict=True):
                # The names are already claimed: write_picture would read the record again for each picture.
                contents = {files[number]: encode_picture(picture.permute(1, 2, 0).numpy())}
                if isinstance(space, Fields):
                    measured = folder / measured_name(files[number].name, space)
                    contents[measured] = encode_field(result.numpy(), FieldFormat(**space.files))
                    outside.append(space.outside(result[None]))
                for file, content in contents.items():
                    with writing(file):
                        replace_file(file, content, durable=False)
            bar.update(len(numbers))
        shares = gather_object(outside)
        if not state.is_main_process:
            return
        also = wanted.options.get("guidance", NO_GUIDANCE).autoguidance != 1
        calls = f"{sum(rows) / len(mine):g} of the network for each picture"
        texts: dict[str, object] = {"calls": calls + ", beside those of the early checkpoint's network" * also}
        if flags.path != "none":
            texts["path"] = _write_path(folder, flow, range(min(PATH_PICTURES, count)), wanted.options, flags.path)
    grid = write_picture(folder / "grid.png", _grid_of(files, wanted, flags.variants, space.legend))
    if isinstance(space, Fields):
        texts["values"] = f"{sum(shares) / len(shares):.2%} are outside of the range by more than 1% of it"
        texts["fields"] = (
            f"{folder / measured_name(wanted.names[0], space)} to {measured_name(wanted.names[-1], space)}"
        )
    texts |= {"grid": grid, "pictures": f"{files[0]} to {files[-1].name}"}
    if flags.save_pretrained is not None:
        with writing(f"the model in --save_pretrained {flags.save_pretrained}"):
            write_output(flags.save_pretrained / "grid.png", grid.read_bytes())
            save_pretrained(flow, flags.save_pretrained, grid="grid.png", **card)
        texts["model"] = flags.save_pretrained
    tqdm.write(lines(texts))


def _results(flow: Flow, numbers: Sequence[int], wanted: Wanted) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
    """Yield numbers of results, generated data, and their pictures uint8 ``[b, c, h, w]``, a batch at a time."""
    space, is_field = flow.space, isinstance(flow.space, Fields)
    batches = _reversed(flow, numbers, **wanted.options) if wanted.reverse else None
    for some, data in batches or sample_batches(flow, numbers, render=False, **wanted.options):
        results = data if is_field else space.render_with_alpha(data)
        if wanted.kept is not None:
            known, mask = (each.to(results.device) for each in wanted.kept)
            known = known[[number % len(known) for number in some]]
            results = torch.where(mask | known.isnan(), results, known)
        yield some, results, space.render(results) if is_field else results


def _reversed(
    flow: Flow, numbers: Sequence[int], *, seed: int, batch_size: int, conditions: dict[str, Tensor], **options: Any
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield numbers of the starts that lead to the given data, and the starts, decoded; see :func:`sample_batches`."""
    data, others = conditions[SOURCE], {name: each for name, each in conditions.items() if name != SOURCE}
    for first in range(0, len(numbers), batch_size):
        some = numbers[first : first + batch_size]
        given = {name: values[[number % len(values) for number in some]] for name, values in others.items()}
        x = flow.encode(data[[number % len(data) for number in some]], **given, **options)  # type: ignore[operator]
        yield some, flow.space.decode(x)


def _grid_of(files: Sequence[Path], wanted: Wanted, variants: int, legend: Legend | None) -> Any:
    """Return a grid of results. Results of --from_images follow their picture, and conditions are written below."""
    count, shown = len(files) // variants, wanted.shown
    across = 1 if shown is None else 1 + variants
    rows = range(count if wanted.axes else min(count, max(1, GRID_PICTURES // across)))
    # Other processes wrote most of the samples, so the grid reads them back.
    cells: list[Tensor] = []
    for row in rows:
        cells += [] if shown is None else [shown[row]]
        cells += [pil_to_tensor(over_white(open_picture(file))) for file in files[row::count]]
    images = torch.stack(cells)
    if wanted.axes:
        names = {axis.name: "" if axis.name == "labels" else f"{axis.name} " for axis in wanted.axes}
        return labelled_grid(images, *([names[axis.name] + text for text in axis.values] for axis in wanted.axes))
    pairs = max(1, round((len(rows) / across) ** 0.5))  # of a picture and its results, side by side
    texts = _texts_of(wanted.written, len(images)) if shown is None else []
    return to_grid(with_texts(images, texts) if texts else images, None if shown is None else across * pairs, legend)


def _texts_of(written: Written, count: int) -> list[str]:
    """Return the conditions of each picture in words, if pictures differ in them."""
    several = [texts for texts in written.values() if len(texts) > 1]
    return [", ".join(texts[number % len(texts)] for texts in several) for number in range(count)] if several else []


def _claim(folder: Path, flags: PicturesConfig, names: list[str], held: ExitStack) -> None:
    """Create and lock the output folder, check that it has room and no other samples, and claim all names of files."""
    given = flags.from_images
    if given is not None and (given if given.is_dir() else given.parent).resolve() == folder.resolve():
        raise UsageError(f"--output_dir {folder} has the pictures of --from_images: choose another folder")
    claim(prepare_folder("output_dir", folder), ())  # refuse a checkpoint before writing the lock file
    busy = f"another process is writing to --output_dir {folder}"
    held.enter_context(locked(folder / LOCK_FILE, busy, 0))
    for file in {*folder.glob("*.png")} - {folder / name for name in names}:
        if file.stem.removesuffix(Path(PREVIEW).stem).isdecimal():
            raise UsageError(f"--output_dir {folder} contains {file.name} of an earlier call: choose another folder")
    path = {"none": [], "strip": ["path.png"], "gif": ["path.gif"]}[flags.path]
    claim(folder, [*names, "grid.png", *path])
    if flags.save_pretrained is not None:
        claim_model(prepare_folder("save_pretrained", flags.save_pretrained))
        claim(flags.save_pretrained, ["grid.png"])  # written last


def describe(config: SampleConfig, trained: Trained, wanted: Wanted, state: PartialState) -> str:
    """Return lines on the model, the solver and the pictures."""
    flow, flags, options = trained.flow, config.samples, wanted.options
    steps = options["steps"]
    solver = "average velocity" if hasattr(flow, "average_velocity") else solver_name(flow, options)
    grid = f"{config.solver.time_grid} grid"
    solver = ", ".join(filter(None, (f"{steps} interval{'s' * (steps > 1)}", solver, grid)))
    texts: dict[str, object] = {
        "model": trained,
        "processes": f"{state.num_processes} x {state.device.type}",
        "solver": solver,
        **_guidance_in_words(options.get("guidance", NO_GUIDANCE), trained.source),
        "pictures": f"{len(wanted.names)} of {flow.space.noun}, seed {flags.seed}",
    }
    for name, values in wanted.written.items():
        some = list(dict.fromkeys(values))
        texts["classes" if name == "labels" else name] = ", ".join(some[:6]) + ", ..." * (len(some) > 6)
    if wanted.shown is not None:
        each = f", {flags.variants} results for each" * (flags.variants > 1)
        texts["from"] = (
            f"{len(wanted.names) // flags.variants} of {flags.from_images}{each}" + ", in reverse" * wanted.reverse
        )
    elif "start" in options:
        texts["start"] = f"{len(options['start'])} of {flags.from_images}, noise level {options['noise_level']:g}"
    return lines(texts)


def _guidance_in_words(guidance: Guidance, source: Path) -> dict[str, object]:
    """Return a line for each kind of guidance that is used."""
    scales = {"scale": guidance.scale} if guidance.scale != 1 else {}
    by_condition = ", ".join(f"{name} {scale:g}" for name, scale in {**scales, **guidance.scales}.items())
    early = early_of(source) if guidance.autoguidance != 1 else None
    auto = f"scale {guidance.autoguidance:g}, away from {early.name}" if early is not None else ""
    return {name: text for name, text in {"guidance": by_condition, "autoguidance": auto}.items() if text}


def measured_name(name: str, space: Fields) -> str:
    """Return the name of the file of measurements beside a picture."""
    return name.removesuffix(PREVIEW) + str(space.files["suffix"])


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
