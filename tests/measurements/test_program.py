"""Every program on measurements: equal results on 1 and 2 processes and after resuming, file formats, and bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from rectified_flow.data.open import open_dataset
from rectified_flow.load import load_flow
from rectified_flow.measurements.space import Fields
from tests.programs import assert_refused, program, quick_program
from tests.ranks import run_on_ranks
from tests.training.runs import losses

COUNT, CHANNELS, SIDE = 40, 5, 8
TINY = (
    "--dim 8 --dim_mults 1 --global_batch_size 8 --augment 0.1 --holdout 0.4 --train_num_steps 8 --save_every 4"
    " --log_every 1 --num_samples 4 --sample_steps 2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with 16-bit files of five channels, and with float files of two channels and unknown values."""
    folder = tmp_path_factory.mktemp("fields")
    for name in ("counts", "floats"):
        (folder / name).mkdir()
    for seed in range(COUNT):
        values = np.random.default_rng(seed).integers(1000, 60000, (CHANNELS, SIDE, SIDE), dtype=np.uint16)
        how: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "separate", "resolutionunit": 3}
        how["resolution"] = (50, 50)
        tifffile.imwrite(folder / f"counts/{seed:02}.tif", values, **how)
        floats = (280 + values[:2] / 1e4).astype(np.float32)
        floats[0, 0, : seed % 3] = np.nan
        np.save(folder / f"floats/{seed:02}.npy", floats)
    return folder


def train(folder: Path, name: str, output_dir: Path, more: str = "") -> None:
    from rectified_flow.cli.config import TrainConfig
    from rectified_flow.cli.train import train
    from rectified_flow.flags import parse

    flags = f"--dataset_path {folder}/{name} --cache_dir {folder}/cache --native_size {TINY} {more}"
    assert train(parse(TrainConfig, "", [*flags.split(), "--output_dir", str(output_dir)]))


