"""Tests of the starter: licences, resource files, stored pictures, their views, and the training."""

import json
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from numpy.random import default_rng
from PIL import Image
from safetensors.torch import load_file

from rectified_flow import Unet
from rectified_flow.training.stepper import Stepper
from scripts import make_starter
from studies import starter, starter_data
from studies.autoencoder_data import gradient
from studies.starter_data import is_held_out, store, write_table
from studies.starter_renders import FACTORIES, factory_of
from studies.starter_sources import Picture, read_resources, read_terms, terms_of
from studies.starter_views import Views

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


def test_each_round_of_renders_has_every_object_once() -> None:
    count = len(FACTORIES)
    first, second = ([factory_of(number) for number in range(start, start + count)] for start in (0, count))
    assert sorted(first) == sorted(second) == sorted(FACTORIES)
    assert first != second


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two stored sources: gradients, and red squares on transparent ground."""
    monkeypatch.setattr(starter_data, "HELD_OUT", 4)
    (tmp_path / "pictures").mkdir()
    pictures = []
    for number in range(32):
        file = tmp_path / "pictures" / f"{number}.png"
        gradient(default_rng(number), 300).save(file)
        pictures.append(Picture(file.name, f"author {number % 2}", "CC0-1.0", file))
    square = Image.new("RGBA", (256, 256))
    square.paste((255, 0, 0, 255), (64, 64, 192, 192))
    square.save(tmp_path / "square.png")
    Image.new("RGB", (200, 100)).save(tmp_path / "tiny.png")
    words = [
        Picture(f"{name} {n}", "Fay", "MIT", tmp_path / name) for name in ("tiny.png", "square.png") for n in (1, 2)
    ]
    store(tmp_path / "sources", "land", lambda: pictures)
    store(tmp_path / "sources", "land", lambda: pytest.fail("stored twice"))
    store(tmp_path / "sources", "words", lambda: words)
    write_table({"land": lambda: pictures, "words": lambda: words}, tmp_path / "table.csv")
    return tmp_path / "sources"


def test_sources_are_stored_with_their_terms(sources: Path) -> None:
    land, words = (pq.read_table(sources / f"{name}.parquet").to_pydict() for name in ("land", "words"))
    assert (len(land["name"]), set(land["authors"])) == (32, {"author 0", "author 1"})
    assert words["name"] == ["square.png 1", "square.png 2"]  # without the small ones
    assert (sources.parent / "table.csv").read_text().splitlines()[1:] == [
        "land,photograph,CC0-1.0,16,author 0",
        "land,photograph,CC0-1.0,16,author 1",
        "words,drawing,MIT,4,Fay",
    ]


def test_views_are_parts_of_the_pictures_that_are_not_held_out(sources: Path) -> None:
    cpu = torch.device("cpu")
    training, held_out = (Views(sources, {"land": 1.0}, cpu, held_out=each) for each in (False, True))
    assert (len(training), len(held_out)) == (sum(not is_held_out(f"{n}.png") for n in range(32)), 32 - len(training))
    assert 0 < len(held_out) < 32
    images = training.read_batch(range(40))["images"]
    assert images.shape == (40, 3, 128, 128)
    # A part of a smooth picture is smooth, and has no border of other values.
    assert all(images.float().diff(dim=dim).abs().max() < 24 for dim in (2, 3))
    assert torch.equal(images, training.read_batch(range(40))["images"])
    assert not torch.equal(images, training.read_batch(range(40, 80))["images"])


def test_transparent_pictures_lie_on_other_views(sources: Path) -> None:
    mixed = Views(sources, {"land": 0.5, "words": 0.5}, torch.device("cpu"))
    images = mixed.read_batch(range(200))["images"].permute(0, 2, 3, 1).int()
    red = ((images - torch.tensor([255, 0, 0])).abs() < 16).all(dim=-1)
    shows = red.flatten(1).any(dim=1)
    assert 70 < shows.sum() < 130
    # What is not near a square is its ground: white, one colour, or a view of a gradient.
    near = F.max_pool2d(red[:, None].float(), 9, stride=1, padding=4)[:, 0] > 0
    grounds = [image[~mask] for image, mask in zip(images[shows], near[shows], strict=True)]
    varies = [bool(each.float().std(dim=0).max() > 3) for each in grounds if len(each) > 1000]
    assert 0.15 < sum(varies) / len(varies) < 0.6
    assert any(bool((each == 255).all()) for each in grounds if len(each) > 1000)


def test_the_weights_of_a_starter_become_smaller_and_compute_the_same() -> None:
    torch.manual_seed(0)
    network = Unet(dim=8, dim_mults=(1, 2), channels=3, image_size=16, attention_sides=(8,), blocks_per_level=1)
    for name, weight in network.named_parameters():
        if re.search("conv|out|skip", name):
            torch.nn.init.normal_(weight)
    inputs = torch.randn(4, 3, 16, 16), torch.rand(4)
    before = network(*inputs)
    small = make_starter.with_small_weights(network.state_dict())
    network.load_state_dict(small)
    torch.testing.assert_close(network(*inputs), before, atol=1e-3, rtol=1e-3)
    sizes = [make_starter.relative_size(weight) for name, weight in small.items() if "conv1.weight" in name]
    assert max(sizes) <= make_starter.SIZE * 1.001
    added = [make_starter.relative_size(weight) for name, weight in small.items() if "conv2.weight" in name]
    assert sum(added) / len(added) == pytest.approx(make_starter.SIZE)


@pytest.mark.slow
def test_a_training_resumes_ends_in_time_and_becomes_a_starter(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "MIXTURE", {"land": 0.75, "words": 0.25})
    monkeypatch.setattr(starter, "SCALED_VIEWS", 16)
    monkeypatch.setattr(starter, "HELD_OUT_VIEWS", 16)
    flags = starter.Flags(tmp_path, images=60, views=40, dim=8, batch_size=4)
    with monkeypatch.context() as patch:
        take = Stepper.take

        def interrupted(self: Stepper, batches: Any) -> None:
            if self.state.step == 3:
                raise KeyboardInterrupt
            take(self, batches)

        patch.setattr(Stepper, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            starter.train(flags)
    starter.train(flags)
    starter.measure(flags)
    figures = json.loads((flags.folder / "figures.json").read_text())
    assert set(figures) == {"land", "words"}
    assert figures["land"] > 0.5
    assert (flags.folder / "samples.png").exists()

    monkeypatch.setattr(sys, "argv", ["make_starter.py", str(flags.folder), "--folder", str(tmp_path / "made")])
    make_starter.main()
    made = load_file(next((tmp_path / "made").glob("*/model.safetensors")))
    assert {str(each.dtype) for each in made.values()} == {"torch.float16"}
