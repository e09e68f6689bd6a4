"""sample.py: numbered samples of a trained flow, shared between processes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from functools import cached_property
from os.path import lexists
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from tqdm.auto import tqdm

from rectified_flow.cli.build import open_trained
from rectified_flow.cli.evaluate import check_fits, real_data
from rectified_flow.cli.model_flags import PicturesConfig, SampleConfig
from rectified_flow.cli.sample_names import SHEETS, Names
from rectified_flow.cli.sample_request import GRID_PICTURES, SampleRequest, read_request
from rectified_flow.condition import read_written, written
from rectified_flow.distributed import check_shared, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.features import (
    GREY_LEVELS,
    RealData,
    average_colours,
    coloured_like_samples,
    reference_features,
)
from rectified_flow.flags import with_values
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.solvers import NO_GUIDANCE
from rectified_flow.hub import CardContents, card_of_run, claim_model, save_pretrained
from rectified_flow.load import Trained, autocast, grid_name, model_hash, solver_name
from rectified_flow.runs.checkpoint import early_of, place_of
from rectified_flow.spaces.medium import PREVIEW, Medium
from rectified_flow.system.artifact import claim, claimed_names, write_output
from rectified_flow.system.files import locked, prepare_folder, replace_file, writing
from rectified_flow.system.pictures import (
    Provenance,
    metadata_options,
    open_picture,
    over_white,
    read_provenance,
    to_grid,
    write_picture,
)
from rectified_flow.system.signals import raise_if_stop_requested
from rectified_flow.system.terminal import lines, progress_bar

MODEL_GRID = "grid.png"  # beside the card of --save_pretrained
MAX_LIKE_STEPS = 10_000  # a file of another person must not start days of sampling
NEAREST = 4  # training pictures beside each sample on the sheet of --nearest


@dataclass(frozen=True)
class Outputs:
    """The files of a request, and the metadata that are written into its pictures."""

    folder: Path
    request: SampleRequest
    medium: Medium
    settings: Provenance | None
    """Settings that all pictures have in common; None without metadata."""
    names: Sequence[str]
    """Names of the files of the samples, without their suffixes."""
    grid: Path
    nearest: Path

    @cached_property
    def pictures(self) -> list[Path]:
        """The pictures of all samples; those of measurements are previews."""
        return self._files(self.medium.ends[-1])

    @cached_property
    def values(self) -> list[Path]:
        """The data files of samples that are not pictures; each has a preview beside it."""
        return [file for end in self.medium.ends[:-1] for file in self._files(end)]

    def _files(self, end: str) -> list[Path]:
        return [self.folder / f"{name}{end}" for name in self.names]

    def metadata(self, number: int | None = None) -> dict[str, Any]:
        """Return the options with which Pillow writes the settings of a sample, or of several without a number."""
        settings, request = self.settings, self.request
        if settings is None:
            return {}
        if number is not None:
            texts = {name: values[number % len(values)] for name, values in request.texts.items()}
            draws = request.options.get("draws")
            settings = replace(settings, number=number if draws is None else draws[number], conditions=texts)
        return metadata_options(asdict(settings))


def sample(config: SampleConfig) -> None:
    """Sample this process's share of the images, and write a grid on the main process."""
    like, file = None, config.samples.like
    if file is not None:
        like = read_provenance(_picture_of(file))
        scales = tuple(f"{name}={Decimal(repr(scale)):f}" for name, scale in like.guidance.items())
        place = {"checkpoint": _run_of(file, config.model.checkpoint)}
        config = with_values(config, asdict(like) | place | {"guidance": scales, "like": None})
    flags, model = config.samples, config.samples.save_pretrained
    if model is not None and config.solver.autoguidance is None:
        config = with_values(config, {"autoguidance": 1.0})  # the saved model has no early checkpoint
    state, trained, options = open_trained(config, None if like is None else like.model)
    options |= {"seed": flags.seed, "batch_size": config.model.batch_size}
    request = read_request(flags, trained, options) if like is None else _repeat(like, trained, options)
    settings = _settings_of(config, trained, request)
    card = CardContents() if model is None else card_of_run(trained, flags.license)
    data = None
    if flags.nearest is not None:  # a folder is where the training pictures are now
        data = real_data(trained, dataset_path=next(iter(flags.nearest), None), opens_sources=False)[0]
        check_fits(trained, data, state, "--nearest")
        data = coloured_like_samples(data, trained.flow.space)
    folder = flags.output_dir or trained.run_folder / ("generated" if like is None else "like")
    with ExitStack() as held:
        names, sheets = on_main(state, lambda: _claim(folder, request.names, trained.flow.space.medium, flags, held))
        grid, nearest = (folder / sheet for sheet in sheets)
        kept = settings if flags.metadata else None
        outputs = Outputs(folder, request, trained.flow.space.medium, kept, names, grid, nearest)
        check_shared(state, folder)
        state.print(summary(settings, flags, trained, request))
        with autocast(config.model.mixed_precision, state.device):
            calls = _write_samples(trained.flow, outputs, state)
            state.wait_for_everyone()
            if state.is_main_process:
                tqdm.write(lines({"calls": calls} | _write_grid(outputs, flags)))
        if data is not None:
            _write_nearest(data, outputs, state)
    if model is not None and state.is_main_process:
        with writing(f"the model in --save_pretrained {model}"):
            write_output(model / MODEL_GRID, grid.read_bytes())
            save_pretrained(trained.flow, model, **card | {"grid": MODEL_GRID})
        tqdm.write(lines({"model": model}))


