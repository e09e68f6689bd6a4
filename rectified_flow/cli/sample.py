"""sample.py: numbered samples of a trained flow, shared between processes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from tqdm.auto import tqdm

from rectified_flow.cli.build import open_trained
from rectified_flow.cli.flags.sampling import MeasureConfig, PicturesConfig, SampleConfig
from rectified_flow.cli.sample_request import GRID_PICTURES, PREVIEW, SampleRequest, read_request
from rectified_flow.condition import read_written
from rectified_flow.data.open import picture_names
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_shared
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.features import GREY_LEVELS, RealData, average_colours, reference_features
from rectified_flow.flags import refuse, replaced
from rectified_flow.flows.flow import SOURCE, Flow, sample_batches
from rectified_flow.flows.solvers import NO_GUIDANCE
from rectified_flow.hub import card_of_run, claim_model, save_pretrained
from rectified_flow.load import Trained, autocast, model_hash, solver_name
from rectified_flow.runs.checkpoint import early_of
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
from rectified_flow.system.provenance import Provenance, metadata_options, read_provenance
from rectified_flow.system.terminal import lines, progress_bar

LOCK_FILE, NEAREST_FILE = ".sample.lock", "nearest.png"
PATH_PICTURES, PATH_STOPS, NEAREST = 8, 9, 4
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
    guided = config.solver.autoguidance != 1
    refuse({"autoguidance": guided and flags.reverse}, "has no effect with --reverse: leave it out")
    refuse({"autoguidance": guided and flags.save_pretrained}, "excludes --save_pretrained, which saves one network")
    like = None if flags.like is None else read_provenance(flags.like)
    if like is not None:
        scales = tuple(f"{name}={scale:g}" for name, scale in like.guidance.items())
        config = replaced(config, asdict(like) | {"guidance": scales, "like": None})
    flags, folder = config.samples, flags.output_dir
    state, trained, options = open_trained(config)
    options |= {"seed": flags.seed, "batch_size": config.model.batch_size}
    if flags.reverse and config.solver.guidance_scale is None and not config.solver.guidance:
        options.pop("guidance", None)  # a default
    request = read_request(flags, trained, options) if like is None else _repeat(like, trained, options)
    if trained.flow.space.suffix is not None:
        request = replace(request, names=[f"{Path(name).stem}{PREVIEW}" for name in request.names])
    card = {} if flags.save_pretrained is None else card_of_run(trained, flags.license)
    folder = folder or trained.run_folder / ("generated" if like is None else "like")
    data = None if flags.nearest is None else _training_data(flags.nearest, trained, state)
    with ExitStack() as held:
        on_main(state, lambda: _claim(folder, flags, _files_of(request, trained.flow), held))
        check_shared(state, {"output_dir": folder})
        settings = _settings_of(config, trained, request)
        state.print(describe(settings, flags, trained, request))
        _write_samples(config, trained, request, settings, folder, state)
        if data is not None:
            files = [folder / name for name in request.names]
            _write_nearest(data, files, state, _metadata(flags, settings, request))
    if flags.save_pretrained is not None and state.is_main_process:
        with writing(f"the model in --save_pretrained {flags.save_pretrained}"):
            write_output(flags.save_pretrained / "grid.png", (folder / "grid.png").read_bytes())
            save_pretrained(trained.flow, flags.save_pretrained, grid="grid.png", **card)
        tqdm.write(lines({"model": flags.save_pretrained}))


def _repeat(like: Provenance, trained: Trained, options: dict[str, Any]) -> SampleRequest:
    """Return the request for a picture that was generated earlier.

    Raises:
        UsageError: if another model generated it, or its settings do not determine it.
    """
    if like.model != model_hash(trained.flow):
        raise UsageError(f"--like needs a picture of {trained.source}, and another model generated this one")
    if like.number is None or like.from_picture:
        raise UsageError("--like needs a single picture that was generated from noise: pass one of sample.py")
    written = {name: [text] for name, text in like.conditions.items()}
    options = options | {
        "steps": like.steps,
        "draws": [like.number],
        "conditions": read_written(trained.flow.conditions, written),
    }
    return SampleRequest([f"{like.number:05d}-seed-{like.seed}.png"], options, written=written)


def _files_of(request: SampleRequest, flow: Flow) -> list[str]:
    """Return the names of all files of results: pictures, and the measurements beside them.

    Raises:
        UsageError: if two files would have the same name.
    """
    names = [*request.names]
    if (suffix := flow.space.suffix) is not None:
        names += [beside(name, suffix) for name in names]
    [(name, count)] = Counter([*names, "grid.png"]).most_common(1)
    if count > 1:
        raise UsageError(f"--from_images has two files for the result {name}: rename one")
    return names


def _write_samples(
    config: SampleConfig,
    trained: Trained,
    request: SampleRequest,
    settings: Provenance,
    folder: Path,
    state: PartialState,
) -> None:
    """Write this process's samples; the main process also writes the grid and the trajectories."""
    flags, count, flow = config.samples, len(request.names), trained.flow
    space, files = flow.space, [folder / name for name in request.names]
    sides = 0 if space.suffix is None else prod(space.shape or ())
    remedy = "lower it, or pass an --output_dir with more room"
    require_disk(count * (BLOCK + 8 * sides), folder, f"--num_samples {count}", remedy)
    mine = range(state.process_index, count, state.num_processes)
    rows: list[int] = []
    with (
        flow.network.register_forward_hook(lambda _network, arguments, _output: rows.append(len(arguments[0]))),
        autocast(config.model.mixed_precision, state.device),
        progress_bar(total=len(mine), unit="img", disable=not state.is_main_process) as bar,
    ):
        for numbers, results, pictures in _results(flow, mine, request):
            for number, result, picture in zip(numbers, results.cpu(), pictures.cpu(), strict=True):
                # The names are already claimed: write_picture would read the record again for each picture.
                pixels = picture.permute(1, 2, 0).numpy()
                contents = {files[number]: encode_picture(pixels, **_metadata(flags, settings, request, number))}
                if space.suffix is not None:
                    contents[folder / beside(files[number].name, space.suffix)] = space.write(result)
                for file, content in contents.items():
                    with writing(file):
                        replace_file(file, content, durable=False)
            bar.update(len(numbers))
        state.wait_for_everyone()
        if not state.is_main_process:
            return
        also = request.options.get("guidance", NO_GUIDANCE).autoguidance != 1
        calls = f"{sum(rows) / len(mine):g} of the network for each picture"
        texts: dict[str, object] = {"calls": calls + ", beside those of the early checkpoint's network" * also}
        if flags.path != "none":
            shown = range(min(PATH_PICTURES, count))
            texts["path"] = _write_path(
                folder, flow, shown, request.options, flags.path, _metadata(flags, settings, request)
            )
    grid = _grid_of(files, request, flags.variants, space.legend)
    texts["grid"] = write_picture(folder / "grid.png", grid, **_metadata(flags, settings, request))
    if space.suffix is not None:
        first, last = (beside(request.names[number], space.suffix) for number in (0, -1))
        texts["values"] = f"{folder / first} to {last}"
    tqdm.write(lines(texts | {"pictures": f"{files[0]} to {files[-1].name}"}))


