"""The example on point clouds: the network's symmetries, the trainer's promises, and what it learns."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import train_point_clouds as example
from cloud_distances import Distances, chamfer_costs
from digits import GEOMETRIES, Digits
from geometry import Euclidean
from point_clouds import PointClouds, Points
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse
from rectified_flow.system.signals import Interrupted, defer_signals, stop_on_signals
from tests.ranks import run_on_ranks
from tests.training.runs import losses

FLAGS = (
    "--points 12 --width 32 --layers 1 --train_num_steps 8 --save_every 4 --log_every 2 --measure_every 4"
    " --measured_clouds 10 --lr_warmup_steps 0 --lr_decay none --learning_rate 3e-3"
)


def train(words: str) -> None:
    example.train(parse(example.CloudFlags, "", words.split()))


def run(output_dir: Path, flags: str = "", world_size: int = 1) -> Path:
    run_on_ranks(world_size, train, f"--output_dir {output_dir} --batch_size {16 // world_size} {FLAGS} {flags}")
    return output_dir


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "distances.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on the sphere without a break, in one process."""
    return run(tmp_path_factory.mktemp("whole"), "--geometry sphere --coupling ot")


@pytest.mark.slow
def test_the_same_run_on_two_processes_with_accumulation(whole: Path, tmp_path: Path) -> None:
    flags = "--geometry sphere --coupling ot --global_batch_size 8 --batch_size 4 --num_workers 1"
    two = run(tmp_path / "two", flags, world_size=2)
    assert losses(two) == pytest.approx(losses(whole), rel=1e-4)
    assert list(losses(two)) == [2, 4, 6, 8]
    for one, other in zip(rows(whole), rows(two), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_a_resumed_run_is_the_same_to_the_byte(whole: Path, tmp_path: Path) -> None:
    flags = "--geometry sphere --coupling ot"
    stopped = run(tmp_path / "stopped", f"{flags} --train_num_steps 4")
    assert [row["step"] for row in rows(stopped)] == [0, 4]
    run(stopped, flags)
    for name in ("model.safetensors", "ema.safetensors"):
        one, two = ((each / "checkpoints/step_00000008" / name).read_bytes() for each in (whole, stopped))
        assert one == two, name
    assert rows(stopped) == rows(whole)
    assert {path.name for path in stopped.glob("*.png")} >= {"clouds.png", "distances.png", "loss.png"}


def train_with_a_far_point(words: str) -> None:
    """Train, with one cloud whose squares no float32 holds."""
    split = Digits.split

    def spoilt(digits: Digits, held_out: int) -> tuple[PointClouds, ...]:
        parts = split(digits, held_out)
        parts[0].entries["clouds"][: len(parts[0]) // 40, 0] = 1e30
        return parts

    Digits.split = spoilt  # type: ignore[assignment, method-assign]
    train(words)


@pytest.mark.slow
def test_a_step_with_bad_numbers_is_skipped(tmp_path: Path) -> None:
    flags = f"--output_dir {tmp_path} --batch_size 8 {FLAGS} --seed 1"
    run_on_ranks(2, train_with_a_far_point, flags)
    bad = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert 0 < len(bad) < 8
    assert (tmp_path / "checkpoints/step_00000008").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--points 2 --width 32 --layers 1 --measured_clouds 10 --condition_dropout 0 --point_coupling barycentric",
        "--points 40 --width 32 --measured_clouds 10 --geometry sphere",  # no held-out cloud is as large as the largest
        "--points 9 --width 64 --layers 4 --measured_clouds 20 --condition_dropout 0.9 --coupling ot",
    ],
)
def test_flags_at_both_ends(flags: str, tmp_path: Path) -> None:
    tiny = "--train_num_steps 1 --batch_size 2 --measure_every 1"
    run_on_ranks(1, train, f"--output_dir {tmp_path} {tiny} {flags}")
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    folder = run(
        tmp_path, "--geometry torus --train_num_steps 60 --measure_every 60 --measured_clouds 20 --ema_decay 0.9"
    )
    before, after = rows(folder)
    assert after["wasserstein"] < 0.9 * before["wasserstein"]
    assert after["chamfer"] < 0.9 * before["chamfer"]


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_digits_are_wrapped_and_come_back(name: str) -> None:
    digits = Digits(name, 12)
    for cloud in digits.clouds[:20]:
        assert Points(digits.geometry).problem_with(cloud) is None
        assert 6 <= len(cloud) <= 12
        assert digits.unwrap(cloud).abs().max() <= 1 + 1e-5
        assert torch.allclose(digits.wrap(digits.unwrap(cloud)), cloud, atol=1e-5)
    training, held_out, others = digits.split(100)
    assert len(training) + len(held_out) + len(others) == len(digits.clouds)
    for part in (held_out, others):
        assert part.entries["labels"].bincount().tolist() == [10] * 10


def test_rasters_are_the_pictures_again() -> None:
    digits = Digits("sphere", 400)
    cloud = digits.clouds[0]
    raster = digits.rasterise(cloud[None], torch.ones(1, len(cloud)))[0]
    assert torch.allclose(raster, (digits.pictures[0] / digits.pictures[0].sum()).float(), atol=0.03)


def test_a_stop_is_heeded_within_a_measurement() -> None:
    """The distances of all pairs of hundreds of clouds take minutes."""
    distances = Distances(Digits("plane", 8), 10, every=1)
    with stop_on_signals(), defer_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            distances.costs(distances.others["clouds"], distances.others["weights"])


def test_chamfer_by_hand() -> None:
    x, y = torch.tensor([[[0.0, 0.0], [3.0, 0.0]]]), torch.tensor([[[0.0, 1.0], [9.0, 9.0]]])
    a, b = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    cost = chamfer_costs(x, a, y, b, Euclidean(2))
    assert cost.tolist() == [[pytest.approx(0.5 * 1 + 0.5 * 10 + 1)]]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--points 1", "--points is 1; it must be at least 2"),
        ("--width 33", "it must be a multiple of 32"),
        ("--measured_clouds 15", "it must be a multiple of 10"),
    ],
)
def test_bad_input_is_a_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse(example.CloudFlags, "", flags.split())
