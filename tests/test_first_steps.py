"""Tests of docs/first_steps.ipynb: its cells run in order, and it is saved without outputs."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "first_steps.ipynb"
TINY = """
pictures, data, steps = None, "--dataset synthetic-flowers", 6
size = "--image_size 16 --dim 16 --dim_mults 1 2"
"""


@pytest.fixture
def notebook() -> NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def has_tag(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def test_it_is_kept_without_outputs(notebook: NotebookNode) -> None:
    nbformat.validate(notebook)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_it_runs(notebook: NotebookNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook.cells = [cell for cell in notebook.cells if not has_tag(cell, "install")]
    [settings] = [cell for cell in notebook.cells if has_tag(cell, "parameters")]
    settings.source += TINY
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(shown) == 1 + 3 + 1, "the loss, three grids and the samples"
    printed = "".join(output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output)
    assert "Traceback" not in printed
    assert (tmp_path / "page.zip").exists()
