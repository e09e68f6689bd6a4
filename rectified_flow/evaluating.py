"""What evaluate.py does: how near a trained flow's pictures are to the training pictures, on all processes together."""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rectified_flow import checkpoint
from rectified_flow.averages import LONGEST, SHORTEST, find_shares
from rectified_flow.data import ImageDataset, open_dataset
from rectified_flow.errors import RunError, UsageError, first_line, require
from rectified_flow.evaluation.evaluator import SPLIT, Evaluator, Generated
from rectified_flow.evaluation.features import FeatureNetwork
from rectified_flow.files import replace_file
from rectified_flow.flows.images import to_grid, write_picture
from rectified_flow.plots import draw_lines
from rectified_flow.processes.joining import join_processes
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

RESULTS_FILE, NEIGHBOURS_FILE = "evaluation.json", "neighbours.png"
STEPS_FILE, LENGTHS_FILE = "steps.png", "ema_lengths.png"


@dataclass(frozen=True)
class EvaluationFlags:
    num_samples: int = 10_000
    """Pictures to draw for each number; fewer make the Fréchet distance larger, so compare equal numbers only."""
    steps: tuple[int, ...] = ()
    """Intervals from noise to picture, an evaluation for each (default: 16 for a rectified flow, 1 for a mean flow)."""
    feature_network: FeatureNetwork = "inception"
    """What pictures are compared by: inception, for FID and KID, or efficientnet_lite0, which needs no download."""
    ema_lengths: tuple[float, ...] = ()
    """Instead of the averaged weights, power-function averages of these lengths, as shares of the run; --power_ema."""
    seed: int = 0
    """Of the pictures, and of the subsets of the kernel distance."""
    dataset_path: Path | None = None
    """Folder of the training pictures, if it has moved since."""
    cache_dir: Path | None = None
    """Where decoded images are kept, if it has moved since."""
    output_dir: Path | None = None
    """Where evaluation.json goes (default: the run's folder)."""


@dataclass(frozen=True)
class EvaluateConfig(PrecisionFlags, SolverFlags, EvaluationFlags, ModelFlags):
    """A call of evaluate.py.

    Raises:
        UsageError: where a value makes no sense.
    """

    def __post_init__(self) -> None:
        check_common(self)
        require(self.num_samples >= 2, f"--num_samples is {self.num_samples}; a distance needs at least 2")
        require(all(steps > 0 for steps in self.steps), f"--steps is {self.steps}; all must be above 0")
        for name in ("steps", "ema_lengths"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"--{name} is {values}; each once will do")
        require(
            all(SHORTEST <= length <= LONGEST for length in self.ema_lengths),
            f"--ema_lengths is {self.ema_lengths}; all must be from {SHORTEST} to {LONGEST}",
        )


def evaluate(config: EvaluateConfig) -> None:
    """Compare, print and write down; every process draws and looks at its share.

    Raises:
        UsageError: if the checkpoint, its training pictures or the feature network are not to be had.
        RunError: if the results cannot be written.
    """
    state = join_processes()
    flow, source = load_flow(config, config.mixed_precision, state)
    how = solver_options(config, flow, source)
    for wanted in config.ema_lengths:
        find_shares(source, wanted)  # or say now that it cannot be made
    folder = prepare_folder("output_dir", config.output_dir or run_folder_of(source))
    results = _known_results(folder)
    dataset = _training_pictures(config, source)
    require(
        not flow.class_names or flow.class_names == dataset.class_names,
        f"{source} was trained on other classes than those of {dataset.info['source']}: name its training pictures "
        "with --dataset_path",
    )
    if state.is_main_process and not _are_those_of(dataset, source):
        tqdm.write(f"warning: {dataset.info['source']} is not, or no longer, what {source} was trained on")
    evaluator = Evaluator(
        dataset,
        config.feature_network,
        state,
        num_samples=config.num_samples,
        seed=config.seed,
        batch_size=config.batch_size,
    )
    new = []
    for length, steps in product(config.ema_lengths or (None,), config.steps or (flow.default_steps,)):
        if length is not None:
            load_average(flow, source, length)
        with autocast(config, state.device):
            generated = evaluator.generate(flow, **how, steps=steps)
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
        tqdm.write(f"{'results':<11} {folder / RESULTS_FILE}")
        tqdm.write(f"{'neighbours':<11} {folder / NEIGHBOURS_FILE}: a picture in each row, then the nearest real ones")
        for plot in _plot(folder, new, config, evaluator.headline):
            tqdm.write(f"{'plot':<11} {plot}")


def _training_pictures(config: EvaluateConfig, source: Path) -> ImageDataset:
    trained = checkpoint.load_document(source, checkpoint.CONFIG_FILE)

    def folder(name: str) -> Path | None:
        given = getattr(config, name) or trained[name]
        return None if given is None else Path(given)

    return open_dataset(
        trained["dataset"],
        folder("dataset_path"),
        image_size=trained["image_size"],
        cache_dir=folder("cache_dir"),
        skip_broken_images=trained["skip_broken_images"],
        split=SPLIT,
    )


def _are_those_of(dataset: ImageDataset, source: Path) -> bool:
    """Whether a checkpoint was trained on these pictures, as far as it says; one that reflows knows only its pairs."""
    if not (source / checkpoint.STATE_FILE).exists():
        return True
    trained = checkpoint.load_document(source, checkpoint.CONFIG_FILE)
    run = checkpoint.load_document(source, checkpoint.STATE_FILE)["run"]
    return trained.get("reflow_from") is not None or run["dataset"] == dataset.fingerprint


def _settings(config: EvaluateConfig, source: Path, length: float | None, steps: int) -> dict[str, Any]:
    """How the pictures were drawn."""
    return {
        "checkpoint": str(source),
        "weights": weights_of(source, length),
        "steps": steps,
        "solver": config.solver or "default",
        "time_grid": config.time_grid,
        "guidance_scale": config.guidance_scale,
        "guidance_interval": list(config.guidance_interval),
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


def _plot(folder: Path, results: list[dict[str, Any]], config: EvaluateConfig, distance: str) -> list[Path]:
    """Plots of ``distance`` over what this call varied."""

    def values(**wanted: Any) -> list[float]:
        return [each["distances"][distance] for each in results if wanted.items() <= each.items()]

    plots = []
    try:
        if len(config.steps) > 1 and not config.ema_lengths:
            line = {distance: (config.steps, values())}
            plots.append(draw_lines(folder / STEPS_FILE, line, "how few steps will do", "steps", distance, log_x=True))
        if len(config.ema_lengths) > 1:
            at = dict.fromkeys(each["steps"] for each in results)
            lines = {f"{steps} step{'s' * (steps > 1)}": (config.ema_lengths, values(steps=steps)) for steps in at}
            x_label = "length of the average, as a share of the run"
            title = "which average of the weights is the best"
            plots.append(draw_lines(folder / LENGTHS_FILE, lines, title, x_label, distance))
    except OSError as error:
        raise RunError(f"could not write the plots in {folder} ({error}): make room") from error
    return plots
