"""Tests of the gallery: sections of the page, commands and pictures."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.errors import UsageError
from studies.gallery import PAGE, run, sections_of, show


def test_every_section_has_a_picture_and_commands() -> None:
    page = PAGE.read_text()
    sections = sections_of(page)
    assert len(sections) == page.count("![") > 5
    for section in sections:
        assert (PAGE.parent / section.picture).exists(), section.picture
        assert f"pictures/{section.picture.stem}" in section.commands, section.title


def test_a_grid_or_rows_become_the_picture(tmp_path: Path) -> None:
    for shade, name in ((0, "1 one call"), (200, "2 two calls")):
        (tmp_path / "made" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (4, 4), (shade, 0, number)).save(tmp_path / "made" / name / f"0000{number}.png")
    (tmp_path / "rows.png").write_bytes(b"the picture of a checkout")
    show(tmp_path / "made", tmp_path / "rows.png")
    pixels = np.asarray(Image.open(tmp_path / "rows.png"))
    rows = (10, len(pixels) // 2 + 10)  # below each picture is its text
    assert [pixels[row, -10].tolist() for row in rows] == [[0, 0, 1], [200, 0, 1]]
    Image.new("RGB", (4, 4), "red").save(tmp_path / "made/grid.png")
    show(tmp_path / "made", tmp_path / "grid.png")
    assert Image.open(tmp_path / "grid.png").size == (400, 400)
    (tmp_path / "made.png").write_bytes(b"a plot")
    show(tmp_path / "made", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes() == b"a plot"


def test_commands_run_in_the_folder_until_one_fails(tmp_path: Path) -> None:
    run("rectified-flow --help > help.txt\npython -c 'import rectified_flow'", tmp_path)
    assert "rectified-flow" in (tmp_path / "help.txt").read_text()
    with pytest.raises(UsageError, match="the last command above failed"):
        run("rectified-flow sample --like a.avi\ntouch later", tmp_path)
    assert not (tmp_path / "later").exists()
