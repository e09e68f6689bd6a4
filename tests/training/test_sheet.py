"""Tests of the sheet of the data: the pictures of the first steps, the words, and who writes it when."""

import os
import re
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import PartialState
from PIL import Image
from torch import Tensor

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.data import find_data
from rectified_flow.cli.open_data import open_data
from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.training_flags import TrainConfig
from rectified_flow.data.report import sentences
from rectified_flow.flows.flow import Flow
from rectified_flow.runs.log import RunLog
from rectified_flow.spaces.space import with_augmentation
from rectified_flow.system.pictures import encode_picture
from rectified_flow.training.sheet import (
    CHEQUER,
    SHADES,
    WORDS,
    DataSheet,
    DataSheetHook,
    over_chequers,
    read_proof,
)
from tests.ranks import run_on_ranks
from tests.training.runs import RECTIFIED, build_trainer, tiny_config, tiny_dataset


def first_steps(folder: Path) -> tuple[Tensor, Tensor, list[int]]:
    """Train three steps of 16; return the pictures of the sheet, those of the steps, and the names of the dataset."""
    dataset = tiny_dataset(folder / "cache", 60)
    trainer = build_trainer(tiny_config(folder / "run", train_num_steps=3, sample_every=0), dataset)
    flow, seen = cast(Flow, trainer.flow), list[Tensor]()
    draw = flow.draw_batch

    def drawing(batch: dict[str, Any]) -> Any:
        drawn = draw(batch)
        seen.append(flow.space.medium.render(flow.space.decode(drawn[0])).cpu())
        return drawn

    shown, sources, _ = DataSheet(flow, trainer.dataset, [], dataset, trainer.config.seed, 16)._drawn()
    assert sources is None
    cast(Any, flow).draw_batch = drawing
    trainer.train()
    order = [int(name) for name in dataset.names]
    return shown, torch.cat(seen), order


def test_it_shows_the_pictures_of_the_first_steps_with_their_mirror_images(tmp_path: Path) -> None:
    [(shown, seen, _)] = run_on_ranks(1, first_steps, tmp_path)
    assert shown.shape == (48, 3, 8, 8)
    assert torch.equal(shown, seen)


def written_by(folder: Path, steps: int) -> tuple[bytes | None, str]:
    """Train so many steps with a hook that also counts its calls; return the sheet as the first step begins."""
    dataset = tiny_dataset(folder / "cache")
    os.chdir(folder)
    choices = ["all pictures are grey"] if steps == 2 else []  # a run that resumes does not choose again
    hook = DataSheetHook(sentences(dataset, {"labels"}, mirrored=True), dataset, choices)
    found = list[bytes | None]()

    class Look(DataSheetHook):
        def on_step(self, _trainer: Any) -> None:
            path = folder / "run/data.png"
            found.append(path.read_bytes() if path.exists() else None)

        def on_start(self, trainer: Any) -> None:
            """Write nothing."""

    config = tiny_config(folder / "run", train_num_steps=steps, sample_every=0, save_every=0)
    build_trainer(config, dataset, RECTIFIED, callbacks=[hook, Look([])]).train()
    return found[0], read_proof(folder / "run/data.png") or ""


def test_the_main_process_writes_it_before_the_first_step_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    (first, proof), _ = run_on_ranks(2, written_by, tmp_path, 2)
    path = tmp_path / "run/data.png"
    assert first == path.read_bytes()
    assert "half of the pictures are mirrored\nall pictures are grey" in Image.open(path).info[WORDS]
    time = path.stat().st_mtime_ns
    [(again, same)] = run_on_ranks(1, written_by, tmp_path, 3)
    assert (again, same, path.stat().st_mtime_ns) == (first, proof, time)
    Image.new("RGB", (8, 8)).save(path)  # such as of an older version
    [(last, same)] = run_on_ranks(1, written_by, tmp_path, 4)
    assert last is not None
    assert same == proof


def test_words_and_changes_of_the_drawing_make_another_sheet(tmp_path: Path) -> None:
    dataset = tiny_dataset(tmp_path)
    flow = RECTIFIED.build(dataset)
    one = DataSheet(flow, dataset, ["a"], dataset, 0, 16)
    other = DataSheet(flow, dataset.subset(range(9)), ["a"], dataset, 0, 16)
    changed = RECTIFIED.build(dataset)
    changed.space = with_augmentation(changed.space, 0.5)
    sheets = [
        one,
        other,
        DataSheet(flow, dataset, ["b"], dataset, 0, 16),
        DataSheet(changed, dataset, ["a"], None, 0, 4),
    ]
    assert len({sheet.fingerprint for sheet in sheets}) == 4
    assert one.fingerprint == DataSheet(flow, dataset, ["a"], dataset, 1, 4).fingerprint, "as of a resumed run"