def sample(flags: str) -> None:
    from rectified_flow.cli.flags.sampling import SampleConfig
    from rectified_flow.cli.sample import sample as draw_samples
    from rectified_flow.flags import parse

    draw_samples(parse(SampleConfig, "", flags.split()))


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 8 steps: uninterrupted and resumed at step 4 on two processes, on one process, and on floats."""
    runs = tmp_path_factory.mktemp("runs")
    run_on_ranks(2, train, folder, "counts", runs / "two")
    shutil.copytree(runs / "two", runs / "resumed")
    shutil.rmtree(runs / "resumed/checkpoints/step_00000008")
    run_on_ranks(2, train, folder, "counts", runs / "resumed")
    run_on_ranks(1, train, folder, "counts", runs / "one")
    run_on_ranks(1, train, folder, "floats", runs / "floats", "--space_options transform=log show=2:magma")
    return runs


def test_the_same_run_on_one_process_and_on_two(runs: Path) -> None:
    assert losses(runs / "one") == pytest.approx(losses(runs / "two"), rel=1e-3)
    assert len(set(losses(runs / "one").values())) == 8


def test_a_resumed_run_is_the_same_to_the_byte(runs: Path) -> None:
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors"):
        straight, resumed = (runs / run / "checkpoints/step_00000008" / name for run in ("two", "resumed"))
        assert straight.read_bytes() == resumed.read_bytes(), name


def test_stored_values_are_those_of_the_files(folder: Path) -> None:
    pictures = open_dataset("", folder / "counts", image_size=SIDE, space="Fields", cache_dir=folder / "cache")
    stored = pictures.read_batch(range(COUNT))["images"]
    assert stored.dtype == torch.uint16
    for number in range(COUNT):
        assert np.array_equal(stored[number].numpy(), tifffile.imread(folder / f"counts/{number:02}.tif"))
    how: dict[str, Any] = {"space": "Fields", "space_options": ["store_bits=16"], "cache_dir": folder / "cache"}
    halves = open_dataset("", folder / "floats", image_size=SIDE, **how)
    assert halves.read_batch([0])["images"].dtype == torch.float16
    assert halves.space.has_missing


def test_the_space_is_that_of_the_flags_and_of_the_values(runs: Path) -> None:
    space = load_flow(runs / "floats").space
    assert isinstance(space, Fields)
    assert (type(space.transform).__name__, space.show, space.has_missing) == ("Log", "2:magma", True)
    assert 280.1 <= min(space.low) < max(space.high) <= 286
    counts = load_flow(runs / "one").space
    assert isinstance(counts, Fields)
    assert (counts.shape, counts.dtype, counts.show, counts.has_missing) == ((5, 8, 8), "uint16", "1:grey", False)


def test_samples_are_files_like_those_of_the_data(runs: Path, tmp_path: Path) -> None:
    for name, world_size in (("one", 1), ("one", 2), ("floats", 1)):
        flags = f"--checkpoint {runs}/{name} --steps 2 --num_samples 3 --output_dir {tmp_path}/{name}{world_size}"
        run_on_ranks(world_size, sample, flags)
    written = sorted(file.name for file in (tmp_path / "one1").iterdir() if not file.name.startswith("."))
    assert written == sorted([*(f"0000{n}{end}" for n in range(3) for end in (".tif", "-preview.png")), "grid.png"])
    with tifffile.TiffFile(tmp_path / "one1/00000.tif") as file:
        assert file.series[0].shape == (CHANNELS, SIDE, SIDE)
        assert file.series[0].dtype == np.dtype("uint16")
        assert file.pages.first.tags["XResolution"].value == (50, 1)
    one, two = (tifffile.imread(tmp_path / f"one{n}/00002.tif").astype(int) for n in (1, 2))
    assert np.abs(one - two).max() <= 2
    values = np.load(tmp_path / "floats1/00000.npy")
    assert (values.shape, values.dtype) == ((2, SIDE, SIDE), np.float32)
    assert 250 < values.mean() < 320, "not in physical units"
    assert Image.open(tmp_path / "floats1/grid.png").height > 2 * SIDE + 10, "no legend below"


def test_they_are_judged_by_spectra_and_values(runs: Path, tmp_path: Path) -> None:
    for name in ("one", "floats"):
        flags = f"--checkpoint {runs}/{name} --num_samples 6 --steps 1 2 --output_dir {tmp_path}/{name}"
        [(code, errors)] = run_on_ranks(1, program, "evaluate.py", flags.split())
        assert code == 0, errors
        results = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert [result["steps"] for result in results] == [1, 2]
        assert {"channel_2_wasserstein", "channel_1_spectrum_error_of_real"} <= results[0]["distances"].keys()


def test_the_likelihood_counts_the_scale(runs: Path, tmp_path: Path) -> None:
    flags = f"--checkpoint {runs}/one --metric likelihood --steps 2 --output_dir {tmp_path}"
    [(code, errors)] = run_on_ranks(1, program, "evaluate.py", flags.split())
    assert code == 0, errors
    [result] = json.loads((tmp_path / "evaluation.json").read_text())
    # The values are uniform over 59,000 levels, or 15.85 bits, and the network has learned next to nothing.
    assert 15.5 < result["distances"]["bits_per_dimension"] < 19


def test_the_one_step_model_its_page_and_its_program(runs: Path, tmp_path: Path) -> None:
    flags = f"--teacher {runs}/floats --teacher_samples 16 --teacher_steps 2 --global_batch_size 8 --train_num_steps 3"
    steps = [("train_mean_flow.py", f"{flags} --num_samples 2 --output_dir {tmp_path}/map")]
    steps += [("export.py", f"--checkpoint {tmp_path}/map --format page --output_dir {tmp_path}/page")]
    steps += [("sample.py", f"--checkpoint {tmp_path}/map --num_samples 1 --output_dir {tmp_path}/made")]
    for name, words in steps:
        [(code, errors)] = run_on_ranks(1, quick_program, name, words.split())
        assert code == 0, errors
    described = json.loads((tmp_path / "page/model.json").read_text())["fields"]
    assert (described["shown"], described["transform"]) == ([1], {"kind": "Log"})
    assert len(described["colours"]) == 256
    assert np.load(tmp_path / "made/00000.npy").shape == (2, SIDE, SIDE)


def test_two_folders_and_a_degradation(folder: Path, runs: Path, tmp_path: Path) -> None:
    del runs  # which prepared the stores
    shutil.copytree(folder / "floats", tmp_path / "others")
    for name, more in (("pairs", f"--source_path {folder}/floats --paired"), ("fill", "--degrade mask:box")):
        run_on_ranks(1, train, tmp_path, "others", tmp_path / name, more)
        words = f"--checkpoint {tmp_path}/{name} --from_images {folder}/floats/03.npy --steps 2"
        run_on_ranks(1, sample, f"{words} --output_dir {tmp_path}/{name}s")
        assert np.isfinite(np.load(tmp_path / f"{name}s/03.npy")).all()


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("floats", "--space_options value_range=1", "must be measured, percentile:P with P below 50, MIN,MAX, or"),
        ("floats", "--space_options value_range=5,1", "the range of channel 1 is from 5 to 1"),
        ("floats", "--space_options value_range=percentile:60", "percentile:P with P below 50"),
        ("floats", "--space_options transform=log value_range=0,9", "transform=log is undefined for the value 0"),
        ("floats", "--space_options transform=cube", "transform cube is not registered: choose Asinh or Linear or Log"),
        ("floats", "--space_options show=3", "3 names no channels from 1 to 2"),
        ("floats", "--space_options show=1:rainbows", "no colour map rainbows"),
        ("floats", "--evaluate_every 4", "--evaluate_every compares features of photographs"),
        ("floats", "--alpha", "--alpha is for pictures"),
        ("floats", "--augment 0 --autoencoder haar", "--autoencoder encodes pictures"),
        ("floats", "--space Pixels --space_options transform=log", "Pixels takes KEY=VALUE with the keys"),
    ],
)
def test_a_flag_that_does_not_suit(folder: Path, name: str, flags: str, sentence: str, tmp_path: Path) -> None:
    words = f"--dataset_path {folder}/{name} --cache_dir {folder}/cache --image_size 8 {TINY} --output_dir {tmp_path}/x"
    assert_refused("train_oxford.py", 1, f"{words} {flags}", sentence)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (np.zeros((2, 8, 8), np.float32), "channel 1 of bad has the value 0 everywhere"),
        (np.zeros((3, 8, 8), np.float32), "has 3 channels of float32, and the first file has 2"),
        (np.full((2, 8, 8), None), "Object arrays cannot be loaded"),
    ],
)
def test_a_file_that_does_not_suit(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    for number in range(3):
        np.save(tmp_path / f"bad/{number}.npy", np.zeros((2, 8, 8), np.float32), allow_pickle=False)
    np.save(tmp_path / "bad/3.npy", values, allow_pickle=True)
    words = f"--dataset_path {tmp_path}/bad --cache_dir {tmp_path}/cache --image_size 8 {TINY}"
    assert_refused("train_oxford.py", 1, f"{words} --output_dir {tmp_path}/x", sentence)


def test_unknown_values_of_a_given_field_are_generated(folder: Path, runs: Path, tmp_path: Path) -> None:
    Image.fromarray(np.pad(np.full((4, 4), 255, np.uint8), 2)).save(tmp_path / "mask.png")
    given = np.load(folder / "floats/05.npy")
    assert np.isnan(given).any()
    for more in (f"--mask {tmp_path}/mask.png", "--strength 0.5"):
        words = f"--checkpoint {runs}/floats --from_images {folder}/floats/05.npy --steps 2 {more} --num_samples 1"
        sample(f"{words} --output_dir {tmp_path}/{more[2:6]}")
        name = "05.npy" if "mask" in more else "00000.npy"
        assert np.isfinite(np.load(tmp_path / more[2:6] / name)).all(), more
    filled = np.load(tmp_path / "mask/05.npy")
    kept = ~np.isnan(given)
    kept[:, 2:6, 2:6] = False
    assert np.array_equal(filled[kept], given[kept])


def test_sources_have_a_scale_of_their_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for file in (folder / "floats").iterdir():
        np.save(tmp_path / "small" / file.name, np.load(file) * 1e-6)
    train(folder, "floats", tmp_path / "run", f"--source_path {tmp_path}/small --paired")
    assert max(losses(tmp_path / "run").values()) < 10, "sources of 3e-4 were read as data of 280"
    space = load_flow(tmp_path / "run").space
    assert isinstance(space, Fields)
    assert space.sources is not None
    assert max(space.sources.high) < 1e-3


def test_a_student_has_the_scale_of_its_teacher(folder: Path, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "grown").mkdir()
    for file in (folder / "floats").iterdir():
        np.save(tmp_path / "grown" / file.name, np.load(file))
    np.save(tmp_path / "grown/z.npy", np.full((2, SIDE, SIDE), 1000, np.float32))
    flags = f"--teacher {runs}/floats --dataset_path {tmp_path}/grown --teacher_samples 16 --teacher_steps 2"
    more = f"--global_batch_size 8 --train_num_steps 2 --num_samples 0 --output_dir {tmp_path}/map"
    [(code, errors)] = run_on_ranks(1, program, "train_mean_flow.py", [*flags.split(), *more.split()])
    assert code == 0, errors
    spaces = [load_flow(run).space for run in (runs / "floats", tmp_path / "map")]
    assert spaces[0].high == spaces[1].high  # type: ignore[attr-defined]


def test_other_measurements_are_refused(folder: Path, runs: Path, tmp_path: Path) -> None:
    flags = f"--dataset_path {folder}/floats --num_samples 4 --steps 1"
    sentence = "has 2 channels of float32, and the flow was trained on 5 channels of uint16"
    assert_refused("evaluate.py", 1, f"--checkpoint {runs}/one {flags} --output_dir {tmp_path}", sentence)
    assert_refused(
        "sample.py",
        1,
        f"--checkpoint {runs}/one --from_images {folder}/floats --output_dir {tmp_path}/x",
        "is neither a file nor a folder of files",
    )
