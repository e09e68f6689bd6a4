"""Tests of sample.py: pictures that say how they were generated, their nearest training pictures, and autoguidance."""

import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from rectified_flow.cli import sample as sample_module
from rectified_flow.cli import sample_request
from rectified_flow.cli.sample_names import Names
from rectified_flow.cli.sample_request import SampleRequest, find_inputs, with_texts
from rectified_flow.cli.settings import read_settings
from rectified_flow.condition import Labels
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.hub import load_pretrained
from rectified_flow.load import load_flow, model_hash
from rectified_flow.networks.unet import Unet
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import FLOW_FILE
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import Provenance, metadata_options, read_provenance, write_picture
from tests.programs import assert_refused, call, program
from tests.ranks import run_on_ranks
from tests.tiny_flows import FLOWS, flow_with_conditions, write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a rectified flow with the classes cat and dog."""
    folder = tmp_path_factory.mktemp("run")
    write(FLOWS["rectified"](), folder)
    return folder


draw = partial(call, "sample.py")


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {file.name: np.asarray(Image.open(file)).astype(int) for file in sorted(folder.glob("*.png"))}


def test_what_it_says_and_leaves(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    flags = ["--checkpoint", folder, "--num_samples", 4, "--steps", 3, "--solver", "heun"]
    code, output = program("sample.py", [*map(str, flags), "--save_pretrained", str(tmp_path / "hub")])
    assert code == 0, output
    assert isinstance(load_pretrained(tmp_path / "hub"), Flow)
    assert "![samples](grid.png)" in (tmp_path / "hub/README.md").read_text()
    assert (tmp_path / "hub/grid.png").exists()


def test_a_model_is_not_saved_over_pictures(run: Path, tmp_path: Path) -> None:
    words = f"--checkpoint {run} --steps 1 --output_dir {tmp_path} --save_pretrained {tmp_path}"
    assert_refused("sample.py", 1, words, "and --output_dir are both")


def test_autoguidance_of_a_flow_with_captions(tmp_path: Path) -> None:
    flow = flow_with_conditions()
    tensors, documents = {checkpoint.MODEL_FILE: flow.network.state_dict()}, {FLOW_FILE: describe(flow)}
    for step in (10, 80):
        checkpoint.save(tmp_path / "checkpoints", step, tensors, documents)
    words = ["--steps", 1, "--num_samples", 1, "--output_dir", tmp_path / "made"]
    draw("--checkpoint", tmp_path, "--autoguidance", 2, *words)
    assert (tmp_path / "made/00000.png").exists()


LIKE = "--seed 3 --steps 3 --solver heun --time_grid edm --num_samples 4"


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (f"{LIKE} --classes dog,cat --guidance_scale 2.5 --guidance_interval 0.1 0.9", "00001.png"),
        (f"{LIKE} --guidance labels=1.5", "00003.png"),
        (f"{LIKE} --guidance labels=0.000012345678", "00000.png"),
        ("--seed 3 --steps 2 --grid labels seed=3", "00004.png"),
    ],
)
def test_a_picture_is_generated_again_from_its_file(run: Path, tmp_path: Path, flags: str, name: str) -> None:
    draw("--checkpoint", run, "--output_dir", tmp_path / "made", *flags.split())
    past = read_provenance(tmp_path / "made" / name)
    assert (past.seed, past.model, past.from_picture) == (3, model_hash(load_flow(run)), False)
    assert b"digitalsourcetype/trainedAlgorithmicMedia" in (tmp_path / "made" / name).read_bytes()
    draw("--checkpoint", run, "--like", tmp_path / "made" / name, "--output_dir", tmp_path / "again")
    [again] = (tmp_path / "again").glob("0*.png")
    assert np.abs(pictures(tmp_path / "made")[name] - pictures(tmp_path / "again")[again.name]).max() <= 1
    assert replace(read_provenance(again), conditions={}) == replace(past, conditions={})


def test_what_says_nothing_or_too_little_is_not_generated_again(run: Path, tmp_path: Path) -> None:
    write(RectifiedFlow(Unet(8, (1,), image_size=8), space=Pixels((3, 8, 8))), tmp_path / "other")
    write(MeanFlow(Unet(8, (1,), image_size=8), space=Pixels((3, 8, 8))), tmp_path / "map")
    made = ["--checkpoint", run, "--num_samples", 2, "--steps", 1]
    draw(*made, "--output_dir", tmp_path / "made")
    draw(*made, "--output_dir", tmp_path / "plain", "--no_metadata")
    draw(*made, "--output_dir", tmp_path / "from", "--from_images", tmp_path / "made/00000.png")
    for checkpoint_, like, words in (
        (run, "plain/00000.png", "00000.png does not say how it was generated: pass a picture of sample.py"),
        (run, "made/grid.png", "--like needs a single picture, and this file holds several"),
        (run, "from/00000.png", "--like needs a picture from noise, and this one was made with --from_images"),
        (run, "nowhere.png", "nowhere.png is missing"),
        (run, "made/00000.png --seed 2", "--like and --seed exclude each other: pass one"),
        (run, "made/00000.png --solver heun", "--like and --solver exclude each other: pass one"),
        (tmp_path / "other", "made/00000.png", "and another model generated this one"),
        (tmp_path / "map", "made/00000.png", "and another model generated this one"),
    ):
        assert_refused("sample.py", 1, f"--checkpoint {checkpoint_} --like {tmp_path}/{like}", words)


def test_a_picture_in_the_folder_of_its_run_names_the_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No other run is needed than the one whose folder the file is in."""
    shutil.copytree(run, tmp_path / "mine")
    draw("--checkpoint", tmp_path / "mine", "--num_samples", 2, "--steps", 1)
    monkeypatch.chdir(tmp_path)
    draw("--like", "mine/generated/00001.png")
    assert (tmp_path / "mine/like/00001-seed-0.png").exists()
    assert "00001-seed-0.png to" not in capfd.readouterr().out


