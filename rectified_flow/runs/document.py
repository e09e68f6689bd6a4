"""``config.json``: everything a run was made of, each part in its own words, and the flags that start it again."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rectified_flow.data.framing import Crop
from rectified_flow.flags import plain
from rectified_flow.registry import DescriptionError, describe
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.files import check_document, read_document

if TYPE_CHECKING:  # the command line reads these files before torch is imported
    from torch import nn
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class RunDocument:
    """The parts of a ``config.json``."""

    run: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] | None = None
    flow: dict[str, Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataRecipe:
    """The arguments of :func:`rectified_flow.open_dataset` that open a run's data again."""

    dataset: str
    dataset_path: Path | None = None
    image_size: int | None = None
    split: str | None = None
    cache_dir: Path | None = None
    skip_broken_images: bool = False
    aspect_ratio: str = "1:1"
    crop: Crop = "center"
    alpha: bool = False

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ValueError("an image has a side above 0")


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


def data_recipe(document: Mapping[str, Any], path: Path) -> DataRecipe | None:
    """What opens the data of the run whose ``config.json`` is at ``path``; None if nothing can.

    Raises:
        UsageError: if the recipe is damaged.
    """
    source = document.get("data", document)
    known = {each.name: source[each.name] for each in fields(DataRecipe) if each.name in source}
    return check_document(known, DataRecipe, path) if "dataset" in source else None


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` at ``path``.

    Raises:
        UsageError: if it cannot be read, or is none.
    """
    document = read_document(path, dict[str, Any])
    if "run" in document:  # version 0.1 had nothing but flags
        check_document(document, RunDocument, path)
    return document


def _described(part: "nn.Module") -> dict[str, Any]:
    try:
        return describe(part)
    except DescriptionError:
        return {"description": type(part).__name__}
