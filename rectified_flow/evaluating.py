"""What evaluate.py does: how near a trained flow's pictures are to the training pictures, on all processes together."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow import checkpoint, randomness
from rectified_flow.data import ImageDataset, open_dataset
from rectified_flow.errors import RunError, UsageError, first_line, require
from rectified_flow.evaluation.distances import frechet_distance, kernel_distance, manifold_scores, nearest
from rectified_flow.evaluation.features import FeatureNetwork, Features, average_colours, load_features
from rectified_flow.evaluation.reference import reference_features
from rectified_flow.files import replace_file
from rectified_flow.flows import Flow
from rectified_flow.flows.drawing import draw
from rectified_flow.flows.images import to_grid, write_picture
from rectified_flow.processes.collectives import gather_interleaved
from rectified_flow.processes.joining import join_processes
from rectified_flow.progress import progress_bar
from rectified_flow.trained import (
    ModelFlags,
    PrecisionFlags,
    SolverFlags,
    autocast,
    check_common,
    load_flow,
    prepare_folder,
    run_folder_of,
    solver_options,
)

RESULTS_FILE, NEIGHBOURS_FILE = "evaluation.json", "neighbours.png"
SHOWN, NEIGHBOURS_SHOWN = 8, 5
SPLIT = "train"


@dataclass(frozen=True)
class EvaluationFlags:
    num_samples: int = 10_000
    """Pictures to draw for each number; fewer make the Fréchet distance larger, so compare equal numbers only."""
    steps: tuple[int, ...] = ()
    """Intervals from noise to picture, an evaluation for each (default: 16 for a rectified flow, 1 for a mean flow)."""
    feature_network: FeatureNetwork = "inception"
    """What pictures are compared by: inception, for FID and KID, or efficientnet_lite0, which needs no download."""
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


@dataclass(frozen=True)
class Evaluation:
    """A model, the pictures it was trained on, and what both are seen through.

    Args:
        config: the call.
        state: of the processes.
        flow: on the device.
        dataset: the training pictures.
        features: in which the two are compared, the first of them the one that names the neighbours.
    """

    config: EvaluateConfig
    state: PartialState
    flow: Flow
    dataset: ImageDataset
    features: Sequence[Features]

    def reference(self) -> list[Tensor]:
        """Features of the training pictures."""
        share = -(-len(self.dataset) // self.state.num_processes)
        result = []
        for each in self.features:
            with self._bar(share, f"training pictures, {each.name}") as bar:
                result.append(
                    reference_features(
                        self.dataset,
                        each,
                        self.state.device,
                        rank=self.state.process_index,
                        world_size=self.state.num_processes,
                        gather=gather_interleaved,
                        progress=bar.update,
                        batch_size=self.config.batch_size,
                    )
                )
        return result

    def generated(self, how: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
        """Features of as many generated pictures as asked for, and the first few pictures."""
        total, world = self.config.num_samples, self.state.num_processes
        mine = [(self.state.process_index + world * i) % total for i in range(-(-total // world))]
        parts: list[list[Tensor]] = [[] for _ in self.features]
        first: list[Tensor] = []
        batches = draw(
            self.flow,
            mine,
            seed=self.config.seed,
            batch_size=self.config.batch_size,
            classes=self._labels(),
            **how,
        )
        with (
            self._bar(len(mine), f"{how['steps']} step{'s' * (how['steps'] > 1)}") as bar,
            autocast(self.config, self.state.device),
        ):
            for numbers, pictures in batches:
                with torch.no_grad(), torch.autocast(self.state.device.type, enabled=False):
                    for part, each in zip(parts, self.features, strict=True):
                        part.append(each.extract(pictures).cpu())
                if len(numbers) * len(first) < SHOWN:
                    first.append(pictures.cpu())
                bar.update(len(numbers))
        shown = gather_interleaved(torch.cat(first)[:SHOWN], min(SHOWN, total))
        return [gather_interleaved(torch.cat(part), total) for part in parts], shown

    def _labels(self) -> list[int]:
        """The training pictures' labels in a random order, so that any number of them has their shares."""
        if self.flow.num_classes is None:
            return []
        order = torch.randperm(len(self.dataset), generator=randomness.generator("cpu", self.config.seed, "labels"))
        return [int(label) for label in self.dataset.labels[order.numpy()]]

    def _bar(self, total: int, doing: str) -> "tqdm[Any]":
        return progress_bar(total=total, desc=doing, unit="img", disable=not self.state.is_main_process)


