"""Save flows for the Hugging Face hub with their model cards, and load them again."""

import json
from os.path import lexists
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError
from tqdm.auto import tqdm

from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow, network_of
from rectified_flow.hub.card import CardContents, is_unedited, model_card, sealed
from rectified_flow.load import build_flow
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import is_run
from rectified_flow.system.artifact import claim
from rectified_flow.system.files import replace_file
from rectified_flow.system.terminal import line

CONFIG_FILE, CARD_FILE = "config.json", "README.md"
PIPELINE_INDEX, PIPELINE_FOLDER = "model_index.json", "flow"
"""The file in which diffusers finds the classes of a pipeline and of its component, and the component's folder."""
PIPELINE = Path(__file__).with_name("pipeline.py")
"""The code of both, which is copied into the folder of a model and into that of the component."""


def save_pretrained(
    flow: Flow, folder: str | Path, *, repo_id: str | None = None, **card: Unpack[CardContents]
) -> None:
    """Write a flow's description, weights and model card into ``folder``, and the files with which diffusers opens it.

    Args:
        flow: the flow.
        folder: the folder, made if it does not exist. An edited card is kept, with a message.
        repo_id: the id of the model on the hub, for the code of the card.
        card: contents of the model card.

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
    if is_unedited(folder / CARD_FILE) or not lexists(folder / CARD_FILE):  # nor a link that leads nowhere
        claim(folder, [CARD_FILE], proven=True)
        replace_file(folder / CARD_FILE, sealed(model_card(flow, repo_id=repo_id, **card)))
    else:
        _report_kept(str(folder / CARD_FILE))


def _report_kept(card: str) -> None:
    tqdm.write(line("card", f"{card} was edited and stays; remove it to get the card of these weights"))


def claim_model(folder: Path) -> None:
    """Claim the file names of a model in ``folder``, as :func:`rectified_flow.system.artifact.claim` does."""
    if is_run(folder):
        raise UsageError(f"`save_pretrained` {folder} belongs to a run: choose another folder")
    code = [PIPELINE_INDEX, PIPELINE.name, f"{PIPELINE_FOLDER}/{PIPELINE.name}"]
    claim(folder, [checkpoint.MODEL_FILE, CONFIG_FILE, *code])


def load_pretrained(source: str | Path, **options: Any) -> Flow:
    """Load a flow from a folder that :func:`save_pretrained` wrote, or from the Hugging Face hub, ready to sample.

    Args:
        source: a folder, or the id of a model on the hub.
        options: options of :func:`huggingface_hub.snapshot_download`, such as ``revision`` and ``token``.

    Raises:
        UsageError: if a file is damaged or describes no flow, or if ``source`` belongs to a run, or is neither a folder
            nor the id of a model.
    """
    folder = Path(source)
    if is_run(folder) or checkpoint.is_checkpoint(folder):
        raise UsageError(f"`source` {folder} belongs to a run: load it with load_flow")
    if not folder.is_dir():
        try:
            found = snapshot_download(str(source), allow_patterns=[checkpoint.MODEL_FILE, CONFIG_FILE], **options)
        except HFValidationError as error:
            missing = f"`source` {source} is neither a folder nor the id of a model on the hub"
            raise UsageError(f"{missing}: pass the folder that save_pretrained wrote") from error
        folder = Path(found)
    flow = build_flow(checkpoint.load_document(folder, CONFIG_FILE), folder / CONFIG_FILE)
    checkpoint.load_weights(network_of(flow), folder, checkpoint.MODEL_FILE)
    return flow.eval()


def push_to_hub(
    flow: Flow,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    **card: Unpack[CardContents],
) -> str:
    """Upload a flow with its model card to the Hugging Face hub. An edited card is kept, with a message.

    Args:
        flow: the flow.
        repo_id: the id of the model on the hub, created if it does not exist.
        private: whether a new repository is private; by default as the account has it.
        token: the access token; by default that of ``hf auth login``.
        card: contents of the model card.

    Returns:
        The address of the commit.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    kept = list[str]()
    if api.file_exists(repo_id, CARD_FILE) and not _is_unedited_on_hub(api, repo_id):
        _report_kept(f"{CARD_FILE} of {repo_id}")
        kept.append(CARD_FILE)
    with TemporaryDirectory() as folder:
        save_pretrained(flow, folder, repo_id=repo_id, **card)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            ignore_patterns=["*.manifest.*", *kept],
            commit_message="Upload the model",
        )
        return str(commit)


def _is_unedited_on_hub(api: HfApi, repo_id: str) -> bool:
    with TemporaryDirectory() as folder:  # a file of the hub's cache is a link
        return is_unedited(Path(api.hf_hub_download(repo_id, CARD_FILE, local_dir=folder)))
