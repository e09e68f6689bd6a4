"""Tests of runs on columns of captions, numbers and labels: prompts, grids and guidance by a column."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.load import load_flow
from tests.contract.kinds import Runs, sample


@pytest.fixture
def runs(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("columns")


def test_the_network_has_learned_from_every_column(runs: Runs) -> None:
    flow = load_flow(runs.one)
    assert list(flow.conditions) == ["text", "size", "parity"]
    weights = flow.network.state_dict()
    for name in ("text_embedding.outer.weight", "text_sequence.linear.weight", "size_embedding.linear.weight"):
        assert weights[name].std() > 0


def test_prompts_are_the_names_of_their_pictures(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red heart\n\na blue star\na red heart\n")
    flags = f"--steps 2 --prompts {tmp_path}/prompts.txt --set size=3 --set parity=odd"
    assert runs.call("sample.py", flags, tmp_path / "made") == ""
    names = ["00000-a-red-heart.png", "00001-a-blue-star.png", "00002-a-red-heart.png", "grid.png"]
    assert sorted(file.name for file in (tmp_path / "made").glob("*.png")) == names


def test_cells_of_a_grid_differ_in_its_axes_alone(runs: Runs, tmp_path: Path) -> None:
    """Rows of the grid over a number and seeds: column 0 has the draws of sample 0, whatever the number."""
    flags = "--steps 2 --prompt heart --set parity=odd"
    assert runs.call("sample.py", f"{flags} --grid size=1,20 seed=2", tmp_path / "grid") == ""
    assert runs.call("sample.py", f"{flags} --num_samples 2 --set size=20", tmp_path / "alone") == ""
    cells = [np.asarray(Image.open(tmp_path / f"grid/{number:05}.png")).astype(int) for number in range(4)]
    alone = [np.asarray(Image.open(tmp_path / f"alone/{number:05}.png")).astype(int) for number in range(2)]
    assert np.abs(cells[2] - alone[0]).max() <= 1
    assert np.abs(cells[3] - alone[1]).max() <= 1
    assert Image.open(tmp_path / "grid/grid.png").size == (2 * (112 + 2) + 2, 2 * (112 + 42 + 2) + 2)


def test_guidance_of_one_condition(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--steps 2 --num_samples 1 --set size=3 --set parity=odd --guidance size=3 parity=2"
    sample(runs.kind, f"--checkpoint {runs.one} {flags} --output_dir {tmp_path}".split())
    assert "6 of the network for each picture" in capsys.readouterr().out, "three times as many as without"


def test_columns_that_have_changed(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.data / "columns", tmp_path / "columns")
    (tmp_path / "columns/metadata.csv").unlink()
    refusal = runs.call("evaluate.py", f"--dataset_path {tmp_path}/columns", tmp_path / "out")
    assert "does not exist in columns: its columns are none; write" in refusal
