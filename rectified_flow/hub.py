"""Save flows for the Hugging Face hub, load them again, and write their model cards."""

import json
from collections.abc import Mapping
from os.path import lexists
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, snapshot_download

from rectified_flow.flags import plain, refuse, rules_of
from rectified_flow.flows.flow import Flow, network_of
from rectified_flow.load import Trained, build_flow, model_hash, read_results
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import is_run
from rectified_flow.system.artifact import claim
from rectified_flow.system.files import replace_file

LIBRARY = "rectified-flow-trainer"
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
CARD_TEMPLATE = Path(__file__).with_name("model_card.md")
PIPELINE_INDEX, PIPELINE_FOLDER = "model_index.json", "flow"
"""The file in which diffusers finds the classes of a pipeline and of its component, and the component's folder."""
PIPELINE = Path(__file__).with_name("pipeline") / "pipeline.py"
"""The code of both, which is copied into the folder of a model and into that of the component."""


def save_pretrained(flow: Flow, folder: str | Path, **card: Any) -> None:
    """Write a flow's description, weights and model card into ``folder``, and the files with which diffusers opens it.

    Args:
        flow: the flow.
        folder: the folder, made if it does not exist. A card that is there already stays.
        card: arguments of :func:`model_card`.

    Raises:
        UsageError: if a part of the flow is not registered.
        OSError: if a file cannot be written; it is then as it was.
    """
    description, folder = describe(flow), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = checkpoint.own_weights(network_of(flow))
    claim_model(folder)
    replace_file(folder / checkpoint.MODEL_FILE, checkpoint.to_bytes(weights))
    replace_file(folder / CONFIG_FILE, json.dumps(description, indent=1))
    classes = {"_class_name": [PIPELINE.stem, "FlowPipeline"], PIPELINE_FOLDER: [PIPELINE.stem, "TrainedFlow"]}
    replace_file(folder / PIPELINE_INDEX, json.dumps(classes, indent=1))
    for place in (folder, folder / PIPELINE_FOLDER):
        replace_file(place / PIPELINE.name, PIPELINE.read_bytes())
    if not lexists(folder / CARD_FILE):  # nor a link that leads nowhere
        replace_file(folder / CARD_FILE, str(model_card(flow, **card)))


def claim_model(folder: Path) -> None:
    """Claim the file names of a model in ``folder``, as :func:`rectified_flow.system.artifact.claim` does."""
    refuse({f"save_pretrained {folder}": is_run(folder)}, "belongs to a run: choose another folder")
    code = [PIPELINE_INDEX, PIPELINE.name, f"{PIPELINE_FOLDER}/{PIPELINE.name}"]
    claim(folder, [checkpoint.MODEL_FILE, CONFIG_FILE, *code])


def load_pretrained(source: str | Path, **options: Any) -> Flow:
    """Load a flow from a folder that :func:`save_pretrained` wrote, or from the Hugging Face hub, ready to sample.

    Args:
        source: a folder, or the id of a model on the hub.
        options: options of :func:`huggingface_hub.snapshot_download`, such as ``revision`` and ``token``.

    Raises:
        UsageError: if a file is damaged, or describes no flow.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), allow_patterns=[checkpoint.MODEL_FILE, CONFIG_FILE], **options))
    flow = build_flow(checkpoint.load_document(folder, CONFIG_FILE), folder / CONFIG_FILE)
    checkpoint.load_weights(network_of(flow), folder, checkpoint.MODEL_FILE)
    return flow.eval()


def push_to_hub(flow: Flow, repo_id: str, *, private: bool | None = None, token: str | None = None, **card: Any) -> str:
    """Upload a flow with its model card to the Hugging Face hub.

    Args:
        flow: the flow.
        repo_id: the id of the model on the hub, created if it does not exist.
        private: whether a new repository is private; by default as the account has it.
        token: the access token; by default that of ``hf auth login``.
        card: arguments of :func:`model_card`.

    Returns:
        The address of the commit.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with TemporaryDirectory() as folder:
        save_pretrained(flow, folder, **{"repo_id": repo_id, **card})
        where: dict[str, Any] = {"repo_id": repo_id, "folder_path": folder, "ignore_patterns": "*.manifest.*"}
        return str(api.upload_folder(**where, commit_message="Upload the model"))


def model_card(flow: Flow, *, metadata: Mapping[str, Any] | None = None, **texts: Any) -> ModelCard:
    """Return the README of a model, with a description and code that loads it."""
    reads = any(getattr(kind, "is_text", False) for kind in flow.conditions.values())
    task = "image-to-image" if flow.takes_source else "text-to-image" if reads else "unconditional-image-generation"
    module = None if type(flow).__module__.startswith("rectified_flow.") else type(flow).__module__
    return ModelCard.from_template(
        ModelCardData(library_name=LIBRARY, pipeline_tag=task, **(metadata or {})),
        template_path=str(CARD_TEMPLATE),
        kind=type(flow).__name__,
        module=module,
        noun=flow.space.medium.noun,
        shape=["b", *(flow.space.shape or ())],
        sources=flow.takes_source,
        conditions=", ".join(f"{name} ({type(kind).__name__.lower()})" for name, kind in flow.conditions.items()),
        parameters=f"{sum(each.numel() for each in flow.network.parameters()) / 1e6:.1f}",
        config=json.dumps(describe(flow), indent=1),
        **texts,
    )


def card_of_run(trained: Trained, license_name: str | None) -> dict[str, Any]:
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
