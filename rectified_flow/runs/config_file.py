"""``config.json``: the parts that a run was made of, and the flags that start it again."""

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
class ConfigFile:
    """The contents of a ``config.json``."""

    run: dict[str, Any]
    data: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] | None = None
    flow: dict[str, Any] | None = None
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataArguments:
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


def describe_run(
    config: TrainingConfig,
    flow: "nn.Module",
    dataset: "Dataset[Any]",
    flags: Mapping[str, Any] | None = None,
    unused: Collection[str] = (),
) -> dict[str, Any]:
    """Return the contents of the ``config.json`` of a run.

    Args:
        config: the run's flags.
        flow: the flow with its network.
        dataset: the data. Its attribute ``arguments`` has the arguments of :func:`rectified_flow.open_dataset`, and
            ``description`` a line for the user.
        flags: all flags of the program that built these parts, if a program did.
        unused: flags of the run that have no effect, because the trainer was given a part in their place.
    """
    network = getattr(flow, "network", None)
    document = {
        "run": {name: value for name, value in plain(config).items() if name not in unused},
        "data": getattr(dataset, "arguments", None) or {"description": data_description(dataset)},
        "network": None if network is None else _described(network),
        "flow": {name: value for name, value in _described(flow).items() if name != "network"},
    }
    return document if flags is None else document | {"flags": dict(flags)}


def data_description(dataset: "Dataset[Any]") -> str:
    """Describe a dataset in a line for the user."""
    own = getattr(dataset, "description", None)
    return str(own) if own else f"{len(dataset)} items of a {type(dataset).__name__}"  # type: ignore[arg-type]


def read_config(path: Path) -> dict[str, Any]:
    """Read the ``config.json`` at ``path``.

    Raises:
        UsageError: if it cannot be read or is damaged.
    """
    document = read_document(path, dict[str, Any])
    check_document(document, ConfigFile, path)
    return document


def program_flags(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags by name in a ``config.json``: those of the program that started the run, or of the run alone."""
    return dict(document.get("run", {})) | dict(document.get("flags", {}))


def data_arguments(document: Mapping[str, Any], path: Path) -> DataArguments | None:
    """Return the arguments that open a run's data again, or None if its ``config.json`` has none.

    Args:
        document: the contents of the ``config.json``.
        path: the file, for the error message.

    Raises:
        UsageError: if the arguments are damaged.
    """
    data = document.get("data", {})
    known = {each.name: data[each.name] for each in fields(DataArguments) if each.name in data}
    return check_document(known, DataArguments, path) if "dataset" in data else None


def _described(part: "nn.Module") -> dict[str, Any]:
    try:
        return describe(part)
    except DescriptionError:
        return {"description": type(part).__name__}
