"""Tests of single kinds beyond the contract: transparency and crops, columns, and flows from pictures to pictures."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rectified_flow.data.description import PictureData, Sources
from rectified_flow.data.open import Pictures
from rectified_flow.load import load_flow
from rectified_flow.runs.checkpoint import CONFIG_FILE
from rectified_flow.system.artifact import MANIFEST
from tests.contract.kinds import COUNT, LAST, SIDE, Runs, sample, write_png
from tests.programs import assert_refused, quick_program


@pytest.fixture
def cutouts(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("cutouts")


def test_samples_have_transparency_and_the_grid_has_none(cutouts: Runs, tmp_path: Path) -> None:
    flags = "--num_samples 2 --steps 1 --from_images {data}/cutouts --strength 0.001"
    assert cutouts.call("sample.py", flags, tmp_path) == ""
    drawn = [Image.open(file) for file in sorted(tmp_path.glob("0*.png"))]
    assert [(picture.mode, picture.size) for picture in drawn] == [("RGBA", (12, 8))] * 2
    assert Image.open(tmp_path / "grid.png").mode == "RGB"
    alpha = np.asarray(drawn[0])[..., 3]
    assert alpha[3:5, 4:6].max() < 40, "the hole of the picture that it starts from"
    assert alpha[0].min() > 215


@pytest.fixture
def columns(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("columns")


def test_the_network_has_learned_from_every_column(columns: Runs) -> None:
    flow = load_flow(columns.one)
    assert list(flow.conditions) == ["text", "size", "parity"]
    weights = flow.network.state_dict()
    for name in ("text_embedding.outer.weight", "text_sequence.linear.weight", "size_embedding.linear.weight"):
        assert weights[name].std() > 0


def test_prompts_are_the_names_of_their_pictures(columns: Runs, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a red heart\n\na blue star\na red heart\n")
    flags = f"--steps 2 --prompts {tmp_path}/prompts.txt --set size=3 --set parity=odd"
    assert columns.call("sample.py", flags, tmp_path / "made") == ""
    names = ["00000-a-red-heart.png", "00001-a-blue-star.png", "00002-a-red-heart.png", "grid.png"]
    assert sorted(file.name for file in (tmp_path / "made").glob("*.png")) == names


def test_cells_of_a_grid_differ_in_its_axes_alone(columns: Runs, tmp_path: Path) -> None:
    """Rows of the grid over a number and seeds: column 0 has the draws of sample 0, whatever the number."""
    flags = "--steps 2 --prompt heart --set parity=odd"
    assert columns.call("sample.py", f"{flags} --grid size=1,20 seed=2", tmp_path / "grid") == ""
    assert columns.call("sample.py", f"{flags} --num_samples 2 --set size=20", tmp_path / "alone") == ""
    cells = [np.asarray(Image.open(tmp_path / f"grid/{number:05}.png")).astype(int) for number in range(4)]
    alone = [np.asarray(Image.open(tmp_path / f"alone/{number:05}.png")).astype(int) for number in range(2)]
    assert np.abs(cells[2] - alone[0]).max() <= 1
    assert np.abs(cells[3] - alone[1]).max() <= 1
    assert Image.open(tmp_path / "grid/grid.png").size == (2 * (112 + 2) + 2, 2 * (112 + 42 + 2) + 2)


def test_guidance_of_one_condition(columns: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--steps 2 --num_samples 1 --set size=3 --set parity=odd --guidance size=3 parity=2"
    sample(columns.kind, f"--checkpoint {columns.one} {flags} --output_dir {tmp_path}".split())
    assert "6 of the network for each picture" in capsys.readouterr().out, "three times as many as without"


def test_a_text_encoder_that_has_moved(columns: Runs, tmp_path: Path) -> None:
    shutil.copytree(columns.data / "encoder", tmp_path / "encoder")
    flags = "--steps 1 --num_samples 1 --prompt heart --set size=3 --text_encoder"
    assert columns.call("sample.py", f"{flags} {tmp_path}/encoder", tmp_path / "made") == ""
    assert "nowhere" in columns.call("sample.py", f"{flags} {tmp_path}/nowhere", tmp_path / "other")
    flags = f"--format page --text_encoder {tmp_path}"
    assert columns.call("export.py", f"{flags}/encoder", tmp_path / "exported", quick_program) == ""
    said = columns.call("export.py", f"{flags}/nowhere", tmp_path / "exported", quick_program)
    assert f"--text_encoder {tmp_path}/nowhere cannot be loaded" in said
    said = columns.call("export.py", "--autoencoder x", tmp_path / "exported", quick_program)
    assert "--autoencoder has no effect: the flow has no autoencoder" in said


def test_columns_that_have_changed(columns: Runs, tmp_path: Path) -> None:
    shutil.copytree(columns.data / "columns", tmp_path / "columns")
    (tmp_path / "columns/metadata.csv").unlink()
    refusal = columns.call("evaluate.py", f"--dataset_path {tmp_path}/columns", tmp_path / "out")
    assert "does not exist in columns: its columns are none; write" in refusal


@pytest.fixture
def paired(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("paired")


def pixels(path: Path) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    return np.asarray(Image.open(path)).astype(int)


@pytest.mark.parametrize(("name", "most"), [("paired", 0), ("paired latents", 1)])
def test_the_preview_shows_sources_beside_samples(name: str, most: int, kind_runs: Callable[[str], Runs]) -> None:
    runs = kind_runs(name)
    grid = pixels(runs.one / f"samples/{Path(LAST).name}.png")
    assert grid.shape == (SIDE + 4, 6 * (SIDE + 2) + 2, 3), "three pairs in a row"
    assert np.abs(grid[2 : 2 + SIDE, 2 : 2 + SIDE] - pixels(runs.data / "from/00.png")).max() <= most


def test_the_nearest_pictures_are_found_without_the_sources(
    paired: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(paired.one, tmp_path / "run")
    for name in (CONFIG_FILE, f"{LAST}/{CONFIG_FILE}"):
        (run / name).write_text((run / name).read_text().replace(f"{paired.data}/from", f"{tmp_path}/gone"))
    manifest = json.loads((run / LAST / MANIFEST).read_text())
    text = (run / LAST / CONFIG_FILE).read_bytes()
    manifest["files"][CONFIG_FILE] = {"size": len(text), "sha256": sha256(text).hexdigest()}
    (run / LAST / MANIFEST).write_text(json.dumps(manifest))
    flags = f"--checkpoint {run} --from_images {paired.data}/from --num_samples 1 --steps 1"
    sample(paired.kind, [*flags.split(), "--nearest", "--output_dir", str(tmp_path / "made")])
    assert (tmp_path / "made/nearest.png").exists()
    assert "warning" not in capsys.readouterr().out


def test_variants_of_a_source_have_its_name_and_other_noise(paired: Runs, tmp_path: Path) -> None:
    assert paired.call("sample.py", f"{paired.kind.sample} --variants 2", tmp_path) == ""
    names = {file.name for file in tmp_path.glob("*.png")}
    assert names == {"grid.png", *(f"{number:02}-{variant}.png" for number in range(3) for variant in (1, 2))}
    assert np.array_equal(
        pixels(tmp_path / "grid.png")[2 : 2 + SIDE, 2 : 2 + SIDE], pixels(paired.data / "from/00.png")
    )
    assert not np.array_equal(pixels(tmp_path / "00-1.png"), pixels(tmp_path / "00-2.png"))


@pytest.mark.parametrize("name", ["degraded", "pictures"])
def test_what_is_not_masked_stays_to_the_bit(name: str, kind_runs: Callable[[str], Runs], tmp_path: Path) -> None:
    """The right half of pictures is generated by a run that was trained on holes, and by one from noise."""
    runs, known = kind_runs(name), kind_runs("degraded").data / "to"
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8)
    mask[:, SIDE // 2 :] = 255
    write_png(tmp_path / "mask.png", mask)
    write_png(tmp_path / "other.png", np.full((SIDE + 1, SIDE), 255, dtype=np.uint8))
    flags = f"--from_images {known} --num_samples 2 --steps 2 --variants 2 --mask {tmp_path}"
    assert runs.call("sample.py", f"{flags}/mask.png", tmp_path / "made") == ""
    first, second = (pixels(tmp_path / f"made/01-{variant}.png") for variant in (1, 2))
    for made in (first, second):
        assert np.array_equal(made[:, : SIDE // 2], pixels(known / "01.png")[:, : SIDE // 2])
    assert not np.array_equal(first, second)
    refusal = runs.call("sample.py", f"{flags}/other.png", tmp_path / "other")
    assert f"8x{SIDE + 1} px" in refusal
    assert "pass a mask of the same size" in refusal


def test_unpaired_items_have_each_source_once_in_an_epoch(paired: Runs) -> None:
    data = PictureData(Pictures(dataset_path=paired.data / "to", image_size=SIDE))
    pictures = replace(data, sources=Sources(paired.data / "from")).open()
    epochs = [pictures.read_batch(range(COUNT * epoch, COUNT * (epoch + 1))) for epoch in (0, 1)]
    assert all(np.array_equal(epochs[0]["images"], epoch["images"]) for epoch in epochs)
    first, second = ([tuple(row.flatten().tolist()) for row in epoch["source"]] for epoch in epochs)
    assert first != second
    assert set(first) == set(second)
    assert len(set(first)) == COUNT
    in_pairs = replace(data, sources=Sources(paired.data / "from", paired=True)).open()
    batch = in_pairs.read_batch(range(COUNT, COUNT + 5))
    assert np.array_equal(batch["source"], 255 - batch["images"])
    assert len({pictures.fingerprint, in_pairs.fingerprint, data.open().fingerprint}) == 3


def test_pictures_without_a_partner_are_named_and_left_out(paired: Runs, tmp_path: Path) -> None:
    shutil.copytree(paired.data / "from", tmp_path / "from")
    for name in ("03.png", "05.png"):
        (tmp_path / "from" / name).unlink()
    (tmp_path / "from/07.png").write_bytes(b"broken")
    (tmp_path / "from/more").mkdir()
    (tmp_path / "from/more/08.png").write_bytes(b"broken")
    shutil.copy(paired.data / "to/00.png", tmp_path / "from/extra.png")
    pictures = PictureData(
        Pictures(dataset_path=paired.data / "to", image_size=SIDE, skip_broken_images=True),
        sources=Sources(tmp_path / "from", paired=True),
    ).open()
    assert len(pictures) == COUNT - 3
    batch = pictures.read_batch(range(len(pictures)))
    assert np.array_equal(batch["source"], 255 - batch["images"])
    for name in ("07.png", "more/08.png"):
        (tmp_path / "from" / name).unlink()
    refused = f"--dataset_path {paired.data}/to --source_path {tmp_path}/from --paired"
    refused += f" --image_size 8 --dim 8 --dim_mults 1 --num_epochs 1 --output_dir {tmp_path}/run"
    assert_refused("train_oxford.py", 1, refused, "4 pictures in", "and shape, such as 03", "--skip_broken_images")