def test_the_nearest_training_pictures_are_shown_with_their_distances(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from rectified_flow.cli.train import train
    from rectified_flow.cli.training_flags import TrainConfig

    (tmp_path / "mine").mkdir()
    for number in range(6):
        Image.new("RGB", (8, 8), (40 * number,) * 3).save(tmp_path / f"mine/{number}.png")
    words = f"--dataset_path {tmp_path}/mine --image_size 8 --dim 8 --dim_mults 1 --batch_size 2 --train_num_steps 1"
    words += f" --num_samples 0 --holdout 0 --cache_dir {tmp_path}/cache --output_dir {tmp_path}/run"
    assert train(read_settings(TrainConfig, "", words.split()))
    capfd.readouterr()
    flags = ["--checkpoint", tmp_path / "run", "--num_samples", 3, "--steps", 1, "--from_images", tmp_path / "mine"]
    run_on_ranks(2, draw, *flags, "--strength", 0.001, "--nearest", "--output_dir", tmp_path / "one")
    sheet = np.asarray(Image.open(tmp_path / "one/nearest.png"))
    assert len(sheet) > 3 * 112
    side = 112 + 2
    for row in range(3):
        top = 2 + row * (len(sheet) - 2) // 3 + 50
        shades = [sheet[top, 2 + column * side + 56, 0] for column in range(5)]
        assert shades[0] == pytest.approx(40 * row, abs=3)
        assert shades[1] == 40 * row, "its own picture is the nearest"
        assert abs(int(shades[2]) - 40 * row) == 40
    (tmp_path / "given").mkdir()
    write_picture(tmp_path / "given/nearest.png", np.zeros((8, 8, 3), dtype=np.uint8))
    write_picture(tmp_path / "mask.png", np.full((8, 8, 3), 255, dtype=np.uint8))
    words = (
        f"--checkpoint {tmp_path}/run --steps 1 --from_images {tmp_path}/given/nearest.png --mask {tmp_path}/mask.png"
    )
    draw(*words.split(), "--nearest", "--output_dir", tmp_path / "both")
    result, both = (Image.open(tmp_path / f"both/{name}.png") for name in ("nearest", "nearest-2"))
    assert (result.size, both.width > 4 * side) == ((8, 8), True), "the result and the sheet have one name"
    with patch.object(sample_module, "GRID_PICTURES", 1):
        draw(*flags, "--strength", 0.001, "--nearest", "--output_dir", tmp_path / "some")
    assert "of 256 grey levels, among the first 1 samples" in capfd.readouterr().out
    (tmp_path / "mine").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "cache")
    words = f"--checkpoint {tmp_path}/run --num_samples 2 --steps 1 --output_dir {tmp_path}/two --nearest"
    assert_refused("sample.py", 1, words, "mine is not a folder")
    assert program("sample.py", f"{words} {tmp_path}/moved".split())[0] == 0
    Image.new("RGB", (8, 8), (99, 99, 99)).save(tmp_path / "moved/0.png")
    capfd.readouterr()
    draw(*f"{words} {tmp_path}/moved".split())
    assert "moved is not, or no longer, what" in capfd.readouterr().out