def _picture_of(file: Path) -> Path:
    """Return the picture of a sample, which is the preview of a measurement."""
    preview = file.with_name(f"{file.stem}{PREVIEW}")
    return preview if preview.exists() else file


def _run_of(file: Path, default: Path) -> Path:
    """Return ``default`` if it exists, else the run whose folder contains the file; ``default`` if there is none."""
    parents = [] if default.exists() else file.resolve().parents
    return next((parent for parent in parents if place_of(parent).is_dir()), default)


def _repeat(like: Provenance, trained: Trained, options: dict[str, Any]) -> SampleRequest:
    """Return the request for a picture that was generated earlier."""
    if like.steps > MAX_LIKE_STEPS:
        found = f"--like names {like.steps:,} steps, more than {MAX_LIKE_STEPS:,}"
        raise UsageError(f"{found}: pass its settings by --steps, --seed and other flags instead")
    if like.from_picture:
        found = "--like needs a picture from noise, and this one was made with --from_images"
        raise UsageError(f"{found}: pass its source to --from_images, without --like")
    if like.number is None:
        raise UsageError("--like needs a single picture, and this file holds several: pass one of them")
    if unknown := like.conditions.keys() - written(trained.flow.conditions).keys():
        raise UsageError(f"--like has the condition {min(unknown)}, and {trained.source} was trained without it")
    texts = {name: [text] for name, text in like.conditions.items()}
    conditions = read_written(trained.flow.conditions, texts)
    options = options | {"steps": like.steps, "draws": [like.number], "conditions": conditions}
    return SampleRequest(Names([f"{like.number:05d}-seed-{like.seed}"], variants=1), options, texts)


def _settings_of(config: SampleConfig, trained: Trained, request: SampleRequest) -> Provenance:
    """Return the settings that all pictures of a call have in common."""
    options = request.options
    guidance = options.get("guidance", NO_GUIDANCE)
    return Provenance(
        model=model_hash(trained.flow),
        seed=options["seed"],
        steps=options["steps"],
        solver=solver_name(trained.flow, options),
        time_grid=grid_name(trained.flow, options),
        guidance_scale=guidance.scale,
        guidance=dict(guidance.scales),
        guidance_interval=guidance.interval,
        autoguidance=guidance.autoguidance,
        mixed_precision=config.model.mixed_precision,
        from_picture=config.samples.from_images is not None,
    )


