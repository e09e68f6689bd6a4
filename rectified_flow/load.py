"""Load trained flows from their checkpoints, and set them up for sampling."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from typing_extensions import TypeVar

from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow, network_of
from rectified_flow.flows.mean import MeanFlow  # noqa: F401  registers the class
from rectified_flow.flows.rectified import RectifiedFlow  # noqa: F401
from rectified_flow.networks.unet import to_device
from rectified_flow.registry import build
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE, RunIdentity
from rectified_flow.runs.config import CHECKPOINTS
from rectified_flow.runs.folder import read_config
from rectified_flow.system.artifact import read_manifest
from rectified_flow.system.files import read_document

RESULTS_FILE = "evaluation.json"  # the results of evaluate.py, in a run's folder
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
    trained = checkpoint.read(Path(path), read_trained)
    if not isinstance(trained.flow, kind):
        raise UsageError(f"{trained.source} holds a {type(trained.flow).__name__}, not a {kind.__name__}")
    return trained.flow


def build_flow(description: Mapping[str, Any], source: Path | str) -> Flow:
    """Build the flow of a description with fresh weights.

    Args:
        description: the description, by :func:`rectified_flow.registry.describe`.
        source: the file or folder that an error names.

    Raises:
        UsageError: if the description is not that of a flow, or names a class that is not registered.
    """
    try:
        flow = build(description)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    if not isinstance(flow, Flow):
        raise UsageError(f"{source} describes a {type(flow).__name__}, not a flow")
    return flow


@dataclass(frozen=True)
class Trained:
    """The contents of a checkpoint, read at once, since its run may prune it at any time."""

    flow: Flow
    source: Path
    weights: str
    """The name of the weights in reports: averaged weights, last weights or an average of some length."""
    config: Mapping[str, Any]
    """The contents of its ``config.json``; empty if there is none."""
    run: RunIdentity | None
    """Identity of the run that wrote the checkpoint; None if the checkpoint contains weights only."""

    @property
    def run_folder(self) -> Path:
        """The folder of the run that wrote the checkpoint."""
        return self.source.parent.parent if self.source.parent.name == CHECKPOINTS else self.source.parent

    def __str__(self) -> str:
        millions = sum(parameter.numel() for parameter in self.flow.parameters()) / 1e6
        return f"{type(self.flow).__name__}, {millions:.1f} M parameters, {self.weights} of {self.source}"


def load_trained(
    path: Path,
    state: PartialState,
    *,
    autoencoder: str | None = None,
    text_encoder: str | None = None,
    precision: str = "no",
) -> Trained:
    """Load a trained flow on this process's device, from the same checkpoint on all processes.

    Args:
        path: a checkpoint or a run's folder.
        state: the processes, which all call this function together.
        autoencoder: the folder or hub id of the flow's autoencoder, if it has moved since the training.
        text_encoder: the folder or hub id of the encoder of the flow's captions, if it has moved since the training.
        precision: the precision of the network: ``no`` or ``bf16``.

    Raises:
        UsageError: if there is no checkpoint, it differs between machines, or it holds no :class:`Flow`; if its
            autoencoder is missing.
    """

    def read(source: Path) -> Trained:
        check_equal(state, lambda: {f"the manifest of {source}": checkpoint.fingerprint(source)})
        return read_trained(source)

    trained = checkpoint.read(path, read, state)
    space = trained.flow.space
    if autoencoder is not None:
        space.use_autoencoder(autoencoder)
    if text_encoder is not None:
        _move_text_encoder(trained, text_encoder)
    space.prepare(state.device)
    to_device(trained.flow, state.device, precision)
    return trained


def load_earlier(trained: Trained, state: PartialState, precision: str = "no") -> Flow:
    """Load the flow of the early checkpoint of a run, for autoguidance; see :func:`load_trained`.

    Raises:
        UsageError: if there is no earlier checkpoint beside that of the trained flow, or it is of another kind.
    """
    path = on_main(state, lambda: checkpoint.early_of(trained.source))
    if path is None:
        folder = trained.source.parent
        raise UsageError(f"--autoguidance needs a checkpoint of the first quarter of the run, and {folder} has none")
    early, flow = checkpoint.read(path, read_trained, state).flow, trained.flow
    if (type(early), early.space.shape, early.conditions) != (type(flow), flow.space.shape, flow.conditions):
        raise UsageError(f"--autoguidance needs {path} to be of the same kind as {trained.source}: move it away")
    return to_device(early, state.device, precision)


def _move_text_encoder(trained: Trained, source: str) -> None:
    """Load the text encoder of the conditions of a flow from another place."""
    conditions: Any = trained.flow.network.conditions
    moved = {name: kind for name, kind in conditions.items() if hasattr(getattr(kind, "encoder", None), "source")}
    if not moved:
        raise UsageError(f"--text_encoder has no effect: {trained.source} has no captions of a text encoder")
    for name, kind in moved.items():
        conditions[name] = replace(kind, encoder=type(kind.encoder)(source, kind.encoder.fingerprint))


def read_trained(source: Path) -> Trained:
    """Read the flow of the checkpoint ``source``, and its record of the run.

    Raises:
        UsageError: if it is damaged, or holds no :class:`Flow`.
    """
    files = read_manifest(source).files  # not the files in the folder: the run may be removing some
    if FLOW_FILE not in files:
        raise UsageError(f"checkpoint {source} has no {FLOW_FILE}: register the network and the flow before training")
    flow = build_flow(checkpoint.load_document(source, FLOW_FILE), source / FLOW_FILE)
    checkpoint.load_averaged(network_of(flow), source)
    state = checkpoint.load_state(source) if checkpoint.STATE_FILE in files else None
    return Trained(
        flow=flow.eval(),
        source=source,
        weights="averaged weights" if checkpoint.EMA_FILE in files else "last weights",
        config=read_config(source / checkpoint.CONFIG_FILE) if checkpoint.CONFIG_FILE in files else {},
        run=None if state is None else state.run,
    )


def model_hash(flow: Flow) -> str:
    """Return the SHA-256 of the weights, as :func:`rectified_flow.save_pretrained` writes them."""
    return sha256(checkpoint.to_bytes(checkpoint.own_weights(network_of(flow)))).hexdigest()


def solver_name(flow: Flow, options: Mapping[str, Any]) -> str | None:
    """Return the solver that ``flow.sample`` uses with these options; None if the flow has no choice of solvers."""
    default = inspect.signature(flow.sample).parameters.get("solver")
    return None if default is None else str(options.get("solver", default.default))


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which the network runs in ``precision``: ``no`` or ``bf16``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of evaluate.py in ``folder``, or an empty list if there are none.

    Raises:
        UsageError: if the results are damaged.
    """
    path = folder / RESULTS_FILE
    return read_document(path, list[dict[str, Any]]) if path.exists() else []
