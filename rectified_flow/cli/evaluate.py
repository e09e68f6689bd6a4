"""evaluate.py: how near a trained flow's pictures are to the training pictures, on all processes together."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from rectified_flow.cli.parts import is_items, join, open_pictures, open_registered
from rectified_flow.cli.run_flags import EvaluateConfig, MeasureConfig
from rectified_flow.cli.train_flags import DataConfig
from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import DamageError, RunError, UsageError, require
from rectified_flow.evaluation.evaluator import METRICS, SPLIT, Evaluator
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import HeldOutPictures, hold_out
from rectified_flow.flags import checked, replaced
from rectified_flow.load import RESULTS_FILE, Trained, autocast, load_average, load_trained, solver_options
from rectified_flow.registry import names
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import DataArguments, data_arguments, program_flags, read_config
from rectified_flow.runs.snapshots import find_shares, intact_snapshots
from rectified_flow.spaces.pixels import RGBA
from rectified_flow.system.files import locked, prepare_folder, read_document, replace_file
from rectified_flow.system.pictures import Panel, draw_panels, to_grid, write_picture
from rectified_flow.system.terminal import line, size_text

NEIGHBOURS_FILE = "neighbours.png"
STEPS_FILE, LENGTHS_FILE = "steps.png", "ema_lengths.png"
LOCK_FILE = ".evaluation.lock"
MOST_TEACHERS = 20
"""Longest teacher chain."""
LOCK_TIMEOUT = 60.0
"""Seconds to wait for another process that writes its results, which takes milliseconds."""


def evaluate(config: EvaluateConfig) -> None:
    """Compare samples with the training data, and print and save the results; each process takes a share.

    Raises:
        UsageError: if the checkpoint, its training pictures or the feature network are unavailable.
        RunError: if the results cannot be written.
    """
    state, measure = join(config), config.measure
    set_seed(measure.seed)
    model = config.model
    trained = load_trained(model.checkpoint, state, autoencoder=model.autoencoder, precision=model.mixed_precision)
    flow, source = trained.flow, trained.source
    options = solver_options(flow, source, **vars(config.solver))
    snapshots = on_main(state, lambda: intact_snapshots(source, tqdm.write)) if measure.ema_lengths else {}
    for wanted in measure.ema_lengths:
        find_shares(snapshots, wanted)  # or say now that it cannot be made
    folder = prepare_folder("output_dir", measure.output_dir or trained.run_folder)
    _known_results(folder)  # or say now that they cannot be read
    dataset, held_out, compared = _split(_training_data(measure, trained), trained, state)
    check_equal(state, lambda: {"the number of pictures": len(dataset), "their fingerprint": dataset.fingerprint})
    classes = flow.class_names
    require(
        not classes or classes == dataset.class_names,
        f"{source} was trained on different classes than {dataset.info.source}; pass its training images with "
        "--dataset_path",
    )
    if state.is_main_process and not _are_those_of(dataset, trained):
        tqdm.write(f"warning: {dataset.info.source} is not, or no longer, what {source} was trained on")
    evaluator = Evaluator(
        dataset,
        measure.feature_network,
        state,
        num_samples=measure.num_samples,
        seed=measure.seed,
        batch_size=config.model.batch_size,
        held_out=held_out,
        metrics=measure.metric or (*METRICS, "manifold"),
    )
    new = []
    for length, steps in product(measure.ema_lengths or (None,), measure.steps or (flow.default_steps,)):
        if length is not None:
            load_average(flow, snapshots, length)
        with autocast(config.model.mixed_precision, state.device):
            generated = evaluator.generate(flow, **options, steps=steps)
            losses = {} if compared is None else compared.measure(flow, state)
        if not state.is_main_process:
            continue
        settings = _settings(config, trained, length, steps) | evaluator.settings
        result = {**settings, "distances": evaluator.compute(generated) | losses}
        new.append(result)
        _write_down(folder, result)
        with autocast(config.model.mixed_precision, state.device):
            rows = evaluator.beside_neighbours(flow, generated, **options, steps=steps)
        write_picture(folder / NEIGHBOURS_FILE, to_grid(rows.flatten(0, 1), columns=rows.shape[1]))
        tqdm.write(_describe(result))
    state.wait_for_everyone()
    if state.is_main_process:
        tqdm.write(line("results", folder / RESULTS_FILE))
        what = "the pictures most like copies, each before the training pictures that are nearest to it"
        tqdm.write(line("neighbours", f"{folder / NEIGHBOURS_FILE}: {what}"))
        for plot in _plot(folder, new, measure, evaluator.headline):
            tqdm.write(line("plot", plot))


def _split(
    pictures: ImageDataset | RenderedItems, trained: Trained, state: PartialState
) -> tuple[ImageDataset | RenderedItems, ImageDataset | None, HeldOutPictures | None]:
    """Return the training pictures, the held-out ones, if any, and the pictures of the held-out loss. Collective."""
    if isinstance(pictures, RenderedItems):
        return pictures, None, None
    flags, path = on_main(state, lambda: _flags_of_pictures(trained))
    share, seed = (
        checked(DataConfig, flags, path).get("holdout", 0.0),
        checked(TrainingConfig, flags, path).get("seed", 0),
    )
    if not 0 < share < 1:
        return pictures, None, None
    split = hold_out(pictures, share, seed, state)
    if split.problem is not None:
        state.print(f"warning: comparing with all pictures, as {split.problem}")
        return pictures, None, None
    training, held_out = pictures.subset(split.training), pictures.subset(split.held_out)
    # Of a run with a teacher, the velocity on pictures is not what it learns.
    compared = None if _teacher_of(trained.config) else HeldOutPictures(training, held_out, seed)
    return training, held_out, compared


def _flags_of_pictures(trained: Trained) -> tuple[Mapping[str, Any], Path]:
    """Return the flags of the run that was trained on pictures, the run itself or its first teacher, and their file."""
    config, path = trained.config, trained.source / checkpoint.CONFIG_FILE
    for _ in range(MOST_TEACHERS):
        teacher = _teacher_of(config)
        if teacher is None:
            break
        pruned = not Path(teacher).exists()  # then its run may still be there
        path = (Path(teacher).parent.parent if pruned else Path(teacher)) / checkpoint.CONFIG_FILE
        try:
            config = read_config(path)
        except UsageError:
            tqdm.write(f"warning: the teacher {teacher} is gone; pictures that it held out count as training pictures")
            break
    return program_flags(config), path


def _teacher_of(config: Mapping[str, Any]) -> str | None:
    flags = program_flags(config)
    return flags.get("teacher") or flags.get("reflow_from")


def _training_data(config: MeasureConfig, trained: Trained) -> ImageDataset | RenderedItems:
    """Open the training data of a checkpoint: pictures, or the rendered items of a registered dataset."""
    source, path = trained.source, trained.source / checkpoint.CONFIG_FILE
    flags = program_flags(trained.config)
    if config.dataset_path is None and not flags.get("dataset_path") and flags.get("dataset") in names("dataset"):
        data = replaced(DataConfig(), checked(DataConfig, flags, path))
        data = data if config.cache_dir is None else replace(data, cache_dir=config.cache_dir)
        registered = open_registered(data)
        if is_items(registered):
            return RenderedItems(registered, trained.flow.space, data.dataset)
        return open_pictures(data, registered)
    recipe = data_arguments(trained.config, path)
    require(
        recipe is not None or config.dataset_path is not None,
        f"{source} does not say how to open its training data: pass a folder with --dataset_path, or --import MODULE "
        "with the Python module that registers its dataset",
    )
    if recipe is None or recipe.image_size is None:
        recipe = replace(recipe or DataArguments(""), **_shape_of(trained))
    recipe = replace(
        recipe,
        dataset_path=config.dataset_path or recipe.dataset_path,
        image_size=recipe.image_size or 0,
        cache_dir=config.cache_dir or recipe.cache_dir,
        split=recipe.split or SPLIT,
    )
    return open_dataset(**vars(recipe))


def _shape_of(trained: Trained) -> dict[str, Any]:
    """Return the arguments of a dataset that the shape of a flow's pictures determines."""
    shape = trained.flow.space.picture_shape
    if shape is None:
        raise UsageError(f"{trained.source} holds a flow of other data than pictures, which cannot be compared")
    channels, height, width = shape
    return {"image_size": min(height, width), "aspect_ratio": f"{width}:{height}", "alpha": channels == RGBA}