def _claim(
    folder: Path, names: Names, medium: Medium, flags: PicturesConfig, held: ExitStack
) -> tuple[list[str], list[str]]:
    """Create and lock the output folder, and claim the names of files that no earlier call has written there.

    Returns:
        The names of the samples, without suffixes, and the names of the files of both sheets.
    """
    given = flags.from_images
    if given is not None:  # the next call would read the results as input pictures
        place, of_results = (given if given.is_dir() else given.parent).resolve(), folder.resolve()
        if of_results == place or (given.is_dir() and of_results.is_relative_to(place)):
            raise UsageError(f"--output_dir {folder} lies in the folder of --from_images: choose another folder")
    claim(prepare_folder("output_dir", folder), ())  # refuse a checkpoint before writing the lock file
    busy = f"another process is writing to --output_dir {folder}"
    held.enter_context(locked(folder, "samples", busy, 0))
    earlier = {name for name in claimed_names(folder) if lexists(folder / name)}
    numbered = names.numbered(names.taken(earlier))
    files = [f"{name}{end}" for name in numbered for end in medium.ends]
    sheets = [f"{name}.png" for name in SHEETS.numbered(SHEETS.taken([*earlier, *files]))]
    claim(folder, [*files, *(sheets if flags.nearest is not None else sheets[:1])])
    if flags.save_pretrained is not None:
        if flags.save_pretrained.resolve() == folder.resolve():
            raise UsageError(f"--save_pretrained and --output_dir are both {folder}: choose another folder")
        claim_model(prepare_folder("save_pretrained", flags.save_pretrained))
        claim(flags.save_pretrained, [MODEL_GRID])
    return numbered, sheets


def summary(settings: Provenance, flags: PicturesConfig, trained: Trained, request: SampleRequest) -> str:
    """Return lines on the model, the settings and the pictures."""
    default = asdict(Provenance(settings.model, settings.seed, steps=0))
    texts: dict[str, object] = {
        "model": trained,
        "settings": ", ".join(f"{name} {each}" for name, each in asdict(settings).items() if each != default[name]),
        "pictures": f"{len(request.names)} of {trained.flow.space.medium.noun}, seed {flags.seed}",
    }
    if settings.autoguidance != 1:
        texts["early"] = early_of(trained.source)
    for name, values in request.texts.items():
        some = list(dict.fromkeys(map(str, values)))
        texts["classes" if name == "labels" else name] = ", ".join(some[:6]) + ", ..." * (len(some) > 6)
    if flags.from_images is not None:
        each = f", {flags.variants} results for each" * (flags.variants > 1)
        texts["from"] = f"{flags.from_images}{each}"
    return lines(texts)


def _write_samples(flow: Flow, outputs: Outputs, state: PartialState) -> str:
    """Write this process's samples, and return the number of network calls for each in words."""
    request, medium = outputs.request, outputs.medium
    mine = range(state.process_index, len(request.names), state.num_processes)
    rows: list[int] = []
    counter = flow.network.register_forward_hook(lambda _network, arguments, _output: rows.append(len(arguments[0])))
    with counter, progress_bar(total=len(mine), unit="img", disable=not state.is_main_process) as bar:
        for numbers, results in _results(flow, mine, request):
            for number, result in zip(numbers, results.cpu(), strict=True):
                for end, content in medium.files(result, **outputs.metadata(number)).items():
                    _write(outputs.folder / f"{outputs.names[number]}{end}", content)
            bar.update(len(numbers))
    also = request.options.get("guidance", NO_GUIDANCE).autoguidance != 1
    calls = f"{sum(rows) / max(1, len(mine)):g} of the network for each picture"
    return calls + ", beside those of the early checkpoint's network" * also


def _write(file: Path, content: bytes) -> None:
    """Write a file whose name is claimed already; claiming reads a record, which would take long for each sample."""
    with writing(file):
        replace_file(file, content, durable=False)


