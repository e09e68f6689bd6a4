"""Tests of the first command on a small folder of pictures, of its report, and of the facts in its store."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from PIL import Image

from rectified_flow.cli.callbacks import build_heldout_hook
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data.description import Columns, PictureData, described_data
from rectified_flow.data.framing import Framing
from rectified_flow.data.open import Pictures, open_dataset
from rectified_flow.data.report import sentences
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from tests.programs import assert_refused, printed
from tests.ranks import run_on_ranks
from tests.training.runs import losses, tiny_dataset

TINY = "--image_size 8 --dim 8 --dim_mults 1 2 --train_num_steps 3 --lr_warmup_steps 0 --num_samples 0 --log_every 1"


@pytest.fixture(scope="module")
def one_each(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 noisy pictures, each the only one of its class."""
    folder = tmp_path_factory.mktemp("one-each")
    for number, pixels in enumerate(np.random.default_rng(0).integers(256, size=(130, 8, 8, 3), dtype=np.uint8)):
        (folder / f"{number:03}").mkdir()
        Image.fromarray(pixels).save(folder / f"{number:03}/only.png")
    return folder


def test_five_pictures_fill_any_batch(one_each: Path, tmp_path: Path) -> None:
    for number in range(5):
        shutil.copytree(one_each / f"{number:03}", tmp_path / f"pictures/{number}")
    first, _ = run_on_ranks(2, printed, f"{TINY} --dataset_path {tmp_path}/pictures --output_dir {tmp_path}/run")
    assert "recipe      --augment 0.15, for 5 pictures" in first
    assert "held out    none of 5 pictures, as too few would be left\n" in first
    assert len(losses(tmp_path / "run")) == 3


def test_a_run_without_some_files_keeps_their_list(one_each: Path, tmp_path: Path) -> None:
    for number in range(6):
        shutil.copytree(one_each / f"{number:03}", tmp_path / f"pictures/{number}")
    (tmp_path / "list.txt").write_text("3/only.png\n\n5/only.png\n")
    flags = f"{TINY} --dataset_path {tmp_path}/pictures --output_dir {tmp_path}/run --exclude {tmp_path}/list.txt"
    [said] = run_on_ranks(1, printed, flags)
    assert "4 images of 8 px" in said
    assert "left out 2 images by `exclude`\n" in said
    (tmp_path / "list.txt").unlink()
    document = json.loads((tmp_path / "run/config.json").read_text())
    assert document["data"]["pictures"]["exclude"] == ["3/only.png", "5/only.png"]
    data = described_data(document["data"], tmp_path)
    assert isinstance(data, PictureData)
    assert data.open().names == [f"{number}/only.png" for number in (0, 1, 2, 4)]


