"""evaluate.py: how near a trained flow's pictures are to the training pictures, on all processes together."""

import json
from pathlib import Path
from typing import Any

from accelerate import PartialState
from tqdm.auto import tqdm

from rectified_flow.cli.build import guidance_of, open_trained
from rectified_flow.cli.config import EvaluateConfig, MeasureConfig, TrainConfig
from rectified_flow.cli.data import add_degradation, check_conditions, divided, find_data, open_data
from rectified_flow.cli.record import config_in
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import scores  # noqa: F401 -- it registers scores
from rectified_flow.evaluation.evaluator import Comparison, Evaluator
from rectified_flow.evaluation.features import RealData, RenderedItems
from rectified_flow.evaluation.heldout import HeldOutPictures
from rectified_flow.flags import flags_in, name_of, plain, replaced
from rectified_flow.load import RESULTS_FILE, Trained, autocast, model_hash, read_results
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.pictures import RGBA
from rectified_flow.system.files import locked, prepare_folder, replace_file, writing
from rectified_flow.system.outputs import LOCK, claim
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.system.terminal import lines, size_text

NEIGHBOURS_FILE = "neighbours.png"


def evaluate(config: EvaluateConfig) -> None:
    """Compare samples with the training data, and print and save the results; each process takes a share."""
    measure = config.samples
    state, trained, options = open_trained(config)
    flow, folder = trained.flow, measure.output_dir or trained.run_folder
    # Results that cannot be read or written end here, before hours of sampling.
    on_main(state, lambda: claim(prepare_folder("output_dir", folder), (RESULTS_FILE, NEIGHBOURS_FILE)))
    read_results(folder)
    dataset, held_out, losses = real_data(measure, trained, state)
    _check_data(trained, dataset, state)
    evaluator = Evaluator(
        dataset,
        measure.feature_network,
        num_samples=measure.num_samples,
        seed=measure.seed,
        batch_size=config.model.batch_size,
        held_out=held_out,
        metrics=measure.metric or flow.space.medium.metrics,
    )
    settings = _settings(config, trained, state)
    texts = {"results": str(folder / RESULTS_FILE)}
    with autocast(config.model.mixed_precision, state.device):
        loss = {} if losses is None else losses.measure(flow)
    for steps in dict.fromkeys(measure.steps) or (flow.default_steps,):
        comparison = Comparison(evaluator, flow, {**options, "steps": steps})
        with autocast(config.model.mixed_precision, state.device):
            numbers = evaluator.measure(comparison) | loss
            if not state.is_main_process:
                continue
            rows = evaluator.beside_neighbours(comparison) if evaluator.metrics else None
        result = {**settings, "steps": steps, **evaluator.settings, "distances": numbers}
        _write_down(folder, result)
        tqdm.write(_describe(result))
        if rows is not None:
            write_picture(folder / NEIGHBOURS_FILE, to_grid(rows.flatten(0, 1), columns=rows.shape[1]))
            nearest = "the pictures most like copies, each before the training pictures that are nearest to it"
            texts["neighbours"] = f"{folder / NEIGHBOURS_FILE}: {nearest}"
    state.wait_for_everyone()
    if state.is_main_process:
        tqdm.write(lines(texts))


def _check_data(trained: Trained, dataset: RealData, state: PartialState) -> None:
    """Check that all processes read one dataset that fits the flow, and warn if the run was trained on another."""
    check_equal(state, lambda: {"the number of pictures": len(dataset), "their fingerprint": dataset.fingerprint})
    check_conditions(trained.flow, trained.source, dataset)
    if (problem := trained.flow.space.medium.misfit(dataset.space.medium)) is not None:
        raise UsageError(f"--dataset_path {dataset.info.source} {problem}")
    # The fingerprint in a run with a teacher is that of the teacher's data, not of the pictures.
    is_distilled = flags_in(trained.config).get("teacher") is not None
    known = None if trained.run is None or is_distilled else trained.run.dataset
    if known not in (None, dataset.fingerprint):
        state.print(f"warning: {dataset.info.source} is not, or no longer, what {trained.source} was trained on")