def _are_those_of(dataset: ImageDataset | RenderedItems, trained: Trained) -> bool:
    """Return whether a checkpoint was trained on these pictures; for a run with a teacher, it is assumed."""
    taught = _teacher_of(trained.config) is not None
    return trained.run is None or taught or trained.run.dataset == dataset.fingerprint


def _settings(config: EvaluateConfig, trained: Trained, length: float | None, steps: int) -> dict[str, Any]:
    """Return the settings of the samples."""
    return {
        "checkpoint": str(trained.source),
        "weights": trained.weights_name(length),
        "steps": steps,
        "solver": config.solver.solver or "default",
        "time_grid": config.solver.time_grid,
        "guidance_scale": config.solver.guidance_scale,
        "guidance_interval": list(config.solver.guidance_interval),
    }


def _describe(result: dict[str, Any]) -> str:
    did = "{steps}-step pictures: {num_samples}, seed {seed}, against {num_real} of {dataset}"
    framing = result.get("framing")
    size = size_text(framing["width"], framing["height"]) if framing else result["image_size"]
    where = f" ({result['split']} split, {size} px)" if size else ""
    lines = [
        did.format(**result) + f"{where}, {result['weights']}",
        f"  by {result['feature_network']}, resized {result['resize']}",
    ]
    wide = max(38, *map(len, result["distances"]))
    return "\n".join([*lines, *(f"  {name:<{wide}} {value:.5g}" for name, value in result["distances"].items())])


