"""Stores that are written row by row resume."""

import json
from pathlib import Path

import numpy as np
import torch

from rectified_flow.data.store import StoreDataset, StoreWriter

LENGTH, SIDE = 4, 2
ROWS = {"images.uint8": (3, SIDE, SIDE), "noise.float16": (3, SIDE, SIDE)}


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