def test_transparent_parts_show_a_chequered_ground() -> None:
    pictures = torch.zeros(1, 4, 2 * CHEQUER, 2 * CHEQUER, dtype=torch.uint8)
    pictures[:, :3], pictures[:, 3, :, :1] = 10, 255
    shown = over_chequers(pictures)
    assert shown[0, :, :, 0].unique().tolist() == [10], "an opaque column"
    assert [int(shown[0, 0, 0, x]) for x in (1, CHEQUER)] == list(SHADES)


def paint(folder: Path, *shades: int) -> Path:
    """Write a picture of each shade of red, each in a class of its own."""
    for number, shade in enumerate(shades):
        (folder / "ab"[number]).mkdir(parents=True)
        Image.new("RGB", (8, 8), (shade, 0, 0)).save(folder / f"{'ab'[number]}/{number}.png")
    return folder


def sheet_of(folder: Path, *words: str) -> DataSheet:
    """Return the sheet of a run with these flags on the pictures in a folder."""
    PartialState()
    tiny = f"--image_size 8 --dim 8 --dim_mults 1 --holdout 0 --no_horizontal_flip --cache_dir {folder}/cache"
    flags = [*tiny.split(), "--dataset_path", str(folder / "pets"), *words]
    values = read_settings(TrainConfig, "", flags).values
    data, found = find_data(values.data, values.source, values.columns)
    opened = open_data(data, found, values.data, None, split_is_given=True, stops=False, recorded=None, stores=True)
    flow = build_flow(values, opened.conditions, opened.space)
    return DataSheet(flow, opened.rows, ["a word"], opened.items, 0, 2)


def test_below_a_picture_are_its_class_its_columns_and_its_name(tmp_path: Path) -> None:
    paint(tmp_path / "pets", 0, 200)
    (tmp_path / "pets/metadata.csv").write_text("file_name,text,size\na/0.png,a small cat,3\nb/1.png,,7\n")
    sheet = sheet_of(tmp_path, "--condition_on", "text", "size", "--use_cfg")
    texts = sorted(sheet._drawn()[2])
    assert [text.split("\n") for text in texts] == [
        ["a", "text: a small cat", "size: 3", "[a/0.png]"],
        ["b", "size: 7", "[b/1.png]"],
    ]


def test_a_source_is_shown_before_its_picture(tmp_path: Path) -> None:
    paint(tmp_path / "pets", 0, 200)
    paint(tmp_path / "others", 50, 150)
    shown, sources, texts = sheet_of(tmp_path, "--source_path", str(tmp_path / "others"), "--paired")._drawn()
    assert sources is not None
    pairs = {(int(source[0, 0, 0]), int(each[0, 0, 0])) for source, each in zip(sources, shown, strict=True)}
    assert pairs == {(50, 0), (150, 200)}
    assert sorted(texts) == ["a\n[a/0.png]", "b\n[b/1.png]", "source\n[a/0.png]", "source\n[b/1.png]"]


def test_a_mask_is_shown_as_grey_in_the_source(tmp_path: Path) -> None:
    paint(tmp_path / "pets", 0, 200)
    shown, sources, texts = sheet_of(tmp_path, "--degrade", "mask:box")._drawn()
    assert sources is not None
    masked = (sources == 128).all(dim=1, keepdim=True)
    assert 0 < masked.float().mean() < 1
    assert torch.equal(sources.where(~masked, 0), shown.where(~masked, 0))
    assert texts.count("source") == 2


def test_the_words_say_how_much_the_autoencoder_changes_the_pictures(tmp_path: Path) -> None:
    paint(tmp_path / "pets", 0, 200)
    sheet = sheet_of(tmp_path, "--image_size", "32", "--autoencoder", "small")
    content = sheet.encoded()
    assert content is not None
    with Image.open(BytesIO(content)) as picture:
        said = re.search(r"the RMS error of the autoencoder on these pictures is (\d+) of 255$", picture.info[WORDS])
    assert said is not None
    assert 0 < int(said[1]) < 60
    assert sheet_of(tmp_path)._round_trip() == []


class Tracker:
    """A tracker that keeps pictures."""

    def __init__(self, name: str) -> None:
        self.name, self.pictures = name, list[tuple[str, tuple[int, ...], int]]()

    def log_images(self, values: dict[str, Any], step: int, **_layout: str) -> None:
        self.pictures += [(name, value.shape, step) for name, value in values.items()]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_trackers_get_it(name: str, tmp_path: Path) -> None:
    tracker = Tracker(name)
    log = RunLog(cast(Any, SimpleNamespace(trackers=[tracker])), tmp_path, 0)
    log.picture("data", tmp_path / "data.png", encode_picture(np.zeros((4, 5, 3), np.uint8)), 0)
    assert tracker.pictures == [("data", (1, 4, 5, 3), 0)]
    assert (tmp_path / "data.png").exists()
