"""Tests of every study at toy size, and of the gallery: sections of the page, commands and pictures."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from torchvision.io import write_png

import studies
from rectified_flow.errors import UsageError
from studies.gallery import PAGE, sections_of, show
from studies.gallery import run as run_commands
from studies.harness import Figures, Row, load_study, run, trainings_of
from studies.training import Budget

PROGRAMS = sorted(
    f"studies.{file.stem}" for file in Path(studies.__file__).parent.glob("*.py") if "\nSTUDY = " in file.read_text()
)


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of two classes of small pictures, which programs find by an environment variable."""
    generator = torch.Generator().manual_seed(0)
    for index in range(16):
        folder = tmp_path / "data" / "toy" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        picture = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=generator)
        write_png(picture, str(folder / f"{index}.png"))
    monkeypatch.setenv("STUDIES_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("rectified_flow.evaluation.distances.frechet_distance", lambda *_: 1.0)  # takes a second each
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compute(row: Row) -> Figures:
    """Train a row and those before it in this process, and measure it."""
    for each in trainings_of(row):
        each.folder.mkdir(parents=True, exist_ok=True)
        each.definition.train(each)
        assert each.trained is not None
    return row.definition.measure(row)


def row_of(study: str, case: str, tmp_path: Path, budget: float = 1e-5, size: int = 8) -> Row:
    return Row(f"studies.{study}", case, "toy", size, 0, budget, 6, "processor", tmp_path / "runs")


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_plan(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(program, ["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    study = load_study(program)
    assert all(name in shown for name in study.cases)
    assert shown.count("?") >= 1, "a study has a question"
    assert run(program, ["--dry_run"]) == 0
    assert "rows to compute: " in capsys.readouterr().out


@pytest.mark.slow
def test_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from studies import one_step

    monkeypatch.setattr(one_step, "PATHS", 32)
    monkeypatch.setattr(one_step, "PATH_STEPS", 2)
    figures = compute(row_of("one_step", "from a teacher", tmp_path))
    assert list(figures) == ["1 call", "2 calls", "4 calls", "16 calls"]
    assert all(figures["1 call"][name] >= 0 for name in ("frechet", "precision", "recall", "copies"))


@pytest.mark.slow
def test_quality(tmp_path: Path) -> None:
    assert compute(row_of("quality", "here", tmp_path))["averaged weights"]["frechet"] > 0


@pytest.mark.slow
def test_few_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from studies import few_pictures

    tiny = {"dim": 8, "dim_mults": (1,), "augment": 0.15, "holdout": 0, "num_samples": 0, "learning_rate": 1e-3}
    monkeypatch.setattr(few_pictures, "PLANNED", tiny)
    row = row_of("few_pictures", "planned, 30", tmp_path, budget=64)
    few_pictures.train_planned(row, "planned", 8)
    assert len(list((row.folder / "pictures").iterdir())) == 8
    assert row.trained == {"images": 64, "seconds": 0.0}
    assert few_pictures.measure(row, 8)["16 calls"].keys() == {"frechet", "kernel", "copies", "chance"}
    with Image.open(row.folder / "16 calls.png") as sheet:
        assert sheet.width == 6 * 10 + 2, "a sample, and its five nearest pictures"


@pytest.fixture
def free_precision() -> Iterator[None]:
    """Reset the state of Accelerate, so that a test can use another precision than the others."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.slow
@pytest.mark.usefixtures("free_precision")
def test_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.conditions.SCALES", (1.5,))
    rows = [f"{'ab'[i % 2]}/{i}.png,a {['red', 'blue'][i % 2]} square number {i},kind {i // 8}" for i in range(16)]
    (tmp_path / "data/toy/metadata.csv").write_text("\n".join(["file_name,text,category", *rows]))
    figures = compute(row_of("conditions", "words", tmp_path, budget=160))
    assert figures["guidance 1.5"]["frechet_distance"] > 0
    assert len(list((tmp_path / "runs").rglob("guidance 1.5.png"))) == 1


def test_a_resumed_training_has_the_seconds_of_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that is cut short after some steps spends what is left of its budget, and no more."""
    row, seen = row_of("quality", "here", tmp_path), list[tuple[int, float]]()
    row.folder.mkdir(parents=True)
    row.definition.train(row)
    (row.folder / "trained.json").unlink()
    (row.folder / "seconds.jsonl").write_text("[1, 1000.0]\n")
    start = Budget.on_start

    def watch(budget: Budget, trainer: object) -> None:
        start(budget, trainer)  # type: ignore[arg-type]
        seen.append((trainer.state.step, budget.seconds))  # type: ignore[attr-defined]

    monkeypatch.setattr(Budget, "on_start", watch)
    row.definition.train(row)
    [(step, seconds)] = seen
    assert step == 1
    assert seconds >= 1000
    assert row.trained is not None
    assert row.trained["images"] == 8, "no further step"


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


@pytest.mark.slow
def test_commands_run_in_the_folder_until_one_fails(tmp_path: Path) -> None:
    run_commands("rectified-flow --help > help.txt\npython -c 'import rectified_flow'", tmp_path)
    assert "rectified-flow" in (tmp_path / "help.txt").read_text()
    with pytest.raises(UsageError, match="the last command above failed"):
        run_commands("rectified-flow sample --like a.avi\ntouch later", tmp_path)
    assert not (tmp_path / "later").exists()
