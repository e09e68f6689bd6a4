"""What a model's card says of the run that trained it, for the Hugging Face hub."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # which its documentation names

from rectified_flow.cli.evaluate import RESULTS_FILE
from rectified_flow.cli.train_flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.cli.trained import Trained, run_folder_of
from rectified_flow.data.synthetic_flowers import SYNTHETIC_FLOWERS
from rectified_flow.flags import command_line, plain
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.saved import TASK
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import DataRecipe, data_recipe, program_flags
from rectified_flow.system.files import read_document

OF_THIS_MACHINE = {"cache_dir", "checkpoint_dir", "import", "output_dir", "pairs_dir", "paths_dir", "resume"}
"""Flags that say where files lie."""
NAMES_OR_PATHS = {"autoencoder", "dataset", "dataset_path", "init_from", "reflow_from", "teacher"}
"""Flags whose path on this machine need not be public; its last part names the data or the run."""
DRAWN_BY = ("num_samples", "steps", "guidance_scale")
"""Keys of a result that a reader needs to compare it with others."""


def card_of(trained: Trained, license_name: str | None, weights: str) -> dict[str, Any]:
    """Arguments of ``generate_model_card`` on the data, the training command, and the evaluation of these weights.

    Args:
        trained: the checkpoint.
        license_name: of the model, as the hub names it.
        weights: those that are saved, by :meth:`Trained.weights_name`.

    Raises:
        UsageError: if the run's ``evaluation.json`` is damaged.
    """
    recipe = data_recipe(trained.config, trained.source / checkpoint.CONFIG_FILE)
    results = _results_of(trained, weights)
    metadata: dict[str, Any] = {
        "license": license_name,
        "datasets": [recipe.dataset] if recipe is not None and _is_on_hub(recipe) else None,
        "tags": ["flow-matching", "mean-flow" if isinstance(trained.flow, FlowMap) else "rectified-flow"],
    }
    if results:
        metadata["model_name"] = run_folder_of(trained.source).resolve().name
        metadata["eval_results"] = [each for result in results for each in _eval_results(result, recipe)]
    return {
        "metadata": {name: value for name, value in metadata.items() if value is not None},
        "dataset": None if recipe is None else _name_of(recipe),
        "command": _command(trained),
        "results": [_row(result) for result in results],
    }


def _is_on_hub(recipe: DataRecipe) -> bool:
    return recipe.dataset_path is None and recipe.dataset != SYNTHETIC_FLOWERS and not _is_path(recipe.dataset)


def _is_path(name: str) -> bool:
    """Whether ``name``, which may also be of the hub, is a file or folder."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return Path(name).exists()


def _name_of(recipe: DataRecipe) -> str:
    """The data for a reader: a folder by its last name only."""
    if recipe.dataset == SYNTHETIC_FLOWERS and recipe.dataset_path is None:
        return "flowers drawn by the program"
    return recipe.dataset if _is_on_hub(recipe) else f"own pictures, {Path(recipe.dataset_path or recipe.dataset).name}"


def _command(trained: Trained) -> str | None:
    """The command that trained it, with the flags that are not the defaults; None if no program did."""
    if "flags" not in trained.config:
        return None
    of_map = isinstance(trained.flow, FlowMap)
    program, config = ("train_mean_flow.py", TrainMeanFlow) if of_map else ("train_oxford.py", TrainRectifiedFlow)
    defaults = plain(config())
    changed = {
        name: _public(name, value)
        for name, value in program_flags(trained.config).items()
        if name in defaults and value != defaults[name] and name not in OF_THIS_MACHINE
    }
    return shlex.join(["python", program, *command_line(changed)])


def _public(name: str, value: Any) -> Any:
    is_path = name in NAMES_OR_PATHS and value is not None and _is_path(str(value))
    return Path(str(value)).name if is_path else value


def _results_of(trained: Trained, weights: str) -> list[dict[str, Any]]:
    """The results of evaluate.py that are of this checkpoint and these weights."""
    path = run_folder_of(trained.source) / RESULTS_FILE
    if not path.exists():
        return []
    return [
        result
        for result in read_document(path, list[dict[str, Any]])
        if Path(result.get("checkpoint", "")).name == trained.source.name and result.get("weights") == weights
    ]


def _eval_results(result: Mapping[str, Any], recipe: DataRecipe | None) -> list[EvalResult]:
    on_hub = recipe is not None and _is_on_hub(recipe)
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=recipe.dataset if recipe is not None and on_hub else "imagefolder",
            dataset_name="unknown" if recipe is None else _name_of(recipe),
            dataset_split=result.get("split"),
            metric_type=metric,
            metric_value=round(value, 6),
            metric_args={name: result[name] for name in DRAWN_BY if name in result},
        )
        for metric, value in _measures(result).items()
    ]


def _measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Without the spreads of others."""
    return {name: value for name, value in result["distances"].items() if not name.endswith("_std")}


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result for the card's table."""
    scale = result.get("guidance_scale", 1)
    guided = f", guidance {scale:g}" if scale != 1 else ""
    return {
        "how": f"{result.get('steps')} steps{guided}, {result.get('num_samples')} pictures",
        "numbers": {name: f"{value:.4g}" for name, value in _measures(result).items()},
    }
