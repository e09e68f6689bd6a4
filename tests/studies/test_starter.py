"""Tests of the data of the starter: licences, resource files, crops and their latents."""

import json
import struct
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from PIL import Image
from safetensors.torch import load_file

from rectified_flow import Small, Trainer
from scripts import make_starter
from studies import starter, starter_data
from studies.autoencoder_data import gradient
from studies.starter_data import Plan, build, cut, is_held_out, write_table
from studies.starter_renders import FACTORIES, factory_of
from studies.starter_sources import Picture, read_resources, read_terms, terms_of

COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: Anna
License: GPL-3+

Files: images/land/*
       images/sea/*.svg
Copyright: 2001 Berta <berta@example.org>
           2002 Carl
License: public-domain
 They gave it away.

Files: images/land/snow?1.jpg
Copyright: Dora
License: CC-BY-SA-3.0

Files: images/land/sky*
Copyright: Various
License: public-domain
 Taken from unsplash.com.

Files: images/land/nc*
Copyright: Emil
License: CC-BY-NC-3.0
"""


@pytest.mark.parametrize(
    ("name", "authors"),
    [
        ("images/land/hill.png", "2001 Berta; 2002 Carl"),
        ("images/land/snow 1.webp", "Dora"),  # converted, and last in the file
        ("images/land/sky1.jpg", None),
        ("images/land/nc1.jpg", None),
        ("images/sea/wave.png", None),  # the free pattern is for drawings alone
        ("images/ship.png", None),
    ],
)
def test_a_picture_is_used_under_free_terms_only(tmp_path: Path, name: str, authors: str | None) -> None:
    (tmp_path / "copyright").write_text(COPYRIGHT)
    terms = terms_of(name, read_terms(tmp_path / "copyright"))
    assert (terms and terms.authors) == authors


def test_a_resource_file_gives_names_and_contents(tmp_path: Path) -> None:
    names, offsets = b"", []
    for name in ("folder", "a.webp", "b.txt"):
        offsets.append(len(names))
        names += struct.pack(">HI", len(name), 0) + name.encode("utf-16-be")
    packed = struct.pack(">I", 4) + zlib.compress(b"long")
    contents = struct.pack(">I", 3) + b"abc" + struct.pack(">I", len(packed)) + packed
    tree = struct.pack(">IHII", 0, 2, 1, 1) + struct.pack(">IHII", offsets[0], 2, 2, 2)
    tree += struct.pack(">IHHHI", offsets[1], 0, 0, 0, 0) + struct.pack(">IHHHI", offsets[2], 1, 0, 0, 7)
    places = (20, 20 + len(tree), 20 + len(tree) + len(contents))
    (tmp_path / "x.rcc").write_bytes(struct.pack(">4sIIII", b"qres", 1, *places) + tree + contents + names)
    assert dict(read_resources(tmp_path / "x.rcc")) == {"/folder/a.webp": b"abc", "/folder/b.txt": b"long"}


def test_a_crop_is_a_part_of_its_picture() -> None:
    image = Image.new("RGB", (300, 180), (10, 20, 30))
    crops = [np.asarray(cut(image, 64, default_rng(seed))) for seed in range(20)]
    assert all(crop.shape == (64, 64, 3) and (crop == (10, 20, 30)).all() for crop in crops)


def test_sources_are_built_once_with_held_out_pictures_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {"land": Plan("photograph", 2, 3), "words": Plan("drawing", 1, 1, over_photographs=1.0)}
    monkeypatch.setattr(starter_data, "PLANS", plans)
    monkeypatch.setattr(starter_data, "HELD_OUT", 4)
    monkeypatch.setattr(starter_data, "WHOLE", 1.0)
    files = []
    for number in range(12):
        files.append(tmp_path / f"{number}.png")
        gradient(default_rng(number), 100).save(files[-1])
    land = [Picture(file.name, f"author {number % 2}", "CC0-1.0", file) for number, file in enumerate(files)]
    Image.new("RGBA", (120, 90), (255, 0, 0, 128)).save(tmp_path / "word.png")
    Image.new("RGB", (20, 20)).save(tmp_path / "tiny.png")
    words = [Picture(name, "Fay", "MIT", tmp_path / name) for name in ("tiny.png", "word.png")]
    build(tmp_path / "data", "land", lambda: land)
    build(tmp_path / "data", "land", lambda: pytest.fail("built twice"))
    build(tmp_path / "data", "words", lambda: words)

    crops, latents = (np.load(tmp_path / "data" / f"land{end}.npy") for end in ("", "-latents"))
    held_out = sum(map(is_held_out, land))
    assert 0 < held_out < 12
    assert f'"training": {2 * (12 - held_out)}' in (tmp_path / "data/land.json").read_text()
    assert crops.shape == (24, 256, 256, 3)
    assert latents.shape == (3 * 24, 8, 16, 16)
    # A view decodes to the reduced crop, or to its mirror image.
    pictures = np.stack([np.asarray(Image.fromarray(crop).resize((128, 128))) for crop in crops[:4]]) / 127.5 - 1
    decoded = (
        Small().decode(torch.from_numpy(latents[:12]).float()).permute(0, 2, 3, 1).numpy().reshape(4, 3, 128, 128, 3)
    )
    errors = [
        [min(np.abs(each - a).mean(), np.abs(each[:, ::-1] - a).mean()) for each in views]
        for a, views in zip(pictures, decoded, strict=True)
    ]
    assert np.max(errors) < 0.1
    assert len(np.load(tmp_path / "data/words.npy")) == 1  # the tiny one is left out

    write_table({"land": lambda: land, "words": lambda: words}, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().splitlines()[1:] == [
        "land,photograph,CC0-1.0,6,author 0",
        "land,photograph,CC0-1.0,6,author 1",
        "words,drawing,MIT,2,Fay",
    ]


def test_each_round_of_renders_has_every_object_once() -> None:
    count = len(FACTORIES)
    first, second = ([factory_of(number) for number in range(start, start + count)] for start in (0, count))
    assert sorted(first) == sorted(second) == sorted(FACTORIES)
    assert first != second


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sources of latents, the second of which is constant."""
    (tmp_path / "data").mkdir()
    for name, latents in (("first", default_rng(0).normal(size=(40, 8, 16, 16))), ("second", np.ones((10, 8, 16, 16)))):
        np.save(tmp_path / f"data/{name}-latents.npy", latents.astype(np.float16))
        (tmp_path / f"data/{name}.json").write_text(json.dumps({"training": len(latents) // 2 - 1, "views": 2}))
    monkeypatch.setattr(starter, "ARMS", {"a": {"first": 1.0}, "b": {"first": 0.75, "second": 0.25}})
    monkeypatch.setattr(
        starter, "NETWORK", {"dim": 8, "dim_mults": (1, 2), "attention_sides": (), "blocks_per_level": 1}
    )
    monkeypatch.setattr(starter, "SAVE_EVERY", 2)
    return tmp_path


def test_a_mixture_has_the_shares_of_its_sources(state: Path) -> None:
    data = starter.Mixture(state / "data", starter.ARMS["b"])
    second = [bool((data[index]["latents"] == 1).all()) for index in range(len(data))]
    assert len(data) == 51  # 38 of the first, and a third as many of the second
    assert sum(second) == 13
    assert {row for name, row in data.rows if name == "first"} == set(range(38))  # without those that are held out


@pytest.mark.slow
def test_an_arm_waits_resumes_and_is_measured(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = starter.Flags(state, "b", images=32 * 6)

    naps = list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        (state / "PAUSE").unlink()

    (state / "PAUSE").touch()
    monkeypatch.setattr(time, "sleep", nap)
    with monkeypatch.context() as patch:
        original = starter.Progress.on_step

        def on_step(self: starter.Progress, trainer: Trainer) -> None:
            original(self, trainer)
            if trainer.state.step == 3:
                raise KeyboardInterrupt

        patch.setattr(starter.Progress, "on_step", on_step)
        with pytest.raises(KeyboardInterrupt):
            starter.train(flags)
    progress = state / "arms/b-192/progress.json"
    first = json.loads(progress.read_text())
    assert naps == [2]
    assert first["step"] == 2
    assert 0 < first["seconds"] < 1000
    progress.write_text(json.dumps({**first, "seconds": 1000.0}))
    starter.train(flags)
    second = json.loads(progress.read_text())
    assert (second["step"], second["images"]) == (6, 192)
    assert second["seconds"] > 1000  # the time before the kill counts
    starter.measure(flags)
    figures = json.loads((flags.folder / "figures.json").read_text())
    assert set(figures) == {"first", "second"}
    assert figures["first"] > 0.5

    monkeypatch.setattr(sys, "argv", ["make_starter.py", str(flags.folder / "run"), "--folder", str(state / "made")])
    make_starter.main()
    assert load_file(state / "made/step_00000006/model.safetensors")["conv_in.weight"].dtype == torch.float16