def _settings_of(config: SampleConfig, trained: Trained, request: SampleRequest) -> Provenance:
    """Return the settings that all pictures of a call have in common."""
    options = request.options
    guidance = options.get("guidance", NO_GUIDANCE)
    return Provenance(
        model=model_hash(trained.flow),
        seed=options["seed"],
        steps=options["steps"],
        solver=solver_name(trained.flow, options),
        time_grid=config.solver.time_grid,
        guidance_scale=guidance.scale,
        guidance=dict(guidance.scales),
        guidance_interval=guidance.interval,
        autoguidance=guidance.autoguidance,
        mixed_precision=config.model.mixed_precision,
        from_picture=config.samples.from_images is not None,
    )


def _metadata(
    flags: PicturesConfig, settings: Provenance, request: SampleRequest, number: int | None = None
) -> dict[str, Any]:
    """Return the options with which Pillow writes the settings of a picture, or of several without a number."""
    if not flags.metadata:
        return {}
    if number is not None:
        draws = request.options.get("draws")
        written = {name: texts[number % len(texts)] for name, texts in request.written.items()}
        settings = replace(settings, number=number if draws is None else draws[number], conditions=written)
    return metadata_options("PNG", asdict(settings))


def _results(
    flow: Flow, numbers: Sequence[int], request: SampleRequest
) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
    """Yield numbers of results, generated data, and their pictures uint8 ``[b, c, h, w]``, a batch at a time."""
    space, is_picture = flow.space, flow.space.suffix is None
    batches = _reversed(flow, numbers, **request.options) if request.reverse else None
    for some, data in batches or sample_batches(flow, numbers, render=False, **request.options):
        results = space.render_with_alpha(data) if is_picture else data
        if request.kept is not None:
            known, mask = (each.to(results.device) for each in request.kept)
            known = known[[number % len(known) for number in some]]
            results = torch.where(mask | known.isnan(), results, known)
        yield some, results, results if is_picture else space.render(results)


