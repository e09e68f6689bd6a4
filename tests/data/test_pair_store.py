"""Stores that are written row by row resume, and the pairs and paths of commit 2b575ae are still read."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from rectified_flow.cli.distill import Recipe
from rectified_flow.data.store import StoreDataset, StoreWriter, adopt
from rectified_flow.errors import UsageError
from rectified_flow.system.artifact import find_damage
from rectified_flow.system.files import read_document

LENGTH, SIDE = 4, 2
ROWS = {"images.uint8": (3, SIDE, SIDE), "noise.float16": (3, SIDE, SIDE)}
OLD_PATHS = Path(__file__).parents[1] / "old_runs/taught/paths"


def begun(path: Path) -> StoreWriter:
    """A writer that has written the first two pairs."""
    writer = StoreWriter(path, LENGTH, ROWS, "pairs", {"source": "a flow"})
    assert writer.prepare() == 0
    images = torch.full((2, 3, SIDE, SIDE), 7, dtype=torch.uint8)
    writer.write(0, {"images.uint8": images, "noise.float16": images.float()})
    writer.reached({"done": 2})
    return writer


def test_it_resumes_where_it_was(tmp_path: Path) -> None:
    begun(tmp_path / "pairs")
    writer = StoreWriter(tmp_path / "pairs", LENGTH, ROWS, "pairs", {"source": "a flow"})
    assert writer.prepare() == 2
    writer.complete(np.full(LENGTH, -1), source="a flow", image_size=SIDE)
    assert writer.is_whole
    assert json.loads((writer.path / "recipe.json").read_text()) == {"source": "a flow"}
    assert StoreDataset(writer.path)[1]["noise"].unique().tolist() == [7.0]


def test_a_stage_without_proof_is_left_alone(tmp_path: Path) -> None:
    writer = begun(tmp_path / "pairs")
    (writer.stage / "building.json").write_text("{}")
    with pytest.raises(UsageError, match=r"pairs\.building is in the way of the pairs, and holds building\.json"):
        writer.prepare()
    assert (writer.stage / "images.uint8").exists()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return shutil.copytree(OLD_PATHS, tmp_path / "paths")


def test_paths_of_commit_2b575ae_are_adopted(old: Path) -> None:
    adopt(old, "paths")
    assert find_damage(old, "paths") is None
    assert read_document(old / "recipe.json", Recipe).points == 4
    assert StoreDataset(old).read_batch([0, 15])["path"].shape == (2, 4, 3, 8, 8)
    (old / "path.float16").write_bytes(b"")
    assert find_damage(old, "paths") == "path.float16 has the wrong size"


@pytest.mark.parametrize("name", ["images.uint8", "path.float16", "labels.npy", "info.json", "recipe.json"])
@pytest.mark.parametrize("damage", [lambda old: old[:-40] + bytes([old[-40] ^ 1]) + old[-39:], lambda _old: b"{}"])
def test_damaged_paths_of_commit_2b575ae_are_not_adopted(
    old: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    (old / name).write_bytes(damage((old / name).read_bytes()))
    with suppress(UsageError):  # what is no JSON at all
        adopt(old, "paths")
    assert find_damage(old, "paths") is not None
    with pytest.raises(UsageError, match="is in the way of the paths, and holds images"):
        StoreWriter(old, LENGTH, ROWS, "paths").prepare()