def evaluate(config: EvaluateConfig) -> None:
    """Compare, print and write down; every process draws and looks at its share.

    Raises:
        UsageError: if the checkpoint, its training pictures or the feature network are not to be had.
        RunError: if the results cannot be written.
    """
    state = join_processes()
    flow, source = load_flow(config, state)
    how = solver_options(config, flow, source)
    folder = prepare_folder("output_dir", config.output_dir or run_folder_of(source))
    results = _known_results(folder)
    dataset = _training_pictures(config, source)
    require(
        not flow.class_names or flow.class_names == dataset.class_names,
        f"{source} was trained on other classes than those of {dataset.info['source']}: name its training pictures "
        "with --dataset_path",
    )
    require(len(dataset) >= 2, f"{dataset.info['source']} has a single picture; a distance needs at least 2")
    features = [load_features(config.feature_network, state.device), average_colours()]
    evaluation = Evaluation(config, state, flow, dataset, features)
    real = evaluation.reference()
    for steps in config.steps or (flow.default_steps,):
        generated, shown = evaluation.generated(how | {"steps": steps})
        if not state.is_main_process:
            continue
        result = _settings(config, source, dataset, features[0], steps)
        result["distances"] = _compare(features, real, generated, config.seed)
        others = [each for each in results if each | {"distances": None} != result | {"distances": None}]
        results = [*others, result]
        _write_down(folder, results)
        near = nearest(generated[0][: len(shown)], real[0], NEIGHBOURS_SHOWN)
        write_picture(folder / NEIGHBOURS_FILE, _beside_neighbours(shown, near, dataset))
        tqdm.write(_describe(result))
    state.wait_for_everyone()
    if state.is_main_process:
        tqdm.write(f"{'results':<11} {folder / RESULTS_FILE}")
        tqdm.write(f"{'neighbours':<11} {folder / NEIGHBOURS_FILE}: a picture in each row, then the nearest real ones")


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


def _settings(
    config: EvaluateConfig, source: Path, dataset: ImageDataset, features: Features, steps: int
) -> dict[str, Any]:
    """What was done, by which a number can be compared with another."""
    return {
        "checkpoint": str(source),
        "weights": checkpoint.best_weights(source),
        "steps": steps,
        "solver": config.solver or "default",
        "time_grid": config.time_grid,
        "guidance_scale": config.guidance_scale,
        "guidance_interval": list(config.guidance_interval),
        "feature_network": features.name,
        "resize": features.resize,
        "dataset": dataset.info["source"],
        "split": SPLIT,
        "image_size": dataset.info["image_size"],
        "num_real": len(dataset),
        "num_samples": config.num_samples,
        "seed": config.seed,
    }


def _compare(
    features: Sequence[Features], real: Sequence[Tensor], generated: Sequence[Tensor], seed: int
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for each, theirs, ours in zip(features, real, generated, strict=True):
        numbers[each.frechet_name] = frechet_distance(theirs, ours)
        numbers[each.kernel_name], numbers[f"{each.kernel_name}_std"] = kernel_distance(theirs, ours, seed)
    return numbers | manifold_scores(real[0], generated[0])


def _describe(result: dict[str, Any]) -> str:
    did = "{steps}-step pictures: {num_samples}, seed {seed}, against {num_real} of {dataset}"
    lines = [
        did.format(**result) + f" ({result['split']} split, {result['image_size']} px)",
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


def _beside_neighbours(shown: Tensor, near: Tensor, dataset: ImageDataset) -> np.ndarray[Any, np.dtype[np.uint8]]:
    real = dataset.__getitems__(near.flatten().tolist())["images"].unflatten(0, near.shape)
    return to_grid(torch.cat((shown[:, None], real), dim=1).flatten(0, 1), columns=1 + near.shape[1])
