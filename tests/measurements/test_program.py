"""Tests of runs on measurements: values, ranges, unknown values and the page; see also tests/contract."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torch import Tensor

from rectified_flow.data.open import open_dataset
from rectified_flow.evaluation import evaluator
from rectified_flow.evaluation.features import average_colours
from rectified_flow.flows.flow import Flow
from rectified_flow.load import load_flow
from rectified_flow.measurements.space import Fields
from tests.contract.kinds import COUNT, SIDE, UNET, Runs
from tests.programs import call, quick_frechet_distance, quick_program, refusal
from tests.ranks import run_on_ranks
from tests.training.runs import losses

TINY = f"{UNET} --global_batch_size 8 --train_num_steps 2 --num_samples 0"


@pytest.fixture
def floats(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("floats")


@pytest.fixture
def counts(kind_runs: Callable[[str], Runs]) -> Runs:
    return kind_runs("counts")


def run(name: str, flags: str) -> None:
    [(code, errors)] = run_on_ranks(1, quick_program, name, flags.split())
    assert code == 0, errors


def test_stored_values_are_those_of_the_files(counts: Runs, floats: Runs) -> None:
    pictures = open_dataset("", counts.data / "counts", image_size=SIDE, space="Fields")
    stored = pictures.read_batch(range(COUNT))["images"]
    assert stored.dtype == torch.uint16
    for number in range(COUNT):
        assert np.array_equal(stored[number].numpy(), tifffile.imread(counts.data / f"counts/{number:02}.tif"))
    how: dict[str, Any] = {"space": ["Fields", "store_bits=16"]}
    halves = open_dataset("", floats.data / "floats", image_size=SIDE, **how)
    assert halves.read_batch([0])["images"].dtype == torch.float16
    assert halves.space.has_missing


def test_the_space_is_that_of_the_flags_and_of_the_values(counts: Runs, floats: Runs) -> None:
    space = load_flow(floats.one).space
    assert isinstance(space, Fields)
    assert (type(space.transform).__name__, space.show, space.has_missing) == ("Log", "2:magma", True)
    assert 280.1 <= min(space.low) < max(space.high) <= 286
    space = load_flow(counts.one).space
    assert isinstance(space, Fields)
    assert (space.shape, space.dtype, space.show, space.has_missing) == ((5, SIDE, SIDE), "uint16", "1:grey", False)


def test_samples_are_files_like_those_of_the_data(counts: Runs, floats: Runs, tmp_path: Path) -> None:
    for runs, name in ((counts, "counts"), (floats, "floats")):
        assert runs.call("sample.py", runs.kind.sample, tmp_path / name) == ""
    written = sorted(file.name for file in (tmp_path / "counts").iterdir() if not file.name.startswith("."))
    assert written == sorted([*(f"0000{n}{end}" for n in range(3) for end in (".tif", "-preview.png")), "grid.png"])
    with tifffile.TiffFile(tmp_path / "counts/00000.tif") as file:
        assert (file.series[0].shape, file.series[0].dtype) == ((5, SIDE, SIDE), np.dtype("uint16"))
        assert file.pages.first.tags["XResolution"].value == (50, 1)
    values = np.load(tmp_path / "floats/00000.npy")
    assert (values.shape, values.dtype) == ((2, SIDE, SIDE), np.float32)
    assert 250 < values.mean() < 320, "not in physical units"
    assert Image.open(tmp_path / "floats/grid.png").height > 2 * SIDE + 10, "no legend below"


def test_the_nearest_fields_are_shown_in_the_colours_of_the_samples(
    floats: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fields that hardly change are near, though the store shows them in other colours and with another scale."""
    words = f"--checkpoint {floats.one} --num_samples 4 --steps 1 --from_images {floats.data}/floats --strength 0.0001"
    call("sample.py", *f"{words} --nearest --output_dir {tmp_path}".split())
    [distance] = re.findall(r"the smallest distance is ([\d.]+) of 256", capsys.readouterr().out)
    assert float(distance) < 5


