"""Rectangles, transparency and random crops, from a folder of pictures to samples, evaluations and other flows."""

import json
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rectified_flow.cli.config import TrainConfig
from rectified_flow.cli.train import train as run_training
from rectified_flow.data import open as catalog
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import StoreDataset
from rectified_flow.flags import parse
from rectified_flow.system.outputs import RECORD
from tests.programs import assert_refused, program
from tests.ranks import run_on_ranks
from tests.training.runs import losses

SMALL = "--dim 8 --dim_mults 1 2 --global_batch_size 8 --lr_warmup_steps 0 --log_every 1 --num_samples 3"
LENGTH = "--train_num_steps 4 --save_every 2"
FRAMED = f"--image_size 8 --aspect_ratio 3:2 --crop random --alpha --sample_steps 1 {LENGTH} {SMALL}"
STEP_4 = "checkpoints/step_00000004/model.safetensors"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 noisy pictures with a hole, of two classes."""
    folder = tmp_path_factory.mktemp("pictures")
    pixels = np.random.default_rng(0).integers(256, size=(20, 24, 30, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels[:, 8:16, 8:16, 3] = 0
    for number, each in enumerate(pixels):
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.fromarray(each).save(folder / "ab"[number % 2] / f"{number:02}.png")
    return folder


def train(world_size: int, flags: str) -> None:
    run_on_ranks(world_size, run_training, parse(TrainConfig, "", flags.split()))


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(1, f"{FRAMED} --dataset_path {pictures} --output_dir {folder}")
    return folder


def call(name: str, flags: str) -> str:
    """What a program writes to stderr; it must end well."""
    [(code, text)] = run_on_ranks(1, program, name, flags.split())
    assert code == 0, text
    return text


def printed(flags: str) -> str:
    """What train_oxford.py prints."""
    setattr(catalog, "SyntheticFlowers", partial(SyntheticFlowers, count=64))  # noqa: B010 -- in a process of its own
    with redirect_stdout(StringIO()) as output:
        run_training(parse(TrainConfig, "", flags.split()))
    return output.getvalue()


def test_two_processes_train_alike(run: Path, pictures: Path, tmp_path: Path) -> None:
    train(2, f"{FRAMED} --dataset_path {pictures} --output_dir {tmp_path}/two")
    assert losses(tmp_path / "two") == pytest.approx(losses(run), rel=1e-4)
    assert list(losses(run)) == [1, 2, 3, 4]
    one, two = load_file(run / STEP_4), load_file(tmp_path / "two" / STEP_4)
    for name, value in one.items():
        assert torch.linalg.vector_norm(value - two[name]) <= 1e-3 * torch.linalg.vector_norm(value), name
    assert np.asarray(Image.open(tmp_path / "two/samples/step_00000004.png")).shape[2] == 3


def test_a_resumed_run_has_the_same_bytes(run: Path, pictures: Path, tmp_path: Path) -> None:
    for steps in (2, 4):
        train(1, f"{FRAMED} --dataset_path {pictures} --output_dir {tmp_path}/again --train_num_steps {steps}")
    assert (tmp_path / "again" / STEP_4).read_bytes() == (run / STEP_4).read_bytes()


def test_samples_have_transparency_and_the_grid_has_none(run: Path, pictures: Path, tmp_path: Path) -> None:
    flags = f"--checkpoint {run} --num_samples 2 --steps 1 --output_dir {tmp_path}"
    call("sample.py", flags)
    drawn = [Image.open(file) for file in sorted(tmp_path.glob("0*.png"))]
    assert [(picture.mode, picture.size) for picture in drawn] == [("RGBA", (12, 8))] * 2
    assert Image.open(tmp_path / "grid.png").mode == "RGB"
    call("sample.py", f"{flags} --from_images {pictures} --strength 0.001 --path strip")
    alpha = np.asarray(Image.open(tmp_path / "00000.png"))[..., 3]
    assert alpha[3:5, 4:6].max() < 40, "the hole of the picture that it starts from"
    assert alpha[0].min() > 215


def test_it_is_evaluated_by_the_centre(run: Path, tmp_path: Path) -> None:
    flags = f"--num_samples 4 --steps 1 --feature_network efficientnet_lite0 --output_dir {tmp_path}"
    call("evaluate.py", f"--checkpoint {run} {flags}")
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["framing"] == {"width": 12, "height": 8, "alpha": True, "crop": "random"}
    assert Image.open(tmp_path / "neighbours.png").size == (6 * (12 + 2) + 2, 4 * (8 + 2) + 2)


def test_pairs_and_paths_have_the_teachers_form(run: Path, tmp_path: Path) -> None:
    flags = f"{SMALL} --train_num_steps 2 --save_every 0"
    call(
        "train_oxford.py",
        f"{flags} --method reflow --teacher {run} --teacher_samples 8 --teacher_steps 1 --output_dir {tmp_path}/a",
    )
    pairs = StoreDataset(tmp_path / "a/pairs")
    assert {name: tuple(value.shape) for name, value in pairs[0].items() if value.ndim} == {
        "images": (4, 8, 12),
        "noise": (4, 8, 12),
    }
    assert "images of 12x8 px" in pairs.description
    call(
        "train_mean_flow.py", f"{flags} --teacher {run} --teacher_samples 8 --teacher_steps 2 --output_dir {tmp_path}/b"
    )
    assert StoreDataset(tmp_path / "b/paths")[0]["path"].shape == (2, 4, 8, 12)


def test_a_dry_run_opens_the_pictures_and_prints_the_plan_of_the_run(pictures: Path, tmp_path: Path) -> None:
    [text] = run_on_ranks(1, printed, f"{FRAMED} --dataset_path {pictures} --dry_run --output_dir {tmp_path}/run")
    assert f"{pictures} at 12x8 px" in text
    assert "speed       " in text
    assert "recipe      --augment 0.15, for 20 pictures" in text
    assert not (tmp_path / "run").exists()


def test_a_look_at_a_folder(pictures: Path, tmp_path: Path) -> None:
    flags = f"{FRAMED} --dataset_path {pictures} --output_dir {tmp_path}/run --look"
    first, second = run_on_ranks(2, printed, flags)
    said = dict(row.split(maxsplit=1) for row in first.splitlines())
    assert said["recipe"].startswith("--augment 0.15, for 20 pictures")
    assert said["pictures"] == f"{pictures.name}: 20 images of 12x8 px, 2 classes"
    assert (said["sizes"], said["enlarged"]) == ("all 30x24 px", "0 smaller than 15x10 px")
    assert said["sheet"] == f"{tmp_path}/run/look.png: 20 pictures as they are trained on"
    assert second == ""
    sheet = np.asarray(Image.open(tmp_path / "run/look.png"))
    assert sheet.shape == (5 * (8 + 2) + 2, 4 * (12 + 2) + 2, 3)
    assert (sheet[2:10, 2:14] == 255).all(axis=-1).sum() in range(4, 60), "a hole, over white"
    assert {file.name for file in (tmp_path / "run").iterdir()} == {"look.png", RECORD}


def test_a_look_at_other_sources(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"image": [Image.new("RGB", (10, 10))] * 3, "label": [0, 1, 0]})
    rows.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    for words, number in ((f"--dataset_path {tmp_path}/saved", 3), ("--dataset synthetic-flowers", 64)):
        flags = f"--image_size 8 {SMALL} {words} --output_dir {tmp_path}/{number} --look"
        [text] = run_on_ranks(1, printed, flags)
        assert f"{number} images of 8 px" in text
        assert (tmp_path / f"{number}/look.png").exists()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_look_at_a_broken_picture(world_size: int, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/holiday.jpg").write_bytes(b"\xff\xd8\xff\xe0 this is no JPEG")
    flags = f"--image_size 8 {SMALL} --dataset_path {tmp_path}/pictures --output_dir {tmp_path}/run --look"
    assert_refused("train_oxford.py", world_size, flags, "holiday.jpg")
    assert not (tmp_path / "run/look.png").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--aspect_ratio 3", "--aspect_ratio is 3; it must be width:height"),
        ("--aspect_ratio 3:2 --image_size 10", "--image_size 10 gives pictures of 15x10, not divisible by 2"),
        ("--look --output_dir /proc/nothing", "--output_dir /proc/nothing cannot be written"),
    ],
)
def test_bad_input(flags: str, sentence: str) -> None:
    assert_refused("train_mean_flow.py", 1, f"--dataset synthetic-flowers --image_size 8 {SMALL} {flags}", sentence)
