"""The model card that sample.py --save_pretrained writes: what it says of the run, and what it keeps to itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData

from rectified_flow.cli.card import card_of
from rectified_flow.cli.trained import read_trained
from rectified_flow.data.synthetic_flowers import SYNTHETIC_FLOWERS
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE
from tests.programs import assert_refused
from tests.test_load import FLOWS, write


def run_of(folder: Path, data: dict[str, Any], flags: dict[str, Any], results: Sequence[dict[str, Any]] = ()) -> Path:
    """A checkpoint as a run of train_oxford.py leaves it."""
    flow = FLOWS["rectified"]()
    config = {"run": {}, "data": {"image_size": 8, **data}, "network": None, "flow": None, "flags": flags}
    files = {checkpoint.MODEL_FILE: checkpoint.own_weights(flow.network)}
    path = checkpoint.save(folder / "checkpoints", 1, files, {FLOW_FILE: flow.describe(), CONFIG_FILE: config})
    (folder / "evaluation.json").write_text(json.dumps(list(results)))
    return path


def card(path: Path, license_name: str | None = None) -> ModelCard:
    """Written and read again, which checks its metadata."""
    trained = read_trained(path)
    written = trained.flow.generate_model_card(**card_of(trained, license_name, trained.weights_name()))
    return ModelCard(str(written), ignore_metadata_errors=False)


def test_a_card_names_data_command_licence_and_evaluation(tmp_path: Path) -> None:
    drawn = {"checkpoint": "moved/step_00000001", "weights": "last weights", "steps": 4, "num_samples": 9}
    results = [
        {**drawn, "split": "train", "guidance_scale": 2.0, "distances": {"fid": 2.5, "kid_std": 0.1}},
        {**drawn, "checkpoint": "moved/step_00000002", "distances": {"fid": 9.5}},
        {**drawn, "weights": "averaged weights", "distances": {"fid": 7.5}},
    ]
    flags = {"image_size": 8, "dim": 64, "seed": 3, "dataset": "me/cats", "use_cfg": True, "output_dir": "/home/secret"}
    written = card(run_of(tmp_path / "cats", {"dataset": "me/cats"}, flags, results), "mit")
    data = written.data.to_dict()
    assert (data["license"], data["datasets"]) == ("mit", ["me/cats"])
    assert data["tags"] == ["flow-matching", "rectified-flow"]
    assert (data["library_name"], data["pipeline_tag"]) == ("rectified-flow-trainer", "unconditional-image-generation")
    [result] = ModelCardData(**data).eval_results or []
    assert (result.metric_type, result.metric_value) == ("fid", 2.5)
    assert (result.dataset_type, result.dataset_split) == ("me/cats", "train")
    assert data["model-index"][0]["name"] == "cats"
    assert "M parameters. Trained on me/cats.\n" in written.text
    assert "| 4 steps, guidance 2, 9 pictures | fid | 2.5 |\n" in written.text
    assert "python train_oxford.py --image_size 8 --seed 3 --dataset me/cats --use_cfg\n" in written.text
    assert "secret" not in str(written)


@pytest.mark.parametrize("data", [{"dataset_path": "/home/me/cats"}, {"dataset": "../me/cats"}])
def test_a_card_names_a_folder_of_this_machine_by_its_last_part(tmp_path: Path, data: dict[str, Any]) -> None:
    flags = {**data, "init_from": "/home/me/runs/dogs"}
    written = card(run_of(tmp_path, {"dataset": "me/unused", **data}, flags))
    assert "Trained on own pictures, cats." in written.text
    assert "cats --init_from dogs\n" in written.text
    for unsaid in ("license", "datasets:", "model-index", "Evaluation", "/home", "../me"):
        assert unsaid not in str(written)


def test_a_card_of_drawn_flowers_names_no_dataset_of_the_hub(tmp_path: Path) -> None:
    written = card(run_of(tmp_path, {"dataset": SYNTHETIC_FLOWERS}, {"dataset": SYNTHETIC_FLOWERS}))
    assert "Trained on flowers drawn by the program." in written.text
    assert "datasets:" not in str(written)


def test_a_card_of_weights_alone_says_nothing_of_a_run(tmp_path: Path) -> None:
    written = card(write(FLOWS["mean"](), tmp_path))
    assert written.data.to_dict()["tags"] == ["flow-matching", "mean-flow"]
    assert "Trained on" not in written.text
    assert "## Training" not in written.text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--license mit", "--license names the licence on the card of --save_pretrained: pass a folder"),
        ("--license MIT --save_pretrained model", "such as mit or cc-by-4.0"),
    ],
)
def test_a_licence_that_is_refused(flags: str, words: str) -> None:
    assert_refused("sample.py", 1, flags, words)
