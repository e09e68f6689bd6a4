"""Tests of models for the Hugging Face hub, and of their cards."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from rectified_flow.errors import UsageError
from rectified_flow.hub import card_of_run, load_pretrained, model_card, push_to_hub, save_pretrained
from rectified_flow.load import read_trained
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE
from tests.test_load import FLOWS, same, write


def run_of(
    folder: Path,
    data: dict[str, Any],
    flags: dict[str, Any],
    results: Sequence[dict[str, Any]] = (),
    **documents: Any,
) -> Path:
    """A checkpoint as a run of train_oxford.py leaves it, with further entries of config.json or files by name."""
    flow = FLOWS["rectified"]()
    config = {"data": {"image_size": 8, **data}, "flow": {}, "training": flags}
    config |= {name: each for name, each in documents.items() if not name.endswith(".json")}
    parts = {name: each for name, each in documents.items() if name.endswith(".json")}
    files = {checkpoint.MODEL_FILE: checkpoint.own_weights(flow.network)}
    path = checkpoint.save(folder / "checkpoints", 1, files, {FLOW_FILE: describe(flow), CONFIG_FILE: config, **parts})
    (folder / "evaluation.json").write_text(json.dumps(list(results)))
    return path


def card(path: Path, license_name: str | None = None) -> ModelCard:
    """Written and read again, which checks its metadata."""
    trained = read_trained(path)
    written = model_card(trained.flow, **card_of_run(trained, license_name))
    return ModelCard(str(written), ignore_metadata_errors=False)


def test_a_card_names_data_command_licence_and_evaluation(tmp_path: Path) -> None:
    drawn = {"checkpoint": "moved/step_00000001", "weights": "last weights", "steps": 4, "num_samples": 9}
    results = [
        {**drawn, "split": "train", "guidance_scale": 2.0, "distances": {"fid": 2.5, "kid_std": 0.1}},
        {**drawn, "checkpoint": "moved/step_00000002", "distances": {"fid": 9.5}},
        {**drawn, "weights": "averaged weights", "distances": {"fid": 7.5}},
        {**drawn, "autoguidance": 2.0, "distances": {"fid": 1.5}},  # needs another checkpoint, too
    ]
    flags = {"seed": 3, "lr_decay": "cosine", "batch_size": None, "output_dir": "/home/secret"}
    flags |= {"init_from": "/home/secret"}
    written = card(run_of(tmp_path / "cats", {"dataset": "me/cats"}, flags, results), "mit")
    data = written.data.to_dict()
    assert (data["license"], data["datasets"]) == ("mit", ["me/cats"])
    assert data["tags"] == ["flow-matching", "rectified-flow"]
    assert (data["library_name"], data["pipeline_tag"]) == ("rectified-flow-trainer", "unconditional-image-generation")
    assert "M parameters. Conditions: labels (labels). Trained on me/cats.\n" in written.text
    assert "| 4 steps, guidance 2, 9 pictures | fid | 2.5 |\n" in written.text
    assert '## Training\n\n```json\n{\n "lr_decay": "cosine",\n "seed": 3\n}\n```' in written.text
    assert "secret" not in str(written)


@pytest.mark.parametrize("data", [{"dataset_path": "/home/me/cats"}, {"dataset": "../me/cats"}])
def test_a_card_names_a_folder_of_this_machine_by_its_last_part(tmp_path: Path, data: dict[str, Any]) -> None:
    written = card(run_of(tmp_path, {"dataset": "me/unused", **data}, {**data, "init_from": "/home/me/runs/dogs"}))
    assert "Trained on cats." in written.text
    for unsaid in ("license", "datasets:", "model-index", "Evaluation", "/home", "../me"):
        assert unsaid not in str(written)


def test_a_card_of_a_flow_from_pictures_samples_from_them(tmp_path: Path) -> None:
    flow = FLOWS["rectified"]()
    flow.from_source = True
    written = card(write(flow, tmp_path))
    assert written.data.to_dict()["pipeline_tag"] == "image-to-image"
    assert "flow.sample(source=pictures)" in written.text


@pytest.mark.parametrize("name", FLOWS)
def test_as_the_hub_has_it(name: str, tmp_path: Path) -> None:
    flow = FLOWS[name]()
    save_pretrained(flow, tmp_path, grid="grid.png", repo_id="me/flowers")
    same(load_pretrained(tmp_path), flow)
    same(load_pretrained(str(tmp_path)), flow)
    card = (tmp_path / "README.md").read_text()
    assert "![samples](grid.png)" in card
    assert 'load_pretrained("me/flowers")' in card
    assert "Conditions: labels (labels)." in card
    assert "of 8 px" in card
    assert json.dumps(describe(flow), indent=1) in card


def test_a_folder_that_is_no_model_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json is missing"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json: the kind None is not registered"):
        load_pretrained(tmp_path)


def test_a_model_is_uploaded_with_its_card(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, uploaded = FLOWS["rectified"](), dict[str, str]()

    def create_repo(_api: HfApi, repo_id: str, **options: Any) -> SimpleNamespace:
        assert options == {"private": True, "exist_ok": True}
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(_api: HfApi, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: str) -> str:
        assert ignore_patterns == "*.rectified-flow.json*"
        same(load_pretrained(folder_path), flow)
        uploaded[repo_id] = (Path(folder_path) / "README.md").read_text()
        return f"https://huggingface.co/{repo_id}/commit/1"

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert push_to_hub(flow, "flowers", private=True) == "https://huggingface.co/me/flowers/commit/1"
    assert 'flow = load_pretrained("me/flowers")' in uploaded["me/flowers"]
