"""What a store of pairs says of itself is checked before it is believed."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from rectified_flow.data.store import StoreDataset
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.errors import UsageError

LENGTH, SIDE = 4, 2
ROWS = {"images.uint8": (3, SIDE, SIDE), "noise.float16": (3, SIDE, SIDE)}


@dataclass(frozen=True)
class Recipe:
    source: str
    sha256: str = ""


def begun(path: Path) -> StoreWriter:
    """A writer that has written the first two pairs."""
    writer = StoreWriter(path, LENGTH, ROWS, "pairs")
    assert writer.begin({"source": "a flow"}) == 0
    images = torch.full((2, 3, SIDE, SIDE), 7, dtype=torch.uint8)
    writer.write(0, {"images.uint8": images, "noise.float16": images.float()})
    writer.reached(2)
    return writer


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    writer = begun(tmp_path / "pairs")
    assert writer.begin({"source": "a flow"}) == 2
    assert StoreWriter.recipe_of(tmp_path / "pairs", Recipe).source == "a flow"  # type: ignore[union-attr]
    writer.finish(np.full(LENGTH, -1), source="a flow", image_size=SIDE)
    assert writer.is_whole
    assert StoreDataset(writer.path)[1]["noise"].unique().tolist() == [7.0]


@pytest.mark.parametrize("content", ['{"done": 4}', '{"done": "2"}', '{"done": -1}', "null", "", '{"done": 3}'])
def test_a_damaged_progress_starts_again(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs that were never drawn would be zeros."""
    writer = begun(tmp_path / "pairs")
    file = writer.stage / "progress.json"
    if "done" in content:
        content = json.dumps(json.loads(file.read_text()) | json.loads(content))
    file.write_text(content)
    assert writer.begin({"source": "a flow"}) == 0
    assert f"warning: {file} " in capsys.readouterr().out
    assert writer.begin({"source": "a flow"}) == 0


def test_an_altered_recipe_is_refused(tmp_path: Path) -> None:
    writer = begun(tmp_path / "pairs")
    file = writer.stage / "recipe.json"
    file.write_text(file.read_text().replace("a flow", "b flow"))
    with pytest.raises(UsageError, match=r"recipe\.json was altered"):
        StoreWriter.recipe_of(writer.path, Recipe)