def _results(flow: Flow, numbers: Sequence[int], request: SampleRequest) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield numbers of results, and the contents of their files ``[b, ...]``, a batch at a time."""
    for some, data in sample_batches(flow, numbers, render=False, **request.options):
        raise_if_stop_requested()  # no signal reports that the launcher exited
        results = flow.space.medium.contents(data)
        if request.kept is not None:
            known, mask = (each.to(results.device) for each in request.kept)
            known = known[[number % len(known) for number in some]]
            results = torch.where(mask | known.isnan(), results, known)
        yield some, results


def _write_grid(outputs: Outputs, flags: PicturesConfig) -> dict[str, object]:
    """Write the grid of all samples, and return lines on all files."""
    # Other processes wrote most of the samples, so the grid reads them back.
    grid = write_picture(outputs.grid, _grid_of(outputs, flags.variants), **outputs.metadata())
    files = {"values": outputs.values, "pictures": outputs.pictures}
    return {"grid": grid} | {name: _span(paths) for name, paths in files.items() if paths}


def _span(paths: Sequence[Path]) -> str:
    """Return the range of the files as text, such as ``generated/00000.png to 00007.png``."""
    return f"{paths[0]} to {paths[-1].name}" if len(paths) > 1 else str(paths[0])


def _grid_of(outputs: Outputs, variants: int) -> Any:
    """Return a grid of results. Results of --from_images follow their picture, and conditions are written below."""
    request, legend, files = outputs.request, outputs.medium.legend, outputs.pictures
    if request.shown is not None:
        count, across = len(files) // variants, 1 + variants
        rows = range(min(count, max(1, GRID_PICTURES // across)))
        cells = [torch.cat((request.shown[row : row + 1], read_pictures(files[row::count]))) for row in rows]
        groups = max(1, round((len(rows) / across) ** 0.5))  # of a picture and its results, side by side
        return to_grid(torch.cat(cells), across * groups, legend=legend)
    images = read_pictures(files if request.columns else files[:GRID_PICTURES])
    several = [texts for texts in request.texts.values() if len({*texts}) > 1]  # texts that differ between pictures
    below = [", ".join(str(texts[row % len(texts)]) for texts in several) for row in range(len(images))]
    return to_grid(images, request.columns, below if several else None, legend)


def read_pictures(files: Sequence[Path]) -> Tensor:
    """Read pictures as uint8 ``[n, 3, h, w]``."""
    return torch.stack([pil_to_tensor(over_white(open_picture(file))) for file in files])


def _write_nearest(data: RealData, outputs: Outputs, state: PartialState) -> None:
    """Write a sheet of samples, each before the training pictures that are nearest to it, with their distances.

    The distance is the root mean square difference between the mean colours of 8x8 fields, in grey levels of 256, and
    mirror images count as equal. On latents, the training pictures are the autoencoder's reconstructions. Collective.
    """
    colours = average_colours()
    real = reference_features(data, colours, medium=outputs.medium if outputs.medium.codec else None)
    if not state.is_main_process:
        return
    files = outputs.pictures[:GRID_PICTURES]
    shown = read_pictures(files)
    distances = torch.minimum(*(torch.cdist(colours.of(each), real) for each in (shown, shown.flip(-1))))
    found = distances.mul(GREY_LEVELS / real.shape[1] ** 0.5).topk(min(NEAREST, len(real)), largest=False)
    names, texts = data.names, list[str]()
    for file, rows, values in zip(files, found.indices.tolist(), found.values.tolist(), strict=True):
        texts += [file.name, *(f"{value:.1f}: {names[row]}" for row, value in zip(rows, values, strict=True))]
    near = data.read_pictures(found.indices.flatten().tolist()).unflatten(0, found.indices.shape)
    sheet = to_grid(torch.cat((shown[:, None], near), dim=1).flatten(0, 1), 1 + near.shape[1], texts=texts)
    path = write_picture(outputs.nearest, sheet, **outputs.metadata())
    closest = f"the smallest distance is {found.values[:, 0].min():.1f} of 256 grey levels"
    compared = f", among the first {len(files)} samples" * (len(files) < len(outputs.pictures))
    tqdm.write(lines({"nearest": f"{path}, {closest}{compared}"}))