def test_frames_that_are_too_alike_to_hold_any_out(tmp_path: Path) -> None:
    """All frames are on one side of the split: only a run with an explicit flag is refused."""
    (tmp_path / "frames").mkdir()
    for number in range(130):
        Image.new("RGB", (8, 8), (100 + number % 2, 100, 100 + number // 2 % 2)).save(tmp_path / f"frames/{number}.png")
    flags = f"{TINY} --dataset_path {tmp_path}/frames --cache_dir {tmp_path}/cache"
    [said] = run_on_ranks(1, printed, f"{flags} --output_dir {tmp_path}/run")
    assert "held out    nothing, as --holdout 0.24 leaves " in said
    assert len(losses(tmp_path / "run")) == 3
    [resumed] = run_on_ranks(1, printed, f"{flags} --output_dir {tmp_path}/run --train_num_steps 4")
    assert "held out    nothing, as --holdout 0.24 leaves " in resumed
    assert len(losses(tmp_path / "run")) == 4, "the share was recorded, not given"
    for asked, named in (
        ("--holdout 0.5", "--holdout 0.5 leaves"),
        ("--stop_when_memorising", "--holdout 0.24 leaves"),
    ):
        assert_refused("train_oxford.py", 1, f"{flags} {asked} --output_dir {tmp_path}/other", named)


def test_pictures_that_are_all_excluded_are_a_sentence(pictures: Path, tmp_path: Path) -> None:
    names = " ".join(str(each.relative_to(pictures)) for each in pictures.rglob("*.png"))
    sentence = f"--exclude lists all images of {pictures.name}: list fewer images"
    assert_refused("train_oxford.py", 1, f"--dataset_path {pictures} --exclude {names} --budget 1m", sentence)


@pytest.mark.parametrize(
    ("flags", "every"),
    [
        ("--train_num_steps 3000", 300),
        ("--train_num_steps 3000 --save_every 0", 300),
        ("--train_num_steps 5", 14),
        ("--train_num_steps 5 --holdout 0.3 --stop_when_memorising", 1),
        ("--train_num_steps 3000 --evaluate_every 700 --holdout 0.3 --stop_when_memorising", 700),
        ("--num_epochs 1000 --global_batch_size 8", 400),
    ],
)
def test_the_held_out_loss_is_measured_often_enough_to_see_it_rise(flags: str, every: int, tmp_path: Path) -> None:
    """Measuring takes at most 5% of the computations, unless a flag asks for more: 224 passes here, and 192 a step.

    A run of 5 steps measures 8 of the 14 held-out pictures, with 128 passes, since it measures twice in any case.
    """
    PartialState()
    config, dataset = read_settings(TrainConfig, "", flags.split()).values, tiny_dataset(tmp_path)
    training, held_out = dataset.subset(range(32)), dataset.subset(range(32, 46))
    assert build_heldout_hook(config.run, config.evaluation, training, held_out).every == every


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """11 cats, one of them small, and 2 dogs, one of which is a cat; and a broken file."""
    for number in range(13):
        path = tmp_path / "pets" / ("cats" if number < 11 else "dogs") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = (6, 40) if number == 3 else (20 + number, 30)
        Image.new("RGB", size, (0 if number == 12 else 9 * number, 0, 0)).save(path)
    (tmp_path / "pets/dogs/99.png").write_bytes(b"nothing")
    return tmp_path / "pets"


def test_counts_and_rare_classes(pictures: Path) -> None:
    dataset = open_dataset("", pictures, image_size=8, skip_broken_images=True)
    assert dataset.description == "pets: 13 images of 8 px, 2 classes"
    assert sentences(dataset) == [
        "13 pictures of pets, 6 to 32 px wide and 30 to 40 px high",
        "1 smaller than 8 px, so enlarged and blurred, such as cats/03.png",
        "2 classes: cats (11), dogs (2)",
        "1 of 2 classes with fewer than 10 pictures: dogs (2)",
        "the network does not get the classes",
        f"skipped 1 broken image; the first is {pictures}/dogs/99.png (cannot identify image file "
        f"'{pictures}/dogs/99.png')",
        "1 picture is equal to an earlier one, such as dogs/12.png",
        "1 picture is cropped to half of the area or less (`aspect_ratio` and `crop` none keep more), such as "
        "cats/03.png",
        "13 pictures are of one colour, such as cats/00.png",
        "no picture is mirrored",
    ]
    assert "the network does not get the classes" not in sentences(dataset, {"labels"})


def test_sentences_describe_the_folder_of_this_run(pictures: Path) -> None:
    """A table is corrected, and a file removed, after the pictures were stored."""
    (pictures / "notes.odd").touch()
    (pictures / "metadata.csv").write_text("file_name,text\ncats/00.png,a red, fat cat\n")
    plain = PictureData(Pictures("", pictures, image_size=8, skip_broken_images=True))
    source = plain.find()
    source.notes = [*source.notes, "a remark on this source"]
    before = sentences(plain.open(source))
    assert "a remark on this source" in before
    assert any(note.startswith("columns for conditions are not read: ") for note in before)
    assert any("unknown formats (1 .odd)" in note for note in before)
    (pictures / "notes.odd").unlink()
    (pictures / "metadata.csv").write_text('file_name,text\ncats/00.png,"a red, fat cat"\n')
    after = sentences(plain.open())
    assert not any("columns for conditions" in note or ".odd" in note or "remark" in note for note in after)
    assert "columns that the network does not get: text" in after


def test_enlarged_pixel_art_is_not_blurred(pictures: Path) -> None:
    facts = sentences(open_dataset("", pictures, image_size=8, resize="nearest", skip_broken_images=True))
    assert "1 smaller than 8 px, so enlarged, such as cats/03.png" in facts


def test_columns_that_the_network_gets_and_those_that_it_does_not_get(pictures: Path) -> None:
    rows = [f"cats/{number:02}.png,{number % 2},cat {number}" for number in range(11)]
    (pictures / "metadata.csv").write_text("\n".join(("file_name,parity,the text", *rows)))
    data = PictureData(Pictures("", pictures, image_size=8, skip_broken_images=True), Columns(("the text=caption",)))
    PartialState()
    facts = sentences(data.open(), {"the_text"}, mirrored=True, augment=0.1)
    assert "columns that the network gets: the_text (caption)" in facts
    assert "columns that the network does not get: parity" in facts
    assert facts[-1] == "half of the pictures are mirrored, and other changes are made, each with probability 0.1"


def test_a_dry_run_writes_the_sheet_beside_the_store_and_a_run_into_its_folder(one_each: Path, tmp_path: Path) -> None:
    """The latents of a dry run are not stored, but computed for the sheet; those of a run have half precision."""
    flags = f"{TINY} --image_size 16 --autoencoder small --dataset_path {one_each} --holdout 0"
    flags += f" --cache_dir {tmp_path}/cache --output_dir {tmp_path}/run"
    [said] = run_on_ranks(1, printed, f"{flags} --dry_run")
    [sheet] = (tmp_path / "cache").glob("*-data.png")
    assert f"data sheet  {sheet}" in said
    assert not (tmp_path / "run").exists(), "a dry run claims nothing"
    [path] = (tmp_path / "cache").glob("*-plan.json")
    assert f"plan        {path}" in said
    plan = json.loads(path.read_text())
    assert (plan["flags"]["image_size"], plan["flags"]["autoencoder"]) == (16, ["small"])
    *words, last = Image.open(sheet).info["Description"].splitlines()
    assert (plan["words"], last[:32]) == (words, "the RMS error of the autoencoder")
    first, second = run_on_ranks(2, printed, flags)
    assert f"data sheet  {tmp_path}/run/data.png" in first
    assert "pictures" not in second
    planned, trained = Image.open(sheet), Image.open(tmp_path / "run/data.png")
    assert planned.info["Description"] == trained.info["Description"]
    assert all(first.count(line) == 1 for line in words)
    before, after = (np.asarray(each).astype(int) for each in (planned, trained))
    assert before.shape == after.shape
    assert abs(before - after).max() <= 8


def test_the_framing_names_a_store_where_it_is_not_the_default(tmp_path: Path) -> None:
    framings = [
        *(Framing(4, 4), Framing(8, 4), Framing(4, 8), Framing(4, 4, alpha=True)),
        *(Framing(4, 4, crop="random"), Framing(4, 4, crop="none")),
    ]
    paths = [open_store(SyntheticFlowers(8, count=2), framing, cache_dir=tmp_path) for framing in framings]
    assert len(set(paths)) == len(framings)
    for path, framing in zip(paths, framings, strict=True):
        dataset = ImageDataset(path)
        assert dataset.entries["images"].shape == (2, framing.shape[0], *framing.stored_size[::-1])
        assert dataset.read_pictures([0, 1]).shape == (2, 3, *framing.shape[1:])
        assert dataset.info.framing == framing


def test_pictures_are_compared_by_their_centre_over_white(tmp_path: Path) -> None:
    pixels = np.full((10, 10, 4), 255, np.uint8)
    pixels[1:9, 1:9] = (0, 0, 0, 255)
    pixels[4:6, 4:6] = 0
    (tmp_path / "pictures").mkdir()
    Image.fromarray(pixels).save(tmp_path / "pictures/a.png")
    dataset = open_dataset("", tmp_path / "pictures", image_size=8, crop="random", alpha=True)
    [shown] = dataset.read_pictures([0])
    assert (shown[:, 3:5, 3:5] == 255).all()
    assert (shown.sum(), shown.max()) == (3 * 4 * 255, 255)