def _settings(config: EvaluateConfig, trained: Trained, state: PartialState) -> dict[str, Any]:
    """Return the settings of the samples that must match for two results to be comparable."""
    solver, scale = config.solver, guidance_of(config.solver, trained.flow).scale
    settings = {"checkpoint": str(trained.source), "weights": trained.weights, "model": model_hash(trained.flow)}
    settings |= plain(solver) | {"solver": solver.solver or "default", "guidance_scale": scale}
    settings |= {"mixed_precision": config.model.mixed_precision}
    if solver.autoguidance != 1:
        settings["early_checkpoint"] = str(on_main(state, lambda: checkpoint.early_of(trained.source)))
    return settings


def real_data(
    measure: MeasureConfig, trained: Trained, state: PartialState
) -> tuple[RealData, ImageDataset | None, HeldOutPictures | None]:
    """Return the training data of a run, its held-out pictures, and those of the held-out loss. Collective."""
    config = config_in(trained.config, trained.source, TrainConfig)
    if "dataset" not in flags_in(trained.config):
        config = replaced(config, _framing_of(trained, measure))
    places = {name: getattr(measure, name) for name in ("dataset_path", "cache_dir", "source_path")}
    config = replaced(config, {name: path for name, path in places.items() if path is not None})
    found = find_data(config.data)
    if not isinstance(found, ImageSource):
        items = add_degradation(found, config.source.degrade, trained.flow.space, config.data.data_seed or 0)
        return RenderedItems(items, trained.flow.space, name_of(config.data.dataset)), None, None
    pictures = open_data(config.run_data, found, trained.flow.conditions)
    pictures = add_degradation(pictures, config.source.degrade, trained.flow.space, config.data.data_seed or 0)
    training, held_out = divided(pictures, config.data)
    if held_out is None or config.teacher.teacher is not None:  # a teacher's run learns no velocity on pictures
        return training, held_out, None
    return training, held_out, HeldOutPictures(training, held_out, config.run.seed)


def _framing_of(trained: Trained, measure: MeasureConfig) -> dict[str, Any]:
    """Return the flags of the pictures of a run that another program trained, by the shape of its data."""
    shape = trained.flow.space.medium.picture_shape
    if not shape or measure.dataset_path is None:
        raise UsageError(f"{trained.source} records no pictures: pass --dataset_path, or --import with its dataset")
    channels, height, width = shape
    return {"image_size": min(height, width), "aspect_ratio": f"{width}:{height}", "alpha": channels == RGBA}


def _describe(result: dict[str, Any]) -> str:
    """Return lines on a result."""
    framing = result.get("framing")
    size = size_text(framing["width"], framing["height"]) if framing else result["image_size"]
    where = f" ({result['split']} split, {size} px)" if size else ""
    did = "{steps}-step pictures: {num_samples}, seed {seed}, against {num_real} of {dataset}{where}, {weights}"
    network = ["  by {feature_network}, resized {resize}".format(**result)] if "feature_network" in result else []
    wide = max(38, *map(len, result["distances"]))
    numbers = [f"  {name:<{wide}} {value:.5g}" for name, value in result["distances"].items()]
    return "\n".join([did.format(**result, where=where), *network, *numbers])


def _write_down(folder: Path, result: dict[str, Any]) -> None:
    """Add ``result`` to the saved results, or its numbers to those of a result with the same settings."""
    path, unknown = folder / RESULTS_FILE, {"distances": None}
    with writing(path), locked(folder / LOCK):
        results = read_results(folder)
        known = [each for each in results if each | unknown == result | unknown]
        others = [each for each in results if each not in known]
        numbers = {name: number for each in [*known, result] for name, number in each["distances"].items()}
        replace_file(path, json.dumps([*others, result | {"distances": numbers}], indent=1))