def _known_results(folder: Path) -> list[dict[str, Any]]:
    path = folder / RESULTS_FILE
    try:
        return read_document(path, list[dict[str, Any]]) if path.exists() else []
    except DamageError as error:
        raise UsageError(f"{error}: move it away, or pass --output_dir") from error


def _write_down(folder: Path, result: dict[str, Any]) -> None:
    """Add ``result`` to the saved results, in place of one with the same settings."""
    path, others = folder / RESULTS_FILE, {"distances": None}
    try:
        with locked(folder / LOCK_FILE, LOCK_TIMEOUT, tqdm.write):
            results = [each for each in _known_results(folder) if each | others != result | others]
            replace_file(path, json.dumps([*results, result], indent=1))
    except OSError as error:
        raise RunError(f"could not write {path} ({error}): name another folder with --output_dir") from error


def _plot(folder: Path, results: list[dict[str, Any]], config: MeasureConfig, distance: str) -> list[Path]:
    """Plot ``distance`` over the steps and EMA lengths of this call; return the files."""

    def values(**wanted: Any) -> list[float]:
        return [each["distances"][distance] for each in results if wanted.items() <= each.items()]

    plots = []
    try:
        if len(config.steps) > 1 and not config.ema_lengths:
            line = {distance: (config.steps, values())}
            panel = Panel(line, "distance by number of steps", "steps", distance, log_x=True)
            plots.append(draw_panels(folder / STEPS_FILE, [panel]))
        if len(config.ema_lengths) > 1:
            at = dict.fromkeys(each["steps"] for each in results)
            lines = {f"{steps} step{'s' * (steps > 1)}": (config.ema_lengths, values(steps=steps)) for steps in at}
            x_label = "length of the average, as a share of the run"
            title = "distance by length of the average"
            plots.append(draw_panels(folder / LENGTHS_FILE, [Panel(lines, title, x_label, distance)]))
    except OSError as error:
        raise RunError(f"could not write the plots in {folder} ({error}): make room") from error
    return plots