def test_a_file_of_somebody_else_starts_no_sampling_of_days(run: Path, tmp_path: Path) -> None:
    settings = Provenance(model_hash(load_flow(run)), seed=0, steps=10**7, number=0)
    write_picture(tmp_path / "a.png", np.zeros((8, 8, 3), dtype=np.uint8), **metadata_options(asdict(settings)))
    words = f"--checkpoint {run} --like {tmp_path}/a.png --output_dir {tmp_path}/out"
    assert_refused("sample.py", 1, words, "--like names 10,000,000 steps, more than 10,000")
    for changes, sentence in (
        ({"number": -1}, "a.png is damaged: number is -1, but input should be greater than or equal to 0"),
        ({"number": 10**30}, "a.png is damaged: number is 1000000"),
        ({"number": 0, "conditions": {"colour": "red"}}, "--like has the condition colour, and "),
    ):
        metadata = metadata_options(asdict(settings) | {"steps": 1} | changes)
        write_picture(tmp_path / "a.png", np.zeros((8, 8, 3), dtype=np.uint8), **metadata)
        assert_refused("sample.py", 1, words, sentence)


def test_autoguidance_by_the_early_checkpoint(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Samples move away from those of the early checkpoint, alike on 1 and 2 processes, and need that checkpoint."""
    source = checkpoint.newest_checkpoint(run / "checkpoints")
    assert source is not None
    flow, folder, files = load_flow(source), tmp_path / "run", {FLOW_FILE: checkpoint.load_document(source, FLOW_FILE)}
    assert_refused(
        "sample.py",
        1,
        f"--checkpoint {run} --autoguidance 2",
        "--autoguidance needs a checkpoint of the first quarter of the run",
    )
    weights, identity = flow.network.state_dict(), checkpoint.RunIdentity("data", 0, 8, "float32")
    files[checkpoint.STATE_FILE] = asdict(checkpoint.TrainerFile(10, run=identity, items=400))
    for step, factor in ((10, 0.5), (30, 2.0), (80, 1.0)):  # 10 is nearest to an eighth of 80
        tensors = {name: factor * each for name, each in weights.items()}
        checkpoint.save(folder / "checkpoints", step, {checkpoint.MODEL_FILE: tensors}, files)
    flags = ["--num_samples", 3, "--steps", 2, "--classes", "cat", "--time_grid", "edm", "--checkpoint"]
    draw(*flags, folder, "--autoguidance", 1, "--output_dir", tmp_path / "plain")
    draw(*flags, folder, "--output_dir", tmp_path / "default")
    assert "guidance_interval (0.0, 0.9), autoguidance 2.5\n" in capfd.readouterr().out
    given = ("--autoguidance", 2.5, "--guidance_interval", 0, 0.9)
    draw(*flags, folder, *given, "--output_dir", tmp_path / "given")
    assert np.array_equal(pictures(tmp_path / "default")["00000.png"], pictures(tmp_path / "given")["00000.png"])
    draw("--num_samples", 1, "--steps", 2, "--checkpoint", folder, "--output_dir", tmp_path / "grid")
    assert read_provenance(tmp_path / "grid/00000.png").time_grid == "edm"
    again = ("--checkpoint", folder, "--like", tmp_path / "grid/00000.png", "--save_pretrained", tmp_path / "repeated")
    draw(*again, "--output_dir", tmp_path / "again")
    assert read_provenance(next((tmp_path / "again").glob("0*.png"))).autoguidance == 2.5
    draw(*flags, folder, "--save_pretrained", tmp_path / "model", "--output_dir", tmp_path / "saved")
    assert np.array_equal(pictures(tmp_path / "saved")["00000.png"], pictures(tmp_path / "plain")["00000.png"])
    capfd.readouterr()
    always = ("--autoguidance", 2, "--guidance_interval", 0, 1)
    draw(*flags, folder, *always, "--output_dir", tmp_path / "one")
    told = capfd.readouterr().out
    assert "2 of the network for each picture, beside those of the early checkpoint's network" in told
    assert "autoguidance 2.0\n" in told
    assert "step_00000010\n" in told
    run_on_ranks(2, draw, *flags, folder, *always, "--output_dir", tmp_path / "two")
    draw(*flags, folder / "checkpoints/step_00000010", "--output_dir", tmp_path / "early")
    never = ("--guidance_interval", 0.8, 0.9)  # between the times 1 and 0.72 of two steps
    draw(*flags, folder, "--autoguidance", 2, *never, "--output_dir", tmp_path / "never")
    assert np.array_equal(pictures(tmp_path / "never")["00000.png"], pictures(tmp_path / "plain")["00000.png"])
    plain, one, two, early = (pictures(tmp_path / name)["00000.png"] for name in ("plain", "one", "two", "early"))
    assert np.abs(one - two).max() <= 1
    other = RectifiedFlow(Unet(8, (1,), image_size=16), space=Pixels((3, 16, 16)))
    weights, files = other.network.state_dict(), {FLOW_FILE: describe(other)}
    shutil.rmtree(folder / "checkpoints/step_00000010")
    checkpoint.save(folder / "checkpoints", 10, {checkpoint.MODEL_FILE: weights}, files)
    assert_refused("sample.py", 1, f"--checkpoint {folder} --autoguidance 2", "in kind, shape or conditions: move it")
    (folder / "checkpoints/step_00000010" / checkpoint.MODEL_FILE).write_bytes(b"damaged")
    draw(*flags, folder, "--output_dir", tmp_path / "alone")
    assert np.array_equal(pictures(tmp_path / "alone")["00000.png"], pictures(tmp_path / "plain")["00000.png"])
    inside = (one > 0) & (one < 255)  # the others are clipped
    assert np.corrcoef((one - plain)[inside], (plain - early)[inside])[0, 1] > 0.5


def test_no_call_replaces_the_pictures_of_an_earlier_one(run: Path, tmp_path: Path) -> None:
    """Numbers go on for samples, for results of given pictures and for grids; each picture can be generated again."""
    (tmp_path / "given").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "given/nearest.png")
    write_picture(tmp_path / "mask.png", np.full((8, 8, 3), 255, dtype=np.uint8))
    flags = ["--checkpoint", run, "--steps", 1, "--output_dir", tmp_path / "made"]
    translated = [*flags, "--from_images", tmp_path / "given", "--mask", tmp_path / "mask.png"]
    calls = {
        ("00000.png", "00001.png", "00002.png", "grid.png"): [*flags, "--num_samples", 3],
        ("00003.png", "00004.png", "grid-2.png"): [*flags, "--num_samples", 2, "--seed", 1],
        ("nearest.png", "grid-3.png"): translated,
        ("nearest-2.png", "nearest-3.png", "grid-4.png"): [*translated, "--variants", 2],
    }
    before: dict[str, bytes] = {}
    for expected, words in calls.items():
        draw(*words)
        now = {file.name: file.read_bytes() for file in (tmp_path / "made").glob("*.png")}
        assert now.keys() - before.keys() == {*expected}
        assert {name: now[name] for name in before} == before
        before = now
    past = read_provenance(tmp_path / "made/00004.png")
    assert (past.seed, past.number) == (1, 1), "the number within its call"
    draw("--checkpoint", run, "--output_dir", tmp_path / "again", "--like", tmp_path / "made/00004.png")
    again = pictures(tmp_path / "again")["00001-seed-1.png"]
    assert np.abs(again - pictures(tmp_path / "made")["00004.png"]).max() <= 1


@pytest.mark.parametrize(("flags", "count"), [("", 3), ("--num_samples 1", 1), ("--classes cat", 2)])
def test_each_class_that_is_asked_for_is_generated(
    flags: str, count: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_request, "NUM_SAMPLES", 2)
    draw("--checkpoint", run, "--steps", 1, *f"--classes cat,dog,cat {flags}".split(), "--output_dir", tmp_path)
    assert len([*tmp_path.glob("0*.png")]) == count


def test_each_picture_of_a_folder_is_varied(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_request, "NUM_SAMPLES", 2)
    (tmp_path / "given").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"given/{number}.png")
    flags = ["--checkpoint", run, "--steps", 1, "--output_dir", tmp_path / "made"]
    draw(*flags, "--from_images", tmp_path / "given")
    assert len([*(tmp_path / "made").glob("0*.png")]) == 3


def test_grids_of_earlier_calls_are_no_pictures_to_start_from(run: Path, tmp_path: Path) -> None:
    """A user's own picture may be called grid.png, too."""
    flags = ["--checkpoint", run, "--steps", 1, "--num_samples", 2]
    draw(*flags, "--output_dir", tmp_path / "made")
    (tmp_path / "mine").mkdir()
    shutil.copy(tmp_path / "made/grid.png", tmp_path / "mine")
    medium = Pixels((3, 8, 8)).medium
    assert [file.name for file in find_inputs(tmp_path / "made", medium)] == ["00000.png", "00001.png"]
    assert [file.name for file in find_inputs(tmp_path / "mine", medium)] == ["grid.png"]
    draw(*flags, "--from_images", tmp_path / "made/00000.png", "--output_dir", tmp_path / "made/further")


def test_a_folder_that_another_process_draws_into_is_refused(run: Path, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".samples.lock"):
        assert_refused(
            "sample.py",
            2,
            f"--checkpoint {run} --output_dir {tmp_path}",
            f"another process is writing to --output_dir {tmp_path}: wait until it ends, or choose another folder",
        )
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_a_reader_that_leaves_after_a_line_ends_no_sampling(run: Path, tmp_path: Path) -> None:
    """``rectified-flow sample ... | head -1``: all pictures are written, without an error."""
    end, start = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "rectified_flow", "sample", "--checkpoint", str(run), "--num_samples", "2"]
    done = subprocess.run(
        [*command, "--steps", "1", "--output_dir", str(tmp_path / "made")],
        stdout=start,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(start)
    assert (done.returncode, b"Error" in done.stderr) == (0, False)
    assert (tmp_path / "made/00001.png").exists()


def test_each_result_of_a_picture_has_the_next_value_of_a_condition() -> None:
    flow = RectifiedFlow(Unet(8, (1,), conditions={"labels": Labels(2, ("a", "b"))}, image_size=8))
    request = SampleRequest(Names(["p00", "p01"], 2), {"conditions": {}})
    written = with_texts(request, {"labels": ["a", "b"]}, flow, 2)
    found = list(zip(written.names.numbered(0), written.texts["labels"], strict=True))
    assert found == [("p00-1", "a"), ("p01-1", "b"), ("p00-2", "b"), ("p01-2", "a")]
    assert written.options["conditions"]["labels"].tolist() == [0, 1, 1, 0]
    with pytest.raises(
        UsageError, match=r"^3 values of labels are given, but --from_images yields only 2 results: pass"
    ):
        with_texts(replace(request, names=Names(["p00", "p01"], 1)), {"labels": ["a", "b", "a"]}, flow, 1)
