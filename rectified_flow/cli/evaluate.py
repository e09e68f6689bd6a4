"""evaluate.py: how near a trained flow's pictures are to the training pictures, on all processes together."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm

from rectified_flow.cli.build import guidance_of, open_trained
from rectified_flow.cli.data import check_conditions
from rectified_flow.cli.model_flags import EvaluateConfig
from rectified_flow.data.description import PictureData, with_sources
from rectified_flow.data.open import Pictures
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Comparison, Evaluator, suited
from rectified_flow.evaluation.features import RealData, RenderedItems, coloured_like_samples
from rectified_flow.evaluation.heldout import HeldOutPictures, divided
from rectified_flow.flags import plain, with_values
from rectified_flow.flows.solvers import NO_GUIDANCE
from rectified_flow.load import RESULTS_FILE, Trained, autocast, grid_name, model_hash, read_results
from rectified_flow.registry import Document
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.pictures import GREY, RGBA
from rectified_flow.system.artifact import claim
from rectified_flow.system.files import locked, prepare_folder, replace_file, writing
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.system.terminal import line, lines, shown, size_text

NEIGHBOURS_FILE = "neighbours.png"
FEW_SAMPLES = 2048  # the number of features of Inception: the covariance of fewer samples is singular


def evaluate(config: EvaluateConfig) -> None:
    """Compare samples with the training data, and print and save the results; each process takes a share."""
    measure = config.samples
    if "likelihood" in measure.metric and config.solver.autoguidance is None:
        config = with_values(config, {"autoguidance": 1.0})  # a likelihood is that of the flow itself
    state, trained, options = open_trained(config)
    if "likelihood" in measure.metric and options.keys() & {"solver", "grid", "guidance"}:
        own = "is measured without guidance, by a solver of its own"
        raise UsageError(f"--metric likelihood {own}: pass --guidance_scale 1, and neither --solver nor --time_grid")
    flow, folder = trained.flow, measure.output_dir or trained.run_folder
    # Results that cannot be read or written end here, before hours of sampling.
    on_main(state, lambda: claim(prepare_folder("output_dir", folder), (RESULTS_FILE, NEIGHBOURS_FILE)))
    read_results(folder)
    dataset, held_out, losses = real_data(
        trained, dataset_path=measure.dataset_path, source_path=measure.source_path, cache_dir=measure.cache_dir
    )
    _check_data(trained, dataset, state)
    evaluator = Evaluator(
        coloured_like_samples(dataset, flow.space),
        measure.feature_network,
        num_samples=measure.num_samples,
        seed=measure.seed,
        batch_size=config.model.batch_size,
        held_out=None if held_out is None else coloured_like_samples(held_out, flow.space),
        metrics=measure.metric or suited(flow.space.medium.metrics, flow, dataset, held_out),
        medium=flow.space.medium,
    )
    settings = _settings(config, trained, options, state)
    texts = {"results": str(folder / RESULTS_FILE)}
    with autocast(config.model.mixed_precision, state.device):
        loss = {} if losses is None else losses.measure(flow)
    for steps in dict.fromkeys(measure.steps) or (flow.default_steps,):
        comparison = Comparison(evaluator, flow, {**options, "steps": steps})
        with autocast(config.model.mixed_precision, state.device):
            numbers = evaluator.measure(comparison, required=measure.metric) | loss
            if not state.is_main_process:
                continue
            rows = evaluator.beside_neighbours(comparison) if evaluator.metrics else None
        result = {**settings, "steps": steps, **evaluator.settings, "distances": numbers}
        _write_down(folder, result)
        tqdm.write(_summary(result, generates=set(measure.metric) != {"likelihood"}))
        if rows is not None:
            write_picture(folder / NEIGHBOURS_FILE, to_grid(rows.flatten(0, 1), columns=rows.shape[1]))
            nearest = "the pictures most like copies, each before the training pictures that are nearest to it"
            texts["neighbours"] = f"{folder / NEIGHBOURS_FILE}: {nearest}"
    state.wait_for_everyone()
    if state.is_main_process:
        tqdm.write(lines(texts))


def _check_data(trained: Trained, dataset: RealData, state: PartialState) -> None:
    """Check that all processes read one dataset that fits the flow, and warn if it is not that of the run."""
    check_equal(state, lambda: {"the number of pictures": len(dataset), "their fingerprint": dataset.fingerprint})
    check_conditions(trained.flow, trained.source, dataset)
    check_fits(trained, dataset, state, "--dataset_path")


def check_fits(trained: Trained, dataset: RealData, state: PartialState, flag: str) -> None:
    """Check that a dataset is of the kind that a flow was trained on, and warn if it is not that of the run.

    Args:
        trained: the run.
        dataset: the dataset.
        state: the processes.
        flag: the flag that names the dataset.
    """
    if (problem := trained.flow.space.medium.misfit(dataset.space.medium)) is not None:
        raise UsageError(f"{flag} {dataset.info.source} {problem}")
    # The fingerprint in a run with a teacher is that of the teacher's data, and covers the sources of a translation.
    lacks_sources = getattr(trained.data, "sources", None) is not None and getattr(dataset, "source", None) is None
    known = None if trained.run is None or trained.is_taught or lacks_sources else trained.run.dataset
    if known not in (None, dataset.fingerprint):
        state.print(shown(f"warning: {dataset.info.source} is not, or no longer, what {trained.source} was trained on"))


def _settings(config: EvaluateConfig, trained: Trained, options: Document, state: PartialState) -> Document:
    """Return the settings of the samples that must match for two results to be comparable."""
    solver, scale = config.solver, guidance_of(config.solver, trained.flow).scale
    guidance = options.get("guidance", NO_GUIDANCE)
    autoguidance = guidance.autoguidance
    settings: Document = {
        "checkpoint": str(trained.source),
        "weights": trained.weights,
        "model": model_hash(trained.flow),
    }
    settings |= plain(solver) | {"solver": solver.solver or "default", "guidance_scale": scale}
    settings |= {"time_grid": grid_name(trained.flow, options), "autoguidance": autoguidance}
    settings |= {"guidance_interval": list(guidance.interval)}
    settings |= {"mixed_precision": config.model.mixed_precision}
    if autoguidance != 1:
        settings["early_checkpoint"] = str(on_main(state, lambda: checkpoint.early_of(trained.source)))
    return settings


def real_data(
    trained: Trained,
    *,
    dataset_path: Path | None = None,
    source_path: Path | None = None,
    cache_dir: Path | None = None,
    opens_sources: bool = True,
) -> tuple[RealData, ImageDataset | None, HeldOutPictures | None]:
    """Return the training data of a run, its held-out pictures, and those of the held-out loss. Collective.

    Args:
        trained: the run.
        dataset_path: folder of the training pictures, if it has moved.
        source_path: folder of the sources, if it has moved.
        cache_dir: folder of decoded images, if it has moved.
        opens_sources: whether to open the folder of sources, too.
    """
    data, space = trained.data or _data_of_shape(trained, dataset_path), trained.flow.space
    if source_path is not None and getattr(data, "sources", None) is None:
        raise UsageError(f"--source_path has no effect: {trained.source} was trained without a folder of sources")
    data = data.moved(dataset_path=dataset_path, source_path=source_path, cache_dir=cache_dir)
    if not isinstance(data, PictureData):
        return RenderedItems(with_sources(data.open(), data, space), space, data.name), None, None
    data = data if opens_sources else replace(data, sources=None)
    if dataset_path is not None and data.pictures.exclude:
        data = _with_fitting_list(data)
    found = data.find()
    pictures = with_sources(data.open(found, trained.flow.conditions), data, space)
    training, held_out = divided(pictures, data.holdout, data.seed)
    if held_out is None or trained.is_taught:  # a teacher's run learns no velocity on pictures
        return training, held_out, None
    return training, held_out, HeldOutPictures(training, held_out, trained.flags["seed"])


def _with_fitting_list(data: PictureData) -> PictureData:
    """Return the data of another folder, with the `exclude` list of the run only if the folder has all of its files."""
    listed, whole = data.pictures.exclude, replace(data, pictures=replace(data.pictures, exclude=()))
    name = whole.find().name  # raises an error if the folder is invalid, so that one below concerns the list
    try:
        data.find()
    except UsageError:
        text = f"the run's --exclude list is ignored, as {name} lacks some of its files"
        PartialState().print(line("pictures", text))
        return whole
    text = f"left out the {len(listed):,} files or subfolders of the run's --exclude list"
    PartialState().print(line("pictures", text))
    return data


def _data_of_shape(trained: Trained, dataset_path: Path | None) -> PictureData:
    """Return the data of a run that another program trained, framed by their shape."""
    shape = trained.flow.space.medium.picture_shape
    if not shape or dataset_path is None:
        raise UsageError(f"{trained.source} records no pictures: pass `dataset_path`, or `import` with its dataset")
    channels, height, width = shape
    ratio = f"{width}:{height}"
    has_alpha, is_grey = channels == RGBA, channels == GREY
    return PictureData(Pictures(image_size=min(height, width), aspect_ratio=ratio, alpha=has_alpha, grey=is_grey))


def _summary(result: dict[str, Any], *, generates: bool = True) -> str:
    """Return lines on a result, whose metrics may need no samples."""
    framing = result.get("framing")
    size = size_text(framing["width"], framing["height"]) if framing else result["image_size"]
    where = f" ({result['split']} split, {size} px)" if size else ""
    did = "{steps}-step pictures: {num_samples}, seed {seed}" if generates else "{steps} steps, seed {seed}"
    did += ", against {num_real} of {dataset}{where}, {weights}"
    did += ", autoguidance {autoguidance:g}" * (result.get("autoguidance", 1) != 1)
    network = ["  by {feature_network}, resized {resize}".format(**result)] if "feature_network" in result else []
    wide = max([38, *map(len, result["distances"])])
    numbers = [f"  {name:<{wide}} {value:.5g}" for name, value in result["distances"].items()]
    few = result["num_samples"] < FEW_SAMPLES and any("frechet" in name for name in result["distances"])
    text = f"  of fewer than {FEW_SAMPLES:,} samples, a Fréchet distance is too large: compare equal numbers only"
    return "\n".join([did.format(**result, where=where), *network, *numbers, *([text] if few else [])])


def _write_down(folder: Path, result: dict[str, Any]) -> None:
    """Add ``result`` to the saved results, or its numbers to those of a result with the same settings."""
    path, unknown = folder / RESULTS_FILE, {"distances": None}
    with writing(path), locked(folder, "evaluation"):
        results = read_results(folder)
        known = [each for each in results if each | unknown == result | unknown]
        others = [each for each in results if each not in known]
        numbers = {name: number for each in [*known, result] for name, number in each["distances"].items()}
        replace_file(path, json.dumps([*others, result | {"distances": numbers}], indent=1))
