"""evaluate.py: how near a trained flow's pictures are to the training pictures, on all processes together."""

import json
from itertools import product
from pathlib import Path
from typing import Any

from accelerate.utils import set_seed
from tqdm.auto import tqdm

from rectified_flow.cli.flags import EvaluateConfig, MeasureConfig
from rectified_flow.cli.trained import (
    autocast,
    class_names,
    load_average,
    load_trained,
    run_folder_of,
    solver_options,
    weights_name,
)
from rectified_flow.data.catalog import open_dataset
from rectified_flow.data.image_store import ImageDataset
from rectified_flow.distributed.joining import join_processes
from rectified_flow.errors import RunError, UsageError, first_line, require
from rectified_flow.evaluation.evaluator import SPLIT, Evaluator, Generated
from rectified_flow.files import prepare_folder, replace_file
from rectified_flow.flows.flow import Flow
from rectified_flow.pictures import to_grid, write_picture
from rectified_flow.plots import draw_lines
from rectified_flow.report import line
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import data_recipe, program_flags
from rectified_flow.runs.snapshots import find_shares

RESULTS_FILE, NEIGHBOURS_FILE = "evaluation.json", "neighbours.png"
STEPS_FILE, LENGTHS_FILE = "steps.png", "ema_lengths.png"


def evaluate(config: EvaluateConfig) -> None:
    """Compare, print and write down; every process draws and measures its share.

    Raises:
        UsageError: if the checkpoint, its training pictures or the feature network are unavailable.
        RunError: if the results cannot be written.
    """
    state, measure = join_processes(), config.measure
    set_seed(measure.seed)
    flow, source = load_trained(config.model, state)
    options = solver_options(config.solver, flow, source)
    for wanted in measure.ema_lengths:
        find_shares(source, wanted)  # or say now that it cannot be made
    folder = prepare_folder("output_dir", measure.output_dir or run_folder_of(source))
    results = _known_results(folder)
    dataset = _training_pictures(measure, source, flow)
    names = class_names(flow)
    require(
        not names or names == dataset.class_names,
        f"{source} was trained on different classes than {dataset.info['source']}; pass its training images with "
        "--dataset_path",
    )
    if state.is_main_process and not _are_those_of(dataset, source):
        tqdm.write(f"warning: {dataset.info['source']} is not, or no longer, what {source} was trained on")
    evaluator = Evaluator(
        dataset,
        measure.feature_network,
        state,
        num_samples=measure.num_samples,
        seed=measure.seed,
        batch_size=config.model.batch_size,
    )
    new = []
    for length, steps in product(measure.ema_lengths or (None,), measure.steps or (flow.default_steps,)):
        if length is not None:
            load_average(flow, source, length)
        with autocast(config.model, state.device):
            generated = evaluator.generate(flow, **options, steps=steps)
        if not state.is_main_process:
            continue
        settings = _settings(config, source, length, steps) | evaluator.settings
        result = {**settings, "distances": evaluator.distances(generated) | evaluator.scores(generated)}
        results = [*(each for each in results if each | {"distances": None} != settings | {"distances": None}), result]
        new.append(result)
        _write_down(folder, results)
        _show_neighbours(folder, evaluator, generated)
        tqdm.write(_describe(result))
    state.wait_for_everyone()
    if state.is_main_process:
        tqdm.write(line("results", folder / RESULTS_FILE))
        tqdm.write(line("neighbours", f"{folder / NEIGHBOURS_FILE}: a picture in each row, then the nearest real ones"))
        for plot in _plot(folder, new, measure, evaluator.headline):
            tqdm.write(line("plot", plot))


