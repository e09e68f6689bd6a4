"""The model card of a flow, and what a run adds to it."""

import json
from hashlib import sha256
from pathlib import Path
from typing import TypedDict, Unpack

from huggingface_hub import ModelCard, ModelCardData

from rectified_flow.flags import plain, rules_of
from rectified_flow.flows.flow import Flow
from rectified_flow.load import Trained, model_hash, read_results
from rectified_flow.registry import Document, describe
from rectified_flow.runs.training_config import TrainingConfig

LIBRARY = "rectified-flow-trainer"
SEAL = "\n<!-- The next model replaces this card unless it is edited. SHA-256 of the text above: "
CARD_TEMPLATE = Path(__file__).with_name("model_card.md")


class CardContents(TypedDict, total=False):
    """Contents of a model card beside the description of the flow."""

    metadata: Document
    """Entries of the card's header, such as ``license`` and ``tags``."""
    title: str
    grid: str
    """Path of a picture in the folder of the model."""
    dataset: str
    training: str | None
    """Flags of the training as JSON."""
    results: list[Document]
    """Results of evaluate.py."""


def model_card(flow: Flow, *, repo_id: str | None = None, **contents: Unpack[CardContents]) -> ModelCard:
    """Return the README of a model, with a description and code that loads it from ``repo_id``, if it is known."""
    metadata = contents.pop("metadata", {})
    reads = any(getattr(kind, "is_text", False) for kind in flow.conditions.values())
    task = "image-to-image" if flow.takes_source else "text-to-image" if reads else "unconditional-image-generation"
    module = None if type(flow).__module__.startswith("rectified_flow.") else type(flow).__module__
    return ModelCard.from_template(
        ModelCardData(library_name=LIBRARY, pipeline_tag=task, **metadata),
        template_path=str(CARD_TEMPLATE),
        kind=type(flow).__name__,
        module=module,
        noun=flow.space.medium.noun,
        shape=["b", *(flow.space.shape or ())],
        sources=flow.takes_source,
        conditions=", ".join(f"{name} ({type(kind).__name__.lower()})" for name, kind in flow.conditions.items()),
        parameters=f"{sum(each.numel() for each in flow.network.parameters()) / 1e6:.1f}",
        config=json.dumps(describe(flow), indent=1),
        repo_id=repo_id,
        **contents,
    )


def sealed(card: object) -> str:
    """Return the text of a card followed by its hash, which :func:`is_unedited` verifies."""
    return f"{card}{SEAL}{sha256(str(card).encode()).hexdigest()} -->\n"


def is_unedited(card: Path) -> bool:
    """Return whether a file is a generated card that was not edited, so that it may be replaced."""
    if card.is_symlink() or not card.is_file():
        return False
    written = card.read_bytes().decode(errors="replace")
    text, seal, _ = written.rpartition(SEAL)
    return bool(seal) and sealed(text) == written


def card_of_run(trained: Trained, license_name: str | None) -> CardContents:
    """Return arguments of :func:`model_card` on the data, the training, and the evaluation of the weights."""
    flags, defaults, rules = trained.flags, plain(TrainingConfig()), rules_of(TrainingConfig)
    data = trained.data
    hub_id = None if data is None else data.hub_id
    model = model_hash(trained.flow)
    results = [
        result
        for result in read_results(trained.run_folder)
        if Path(result.get("checkpoint", "")).name == trained.source.name
        and result.get("model", model) == model
        and result.get("weights") == trained.weights
        and result.get("autoguidance", 1) == 1  # which needs another checkpoint, too
    ]
    shown = [name for name, rule in rules.items() if rule.recorded and not rule.local]  # nothing of this machine
    training = {name: flags[name] for name in shown if flags.get(name, defaults[name]) != defaults[name]}
    return {
        "metadata": {
            "license": license_name,
            "datasets": None if hub_id is None else [hub_id],
            "tags": ["flow-matching", "mean-flow" if trained.flow.is_map else "rectified-flow"],
        },
        "dataset": hub_id or Path("" if data is None else data.name).name,  # no path of this machine
        "training": json.dumps(training, indent=1) if training else None,
        "results": results,
    }