def test_real_fields_are_compared_in_the_colours_of_the_samples(
    floats: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real fields as samples have no distance, though the store shows another channel, without the logarithm."""
    fields = torch.from_numpy(np.stack([np.load(floats.data / f"floats/{n:02}.npy") for n in range(COUNT)]))

    def perfect(flow: Flow, numbers: list[int], **_: object) -> Iterator[tuple[list[int], Tensor]]:
        yield numbers, flow.space.medium.render(flow.space.decode(flow.space.encode(fields[numbers])))

    monkeypatch.setattr(evaluator, "sample_batches", perfect)
    monkeypatch.setattr(evaluator, "load_features", lambda *_: average_colours())
    flags = f"--checkpoint {floats.one} --metric frechet --num_samples {COUNT} --steps 1 --output_dir {tmp_path}"
    with quick_frechet_distance():
        call("evaluate.py", *flags.split())
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    assert result["distances"] == {"colours_8x8_frechet_distance": pytest.approx(0, abs=1e-6)}
    assert (result["image_size"], result["framing"]["width"]) == (SIDE, SIDE)


def test_the_page_of_a_one_step_model_shows_a_channel(floats: Runs, tmp_path: Path) -> None:
    """A one-step model has the range of its teacher, even if the data have other values now."""
    shutil.copytree(floats.data / "floats", tmp_path / "grown")
    np.save(tmp_path / "grown/z.npy", np.full((2, SIDE, SIDE), 1000, np.float32))
    flags = f"--teacher {floats.one} --dataset_path {tmp_path}/grown --teacher_samples 16 --teacher_steps 2"
    flags += " --global_batch_size 8 --train_num_steps 2 --num_samples 0"
    run("train_mean_flow.py", f"{flags} --output_dir {tmp_path}/map")
    run("export.py", f"--checkpoint {tmp_path}/map --format page --output_dir {tmp_path}/page")
    described = json.loads((tmp_path / "page/model.json").read_text())["fields"]
    assert (described["shown"], described["transform"]) == ([1], {"kind": "Log"})
    assert len(described["colours"]) == 256
    run("sample.py", f"--checkpoint {tmp_path}/map --num_samples 1 --output_dir {tmp_path}/made")
    assert np.load(tmp_path / "made/00000.npy").shape == (2, SIDE, SIDE)
    spaces = [load_flow(path).space for path in (floats.one, tmp_path / "map")]
    assert spaces[0].high == spaces[1].high  # type: ignore[attr-defined]


def test_a_planned_run_counts_the_time_to_read_fields(floats: Runs, tmp_path: Path) -> None:
    """The fields are neither stored nor measured before the dry run, and are stored before the run."""
    flags = f"--dataset_path {floats.data}/floats --cache_dir {tmp_path}/cache {UNET} --budget 1s --num_samples 0"
    run("train_oxford.py", f"{flags} --dry_run")
    run("train_oxford.py", f"{flags} --output_dir {tmp_path}/run")
    assert isinstance(load_flow(tmp_path / "run").space, Fields)


def test_two_folders_have_ranges_of_their_own(floats: Runs, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for file in (floats.data / "floats").iterdir():
        np.save(tmp_path / "small" / file.name, np.load(file) * 1e-6)
    flags = f"--dataset_path {floats.data}/floats --source_path {tmp_path}/small --paired {TINY}"
    run("train_oxford.py", f"{flags} --augment 0 --holdout 0 --log_every 1 --output_dir {tmp_path}/run")
    assert max(losses(tmp_path / "run").values()) < 10, "sources of 3e-4 were read as data of 280"
    space = load_flow(tmp_path / "run").space
    assert isinstance(space, Fields)
    assert space.sources is not None
    assert max(space.sources.high) < 1e-3
    run("sample.py", f"--checkpoint {tmp_path}/run --from_images {tmp_path}/small/03.npy --output_dir {tmp_path}/made")
    assert np.isfinite(np.load(tmp_path / "made/03.npy")).all()


def test_a_channel_of_one_value_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    for number in range(4):
        np.save(tmp_path / f"bad/{number}.npy", np.zeros((2, 8, 8), np.float32))
    words = f"--dataset_path {tmp_path}/bad --cache_dir {tmp_path}/cache {TINY} --output_dir {tmp_path}/x"
    assert "channel 1 of bad has one value, or none" in refusal("train_oxford.py", words.split())


def test_unknown_values_of_a_given_field_are_generated(floats: Runs, tmp_path: Path) -> None:
    Image.fromarray(np.pad(np.full((4, 4), 255, np.uint8), 2)).save(tmp_path / "mask.png")
    given = np.load(floats.data / "floats/05.npy")
    assert np.isnan(given).any()
    flags = "--from_images {data}/floats/05.npy --steps 2 --num_samples 1"
    for more, name in ((f"--mask {tmp_path}/mask.png", "05.npy"), ("--strength 0.5", "00000.npy")):
        assert floats.call("sample.py", f"{flags} {more}", tmp_path / name) == ""
        assert np.isfinite(np.load(tmp_path / name / name)).all(), more
    filled = np.load(tmp_path / "05.npy/05.npy")
    kept = ~np.isnan(given)
    kept[:, 2:6, 2:6] = False
    assert np.array_equal(filled[kept], given[kept])


def test_other_measurements_are_refused(counts: Runs, floats: Runs, tmp_path: Path) -> None:
    said = counts.call("evaluate.py", f"--dataset_path {floats.data}/floats --num_samples 4 --steps 1", tmp_path)
    assert "has 2 channels of float32, and the flow was trained on 5 channels of uint16" in said
    said = counts.call("sample.py", f"--from_images {floats.data}/floats", tmp_path)
    assert "is neither a file nor a folder of files" in said
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg")
    said = counts.call("sample.py", f"--from_images {tmp_path}/photo.jpg", tmp_path)
    assert "(fields are in files that end with .npy, .png, .tif): convert it, or leave it out" in said