def _reversed(
    flow: Flow, numbers: Sequence[int], *, seed: int, batch_size: int, conditions: dict[str, Tensor], **options: Any
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield numbers of the starts that lead to the given data, and the starts, decoded; see :func:`sample_batches`."""
    for first in range(0, len(numbers), batch_size):
        some = numbers[first : first + batch_size]
        given = {name: values[[number % len(values) for number in some]] for name, values in conditions.items()}
        yield some, flow.space.decode(flow.encode(given.pop(SOURCE), **given, **options))  # type: ignore[operator]


def _grid_of(files: Sequence[Path], request: SampleRequest, variants: int, legend: Legend | None) -> Any:
    """Return a grid of results. Results of --from_images follow their picture, and conditions are written below."""
    count, shown = len(files) // variants, request.shown
    across = 1 if shown is None else 1 + variants
    rows = range(count if request.axes else min(count, max(1, GRID_PICTURES // across)))
    # Other processes wrote most of the samples, so the grid reads them back.
    cells: list[Tensor] = []
    for row in rows:
        cells += [] if shown is None else [shown[row]]
        cells += [read_picture(file) for file in files[row::count]]
    images = torch.stack(cells)
    if request.axes:
        names = {axis.name: "" if axis.name == "labels" else f"{axis.name} " for axis in request.axes}
        return labelled_grid(images, *([names[axis.name] + text for text in axis.values] for axis in request.axes))
    pairs = max(1, round((len(rows) / across) ** 0.5))  # of a picture and its results, side by side
    several = [texts for texts in request.written.values() if len(texts) > 1]  # conditions in which pictures differ
    if shown is None and several:
        images = with_texts(images, [", ".join(str(each[row % len(each)]) for each in several) for row in rows])
    return to_grid(images, None if shown is None else across * pairs, legend)


def read_picture(file: Path) -> Tensor:
    """Read a picture as uint8 ``[3, h, w]``."""
    return pil_to_tensor(over_white(open_picture(file)))


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
    also = {"none": [], "strip": ["path.png"], "gif": ["path.gif"]}[flags.path]
    claim(folder, [*names, "grid.png", *also, *[NEAREST_FILE] * (flags.nearest is not None)])
    if flags.save_pretrained is not None:
        claim_model(prepare_folder("save_pretrained", flags.save_pretrained))
        claim(flags.save_pretrained, ["grid.png"])


def describe(settings: Provenance, flags: PicturesConfig, trained: Trained, request: SampleRequest) -> str:
    """Return lines on the model, the settings and the pictures."""
    default = asdict(Provenance(settings.model, settings.seed, steps=0))
    texts: dict[str, object] = {
        "model": trained,
        "settings": ", ".join(f"{name} {each}" for name, each in asdict(settings).items() if each != default[name]),
        "pictures": f"{len(request.names)} of {trained.flow.space.noun}, seed {flags.seed}",
    }
    if settings.autoguidance != 1 and (early := early_of(trained.source)):
        texts["early"] = early
    for name, values in request.written.items():
        some = list(dict.fromkeys(map(str, values)))
        texts["classes" if name == "labels" else name] = ", ".join(some[:6]) + ", ..." * (len(some) > 6)
    if flags.from_images is not None:
        each = f", {flags.variants} results for each" * (flags.variants > 1) + ", in reverse" * request.reverse
        texts["from"] = f"{flags.from_images}{each}"
    return lines(texts)


def beside(name: str, suffix: str) -> str:
    """Return the name of the file of generated data beside their picture."""
    return name.removesuffix(PREVIEW) + suffix


def _write_path(
    folder: Path, flow: Flow, numbers: range, options: dict[str, Any], kind: str, metadata: dict[str, Any]
) -> Path:
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
    return write_picture(folder / "path.png", to_grid(strip.flatten(0, 1), columns=len(stops)), **metadata)


def _training_data(place: Sequence[Path], trained: Trained, state: PartialState) -> RealData:
    """Open the training pictures of a model, which are in the folder ``place`` if they have moved. Collective.

    Raises:
        UsageError: if they are not there.
    """
    from rectified_flow.cli.evaluate import real_data  # loads all scores

    return real_data(MeasureConfig(dataset_path=next(iter(place), None)), trained, state)[0]


def _write_nearest(data: RealData, files: Sequence[Path], state: PartialState, metadata: dict[str, Any]) -> None:
    """Write a sheet of samples, each before the training pictures that are nearest to it, with their distances.

    The distance is the root mean square difference between the mean colours of 8x8 fields, in grey levels of 256, of
    a training picture or of its mirror image. Collective.
    """
    colours = average_colours()
    real = reference_features(data, colours)
    if not state.is_main_process:
        return
    shown = torch.stack([read_picture(file) for file in files[:GRID_PICTURES]])
    distances = torch.minimum(*(torch.cdist(colours.of(each), real) for each in (shown, shown.flip(-1))))
    found = distances.mul(GREY_LEVELS / real.shape[1] ** 0.5).topk(min(NEAREST, len(real)), largest=False)
    names = picture_names(data) if isinstance(data, ImageDataset) else [str(number) for number in range(len(data))]
    near = data.read_pictures(found.indices.flatten().tolist()).unflatten(0, found.indices.shape)
    texts = [
        text
        for file, rows, values in zip(files, found.indices.tolist(), found.values.tolist(), strict=False)
        for text in (file.name, *(f"{value:.1f}: {names[row]}" for row, value in zip(rows, values, strict=True)))
    ]
    cells = with_texts(torch.cat((shown[:, None], near), dim=1).flatten(0, 1), texts)
    path = write_picture(files[0].parent / NEAREST_FILE, to_grid(cells, columns=1 + near.shape[1]), **metadata)
    closest = found.values[:, 0].min()
    tqdm.write(lines({"nearest": f"{path}, the smallest distance is {closest:.1f} of 256 grey levels"}))
