"""Load trained flows from their checkpoints, and set them up for sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypeVar

from rectified_flow.data.description import PictureData, RunData, described_data
from rectified_flow.errors import UsageError
from rectified_flow.flows import mean, rectified  # noqa: F401  they register the flows
from rectified_flow.flows.flow import Flow, network_of, sampling_defaults
from rectified_flow.networks import unet  # noqa: F401  it registers the network
from rectified_flow.registry import Document, build
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE, RunIdentity
from rectified_flow.runs.folder import is_run, read_config
from rectified_flow.runs.training_config import CHECKPOINTS
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.system.artifact import read_manifest
from rectified_flow.system.files import check_document, read_document

RESULTS_FILE = "evaluation.json"  # the results of evaluate.py, in a run's folder
RESULT_TEXTS = ("checkpoint", "weights", "model")  # settings of a result that are texts
F = TypeVar("F", bound=Flow, default=Flow)


def load_flow(path: str | Path, kind: type[F] = Flow) -> F:  # type: ignore[assignment]
    """Load the flow of a checkpoint, or of a run's newest, ready to sample.

    Args:
        path: a checkpoint or a run's folder. Averaged weights are used if there are any.
        kind: the class that the flow must have.

    Raises:
        UsageError: if there is no checkpoint, it is damaged, its flow is of another class, or a class that it names is
            not registered.
    """
    trained = read_trained(checkpoint.resolve(Path(path)))
    if not isinstance(trained.flow, kind):
        raise UsageError(f"{trained.source} holds a {type(trained.flow).__name__}, not a {kind.__name__}")
    return trained.flow


def build_flow(description: Mapping[str, object], source: Path | str) -> Flow:
    """Build the flow of a description with fresh weights."""
    try:
        flow = build(description)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    if not isinstance(flow, Flow):
        raise UsageError(f"{source} describes a {type(flow).__name__}, not a flow: pass the folder of a trained flow")
    return flow


@dataclass(frozen=True)
class Trained:
    """The contents of a checkpoint, read at once, since its run may prune it at any time."""

    flow: Flow
    source: Path
    weights: str
    """The name of the weights in reports: averaged weights, last weights or an average of some length."""
    config: Mapping[str, Document]
    """The contents of its ``config.json``; empty if there is none."""
    run: RunIdentity | None
    """Identity of the run that wrote the checkpoint; None if the checkpoint contains weights only."""
    path: Path
    """The path by which the checkpoint was found: itself, or the folder of its run."""

    @property
    def flags(self) -> Document:
        """The flags of the run, as its ``config.json`` has them."""
        return self.config.get("training", {})

    @property
    def is_taught(self) -> bool:
        """Whether the run learned from the samples of a teacher."""
        return self.flags.get("teacher") is not None

    @property
    def run_folder(self) -> Path:
        """The folder of the run that wrote the checkpoint, whose checkpoints may be in another folder."""
        if self.path != self.source and is_run(self.path):
            return self.path
        return self.source.parent.parent if self.source.parent.name == CHECKPOINTS else self.source.parent

    @cached_property
    def data(self) -> RunData | None:
        """The description of the data of the run; None if its ``config.json`` has none that can be opened."""
        return described_data(self.config.get("data", {}), self.source / checkpoint.CONFIG_FILE)

    @property
    def degradation(self) -> Degradation | None:
        """The degradation that made the sources of the training; None if none did."""
        return None if self.data is None else self.data.degradation

    def __str__(self) -> str:
        millions = sum(parameter.numel() for parameter in self.flow.parameters()) / 1e6
        return f"{type(self.flow).__name__}, {millions:.1f} M parameters, {self.weights} of {self.source}"


def read_trained(source: Path, path: Path | None = None) -> Trained:
    """Read the flow of the checkpoint ``source``, and its record of the run.

    Args:
        source: the checkpoint.
        path: the path by which it was found, such as the folder of its run; the checkpoint itself if not given.
    """
    files = read_manifest(source).files  # not the files in the folder: the run may be removing some
    if FLOW_FILE not in files:
        raise UsageError(f"checkpoint {source} has no {FLOW_FILE}: register the network and the flow before training")
    flow = build_flow(checkpoint.load_document(source, FLOW_FILE), source / FLOW_FILE)
    checkpoint.load_averaged(network_of(flow), source)
    return Trained(
        flow=flow.eval(),
        source=source,
        path=path or source,
        weights="averaged weights" if checkpoint.EMA_FILE in files else "last weights",
        run=checkpoint.load_state(source).run if checkpoint.STATE_FILE in files else None,
        config=read_config(source / checkpoint.CONFIG_FILE) if checkpoint.CONFIG_FILE in files else {},
    )


def reading_of(trained: Trained) -> dict[str, Any]:
    """Return the framing of the training data, or of their sources, as arguments of the medium's ``read``."""
    data = trained.data
    if not isinstance(data, PictureData):
        return {}
    given = data.pictures if data.sources is None else data.sources.described(data.pictures)
    how = {"bits": given.bits, "pad": given.crop == "none", "resize": given.resize}
    return {name: how[name] for name in trained.flow.space.medium.framed_by}


def model_hash(flow: Flow) -> str:
    """Return the SHA-256 of the weights, as :func:`rectified_flow.save_pretrained` writes them."""
    return sha256(checkpoint.to_bytes(checkpoint.own_weights(network_of(flow)))).hexdigest()


def solver_name(flow: Flow, options: Mapping[str, object]) -> str | None:
    """Return the solver that ``flow.sample`` uses with these options; None if the flow has no choice of solvers."""
    defaults = sampling_defaults(flow)
    return str(options.get("solver", defaults["solver"])) if "solver" in defaults else None


def grid_name(flow: Flow, options: Mapping[str, object]) -> str:
    """Return the spacing of the times of ``flow.sample`` with these options; ``uniform`` if the flow has no choice."""
    return str({**sampling_defaults(flow), **options}.get("grid") or flow.default_grid)


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which the network runs in ``precision``: ``no`` or ``bf16``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def read_results(folder: Path) -> list[Document]:
    """Return the results of evaluate.py in ``folder``, or an empty list if there are none."""
    path = folder / RESULTS_FILE
    results = read_document(path, list[Document]) if path.exists() else []
    for result in results:
        check_document(result.get("distances"), dict[str, float], path)
        check_document({name: result[name] for name in RESULT_TEXTS if name in result}, dict[str, str], path)
    return results
