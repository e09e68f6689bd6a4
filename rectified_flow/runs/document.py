"""``config.json``: everything a run was made of, each part in its own words, and the flags that start it again."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectified_flow.errors import UsageError, first_line
from rectified_flow.flags import plain
from rectified_flow.registry import DescriptionError, describe
from rectified_flow.runs.config import TrainingConfig

if TYPE_CHECKING:  # the command line reads these files before torch is imported
    from torch import nn
    from torch.utils.data import Dataset


def run_document(
    config: TrainingConfig,
    flow: "nn.Module",
    dataset: "Dataset[Any]",
    flags: Mapping[str, Any] | None = None,
    unused: Collection[str] = (),
) -> dict[str, Any]:
    """What a run really uses.

    Args:
        config: the run's flags.
        flow: with its network.
        dataset: describes itself by a ``recipe``, the arguments of :func:`rectified_flow.open_dataset`, and by a
            ``description`` for a person.
        flags: all flags of the program that built these parts, if a program did.
        unused: flags of the run in whose place the trainer was given a part.
    """
    network = getattr(flow, "network", None)
    parts = {name: value for name, value in _described(flow).items() if name != "network"}
    document = {
        "run": {name: value for name, value in plain(config).items() if name not in unused},
        "data": getattr(dataset, "recipe", None) or {"description": data_description(dataset)},
        "network": None if network is None else _described(network),
        "flow": parts,
    }
    return document if flags is None else document | {"flags": dict(flags)}


def data_description(dataset: "Dataset[Any]") -> str:
    """The dataset in a line for a person."""
    own = getattr(dataset, "description", None)
    return str(own) if own else f"{len(dataset)} items of a {type(dataset).__name__}"  # type: ignore[arg-type]


def program_flags(document: Mapping[str, Any]) -> dict[str, Any]:
    """The flags by name of the program that a ``config.json`` is of; those of a run alone if it was no program's."""
    if "run" not in document:
        return dict(document)  # version 0.1 had nothing but flags
    return dict(document["run"]) | dict(document.get("flags", {}))


def require_flags(document: Mapping[str, Any], path: Path) -> None:
    """Raise a UsageError if the ``config.json`` at ``path`` is of a run that no program started."""
    if "run" in document and "flags" not in document:
        raise UsageError(f"{path} is of a run that no program started, so it has no flags of data and network")


def data_recipe(document: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of :func:`rectified_flow.open_dataset` for the run's data; empty if it cannot open them."""
    source = document.get("data", document)
    names = ("dataset", "dataset_path", "image_size", "split", "cache_dir", "skip_broken_images")
    return {name: source[name] for name in names if name in source} if "dataset" in source else {}


def read_document(path: Path) -> dict[str, Any]:
    """The ``config.json`` at ``path``.

    Raises:
        UsageError: if it cannot be read.
    """
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as a config.json ({first_line(error)})") from error


def upgraded(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """A flow's description in the form of today; version 0.1 had no kinds of spaces and conditions."""
    if "flow" not in description:
        return description
    old = dict(description)
    network = dict(old.pop("network"))
    count, names = network.pop("num_classes"), old.pop("class_names")
    labels = {"labels": {"kind": "Labels", "num_classes": count, "names": names}}
    pixels = {"kind": "Pixels", "shape": old.pop("image_shape"), "horizontal_flip": old.pop("horizontal_flip")}
    if "loss" in old:
        old["distance"] = old.pop("loss")
    return {
        "kind": old.pop("flow"),
        "network": network | {"conditions": {} if count is None else labels},
        "space": pixels,
        "condition_dropout": old.pop("label_dropout"),
        **old,
    }


def _described(part: "nn.Module") -> dict[str, Any]:
    try:
        return describe(part)
    except DescriptionError:
        return {"description": type(part).__name__}