def _training_pictures(config: MeasureConfig, source: Path, flow: Flow) -> ImageDataset:
    recipe = data_recipe(checkpoint.load_document(source, checkpoint.CONFIG_FILE))
    folder = config.dataset_path or recipe.get("dataset_path")
    require(
        bool(recipe) or folder is not None,
        f"{source} does not say how to open its training data: pass a folder with --dataset_path",
    )
    cache_dir = config.cache_dir or recipe.get("cache_dir")
    return open_dataset(
        recipe.get("dataset", ""),
        None if folder is None else Path(folder),
        image_size=recipe.get("image_size") or (flow.space.shape or (0,))[-1],
        cache_dir=None if cache_dir is None else Path(cache_dir),
        skip_broken_images=recipe.get("skip_broken_images", False),
        split=recipe.get("split", SPLIT),
    )


def _are_those_of(dataset: ImageDataset, source: Path) -> bool:
    """Whether a checkpoint was trained on these pictures, as far as it says; a reflow run knows only its pairs."""
    if not (source / checkpoint.STATE_FILE).exists():
        return True
    flags = program_flags(checkpoint.load_document(source, checkpoint.CONFIG_FILE))
    run = checkpoint.load_document(source, checkpoint.STATE_FILE)["run"]
    return flags.get("reflow_from") is not None or run["dataset"] == dataset.fingerprint


def _settings(config: EvaluateConfig, source: Path, length: float | None, steps: int) -> dict[str, Any]:
    """How the pictures were drawn."""
    return {
        "checkpoint": str(source),
        "weights": weights_name(source, length),
        "steps": steps,
        "solver": config.solver.solver or "default",
        "time_grid": config.solver.time_grid,
        "guidance_scale": config.solver.guidance_scale,
        "guidance_interval": list(config.solver.guidance_interval),
    }


def _describe(result: dict[str, Any]) -> str:
    did = "{steps}-step pictures: {num_samples}, seed {seed}, against {num_real} of {dataset}"
    lines = [
        did.format(**result) + f" ({result['split']} split, {result['image_size']} px), {result['weights']}",
        f"  by {result['feature_network']}, resized {result['resize']}",
    ]
    return "\n".join([*lines, *(f"  {name:<38} {value:.5g}" for name, value in result["distances"].items())])


def _known_results(folder: Path) -> list[dict[str, Any]]:
    path = folder / RESULTS_FILE
    try:
        results = json.loads(path.read_text()) if path.exists() else []
        return [dict(each) for each in results]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({first_line(error)}): move it away, or pass --output_dir") from error


def _write_down(folder: Path, results: list[dict[str, Any]]) -> None:
    path = folder / RESULTS_FILE
    try:
        replace_file(path, json.dumps(results, indent=1))
    except OSError as error:
        raise RunError(f"could not write {path} ({error}): name another folder with --output_dir") from error


def _show_neighbours(folder: Path, evaluator: Evaluator, generated: Generated) -> None:
    rows = evaluator.beside_neighbours(generated)
    write_picture(folder / NEIGHBOURS_FILE, to_grid(rows.flatten(0, 1), columns=rows.shape[1]))


def _plot(folder: Path, results: list[dict[str, Any]], config: MeasureConfig, distance: str) -> list[Path]:
    """Plots of ``distance`` over what this call varied."""

    def values(**wanted: Any) -> list[float]:
        return [each["distances"][distance] for each in results if wanted.items() <= each.items()]

    plots = []
    try:
        if len(config.steps) > 1 and not config.ema_lengths:
            line = {distance: (config.steps, values())}
            plots.append(
                draw_lines(folder / STEPS_FILE, line, "distance by number of steps", "steps", distance, log_x=True)
            )
        if len(config.ema_lengths) > 1:
            at = dict.fromkeys(each["steps"] for each in results)
            lines = {f"{steps} step{'s' * (steps > 1)}": (config.ema_lengths, values(steps=steps)) for steps in at}
            x_label = "length of the average, as a share of the run"
            title = "distance by length of the average"
            plots.append(draw_lines(folder / LENGTHS_FILE, lines, title, x_label, distance))
    except OSError as error:
        raise RunError(f"could not write the plots in {folder} ({error}): make room") from error
    return plots
