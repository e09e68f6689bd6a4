"""Tests of loading a flow, also while its run prunes checkpoints, and of models and cards for the Hugging Face hub."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from torch import Tensor, nn

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.flows.flow import Flow, network_of
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.hub import card_of_run, load_pretrained, model_card, push_to_hub, save_pretrained
from rectified_flow.load import build_flow, load_flow, read_results, read_trained
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE
from rectified_flow.spaces.pixels import Pixels
from tests.tiny_flows import FLOWS, same, unet, write


@pytest.fixture(params=FLOWS)
def flow(request: pytest.FixtureRequest) -> Flow:
    return FLOWS[request.param]()


def test_from_a_checkpoint_or_its_run(flow: Flow, tmp_path: Path) -> None:
    path = write(flow, tmp_path)
    for each in (path, tmp_path, str(tmp_path)):
        same(load_flow(each), flow)
    assert not load_flow(path).training
    same(load_flow(path, type(flow)), flow)


def test_averaged_weights_are_preferred_and_frozen_ones_come_from_the_model(tmp_path: Path) -> None:
    last, averaged = FLOWS["rectified"](), FLOWS["rectified"]()
    for parameter in averaged.network.parameters():
        if parameter.requires_grad:
            parameter.data += 1
    path = write(last, tmp_path, averaged)
    frozen = {"time_embedding.frequencies"}
    saved = (checkpoint.load_tensors(path, name) for name in (checkpoint.MODEL_FILE, checkpoint.EMA_FILE))
    model, ema = (weights.keys() for weights in saved)
    assert model - ema == frozen
    same(load_flow(path), averaged)


def test_a_checkpoint_of_another_flow_or_none_is_refused(tmp_path: Path) -> None:
    path = write(FLOWS["mean"](), tmp_path)
    with pytest.raises(UsageError, match="holds a MeanFlow, not a RectifiedFlow"):
        load_flow(path, RectifiedFlow)
    with pytest.raises(UsageError, match="no checkpoint at"):
        load_flow(tmp_path / "nowhere")
    bare = checkpoint.save(tmp_path / "bare", 1, {}, {})
    with pytest.raises(UsageError, match=r"has no flow\.json"):
        load_flow(bare)


class Own(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x


def test_a_flow_with_weights_outside_its_network_is_saved_whole() -> None:
    class Tilted(RectifiedFlow):
        def __init__(self, network: nn.Module) -> None:
            super().__init__(network)
            self.tilt = nn.Parameter(torch.zeros(()))

    plain, tilted = RectifiedFlow(Own()), Tilted(unet())
    assert network_of(plain) is plain.network
    assert network_of(tilted) is tilted


def test_a_process_that_has_imported_nothing_else_loads_a_flow(tmp_path: Path) -> None:
    """The network and the flows are registered by the module that loads them."""
    run = str(run_of(tmp_path, {}, {"seed": 0}))
    code = f"from rectified_flow import load_flow; print(type(load_flow({run!r}).network).__name__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "Unet\n"


def run_of(
    folder: Path, data: dict[str, Any], flags: dict[str, Any], results: Sequence[dict[str, Any]] = (), **documents: Any
) -> Path:
    """A checkpoint as a run of train_oxford.py leaves it, with further entries of config.json or files by name."""
    flow = FLOWS["rectified"]()
    config = {"data": {"kind": "Pictures", "image_size": 8, **data}, "flow": {}, "training": flags}
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
        {**drawn, "seed": 1, "guidance_interval": [0.6, 0.8], "distances": {"fid": 3.5, "bits_per_dimension": 4.5}},
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
    assert "| 4 steps, from 0.6 to 0.8, seed 1, 9 pictures | fid | 3.5 |\n" in written.text
    assert "| 4 steps, from 0.6 to 0.8, seed 1 | bits_per_dimension | 4.5 |\n" in written.text
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


def test_each_loader_names_the_other(tmp_path: Path) -> None:
    flow, model, run = FLOWS["rectified"](), tmp_path / "model", tmp_path / "run"
    save_pretrained(flow, model)
    path = write(flow, run, degrade="edges")
    (run / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(UsageError, match=r"there is no checkpoint at .*/model: load its model with load_pretrained"):
        load_flow(model)
    for each in (run, path):
        with pytest.raises(UsageError, match=f"^`source` {each} belongs to a run: load it with load_flow$"):
            load_pretrained(each)
    missing = f"`source` {tmp_path}/nowhere is neither a folder nor the id of a model on the hub: pass the folder"
    with pytest.raises(UsageError, match=missing):
        load_pretrained(tmp_path / "nowhere")


def test_a_card_is_that_of_the_weights_unless_it_was_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = tmp_path / "README.md"
    save_pretrained(FLOWS["rectified"](), tmp_path)
    save_pretrained(FLOWS["rectified"](), tmp_path, metadata={"license": "mit"})
    assert "license: mit" in card.read_text()
    assert "README.md was edited" not in capsys.readouterr().out
    for edited in (card.read_text().replace("M parameters", "million parameters"), card.read_text() + "\n", "mine"):
        card.write_text(edited)
        save_pretrained(FLOWS["mean"](), tmp_path)
        assert card.read_text() == edited
        assert f"{card} was edited and stays" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["none", "written", "edited"])
def test_a_model_is_uploaded_with_its_card_unless_that_was_edited_on_the_hub(
    there: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flow, uploaded = FLOWS["rectified"](), dict[str, str]()
    save_pretrained(FLOWS["mean"](), tmp_path)
    before = (tmp_path / "README.md").read_text() + "edited" * (there == "edited")

    def create_repo(_api: HfApi, repo_id: str, **options: Any) -> SimpleNamespace:
        assert options == {"private": True, "exist_ok": True}
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(
        _api: HfApi, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]
    ) -> str:
        assert ignore_patterns == ["*.manifest.*"] + ["README.md"] * (there == "edited")
        same(load_pretrained(folder_path), flow)
        uploaded[repo_id] = (Path(folder_path) / "README.md").read_text()
        return f"https://huggingface.co/{repo_id}/commit/1"

    def hf_hub_download(_api: HfApi, repo_id: str, filename: str, *, local_dir: str) -> str:
        assert repo_id == "me/flowers"
        (Path(local_dir) / filename).write_text(before)
        return str(Path(local_dir) / filename)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "file_exists", lambda _api, repo_id, name: there != "none" and name == "README.md")
    monkeypatch.setattr(HfApi, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert push_to_hub(flow, "flowers", private=True) == "https://huggingface.co/me/flowers/commit/1"
    assert 'flow = load_pretrained("me/flowers")' in uploaded["me/flowers"]


@pytest.mark.parametrize("part", [{"dim": 10**9}, {"dim_mults": [10**9]}, {"dim_mults": [1] * 1000}, {"dim": 0}])
def test_a_description_that_asks_for_too_much_is_refused_at_once(part: dict[str, Any]) -> None:
    description = describe(FLOWS["rectified"]())
    with pytest.raises(UsageError, match=f"flow: Unet cannot be built from its description: `{next(iter(part))}` is "):
        build_flow({**description, "network": {**description["network"], **part}}, "flow")


def test_a_description_of_a_part_is_no_flow() -> None:
    with pytest.raises(UsageError, match="flow describes a Pixels, not a flow"):
        build_flow(describe(Pixels((3, 8, 8))), "flow")


@pytest.mark.parametrize(
    "content", ["{}", "[5]", "[{}]", '[{"distances": {"fid": "x"}}]', '[{"distances": {}, "checkpoint": null}]']
)
def test_results_that_were_altered_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(DamageError, match=r"evaluation\.json is damaged"):
        read_results(tmp_path)
