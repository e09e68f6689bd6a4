"""The example on point clouds as its users start it: processes, resumed runs, samples, and what it learns."""

import json
from pathlib import Path

import pytest
import torch

import train_point_clouds as example
from digits import Digits
from point_clouds import PointClouds
from rectified_flow.errors import UsageError
from rectified_flow.flags import parse
from rectified_flow.flows.solvers import Guidance
from rectified_flow.load import build_flow, load_flow
from rectified_flow.registry import describe
from tests.programs import assert_refused, call
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses

FLAGS = (
    "--points 12 --width 32 --layers 1 --save_every 4 --log_every 2 --measure_every 4 --measured_clouds 10"
    " --num_samples 2 --sample_steps 2 --lr_warmup_steps 0 --lr_decay none --learning_rate 3e-3"
)
SPHERE = "--geometry sphere --point_coupling drawn --coupling ot --condition both --missing_conditions 0.3"


def train(words: str) -> None:
    example.train(parse(example.CloudFlags, "", words.split()))


def run(output_dir: Path, flags: str, world_size: int = 1) -> Path:
    run_on_ranks(world_size, train, f"--output_dir {output_dir} --batch_size {16 // world_size} {FLAGS} {flags}")
    return output_dir


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "distances.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the sphere without a break, in one process: 0.08 epochs of 1,777 clouds in 9 steps of 16."""
    return run(tmp_path_factory.mktemp("whole"), f"{SPHERE} --num_epochs 0.08")


def test_distances_and_recognised_digits_are_measured_during_training(whole: Path) -> None:
    measured = rows(whole)
    assert [row["step"] for row in measured] == [0, 4, 8, 9]
    for row in measured:
        assert row["wasserstein"] > row["wasserstein_of_others"] > 0
        assert row["chamfer"] > row["chamfer_of_others"] > 0
        assert 0 <= row["as_asked"] <= 1
        assert row["moments_error"] > 0
    assert measured[-1]["wasserstein"] < measured[0]["wasserstein"]
    assert {path.name for path in whole.glob("*.png")} >= {"clouds.png", "distances.png", "loss.png"}


def test_two_processes_train_the_run_of_one(whole: Path, tmp_path: Path) -> None:
    """Gradients are averaged, and noise and both couplings are those of the global batch."""
    two = run(tmp_path / "two", f"{SPHERE} --train_num_steps 9 --num_workers 1", world_size=2)
    assert losses(two) == pytest.approx(losses(whole), rel=1e-5)
    assert list(losses(two)) == [2, 4, 6, 8, 9]
    for one, other in zip(rows(whole), rows(two), strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_a_resumed_run_is_the_same_to_the_byte(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, f"{SPHERE} --train_num_steps 4")
    assert [row["step"] for row in rows(tmp_path)] == [0, 4]
    run(tmp_path, f"{SPHERE} --num_epochs 0.08")
    assert_same_bytes(whole, tmp_path, 9)
    assert rows(tmp_path) == rows(whole)


def test_samples_of_a_saved_flow_are_on_the_sphere(whole: Path) -> None:
    flow = load_flow(whole)
    assert describe(build_flow(describe(flow), "a test")) == describe(flow)
    size = Digits("sphere", 12).split(10)[0].entries["clouds"].shape[1]
    samples = flow.sample(4, steps=2, guidance=Guidance(2.0), labels=torch.tensor([0, 1, 2, 10]))
    assert samples.shape == (4, size, 3)
    assert torch.allclose(samples.norm(dim=-1), torch.ones(4, size))
    asked = [flow.sample(4, steps=2, noise=torch.ones(4, size, 3), moments=torch.full((4, 3), m)) for m in (0.1, 0.9)]
    assert not torch.allclose(*asked), "the vector is a condition"


def test_sample_py_loads_a_run_by_its_modules(whole: Path, tmp_path: Path) -> None:
    how = ("--num_samples", 2, "--steps", 2, "--guidance_scale", 2, "--solver", "euler", "--classes", "3,5")
    modules = ("--import", "conditions", "riemannian", "set_transformer")
    vector = ("--set", "moments=0.4 0.5 nan")
    call("sample.py", "--checkpoint", whole, *modules, "--output_dir", tmp_path / "drawn", *how, *vector)
    assert {path.name for path in (tmp_path / "drawn").glob("*.png")} == {"00000.png", "00001.png", "grid.png"}
    with pytest.raises(UsageError, match="--solver ab2 has no form on a geometry: pass euler, midpoint, heun"):
        call("sample.py", "--checkpoint", whole, *modules, "--output_dir", tmp_path / "none", "--solver", "ab2")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--points 1", "--points is 1; it must be"),
        ("--width 33", "--width is 33; it must be a multiple of 32"),
        ("--measured_clouds 15", "--measured_clouds is 15; it must be a multiple of 10"),
        ("--missing_conditions 1", "--missing_conditions is 1"),
        ("--condition none --guidance_scale 2", "--guidance_scale needs conditions: pass --condition label"),
        (
            "--geometry torus --num_epochs 1 --train_num_steps 5",
            "--num_epochs and --train_num_steps exclude each other",
        ),
    ],
)
def test_bad_input_is_a_sentence(flags: str, sentence: str) -> None:
    assert_refused("train_point_clouds.py", 1, flags, sentence)


def train_with_a_far_point(words: str) -> None:
    """Train, with some clouds whose squares no float32 holds."""
    split = Digits.split

    def spoilt(digits: Digits, held_out: int) -> tuple[PointClouds, ...]:
        parts = split(digits, held_out)
        parts[0].entries["clouds"][: len(parts[0]) // 40, 0] = 1e30
        return parts

    Digits.split = spoilt  # type: ignore[assignment, method-assign]
    train(words)


@pytest.mark.slow
def test_a_step_with_bad_numbers_is_skipped(tmp_path: Path) -> None:
    flags = f"--output_dir {tmp_path} --batch_size 8 {FLAGS} --seed 1 --train_num_steps 8"
    run_on_ranks(2, train_with_a_far_point, flags)
    bad = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert 0 < len(bad) < 8
    assert (tmp_path / "checkpoints/step_00000008").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--points 2 --width 32 --layers 1 --condition_dropout 0 --point_coupling barycentric --condition none",
        "--points 40 --width 32 --geometry sphere --condition moments",
        "--points 9 --width 64 --layers 4 --condition_dropout 0.9 --coupling ot --condition none --geometry torus",
        "--points 80 --width 32 --layers 1 --missing_conditions 0.99 --condition both --guidance_scale 3",
    ],
)
def test_flags_at_both_ends(flags: str, tmp_path: Path) -> None:
    tiny = "--train_num_steps 1 --batch_size 2 --measure_every 1 --num_samples 1 --measured_clouds 10"
    run_on_ranks(1, train, f"--output_dir {tmp_path} {tiny} {flags}")
    assert [row["step"] for row in rows(tmp_path)] == [0, 1]


@pytest.mark.slow
def test_it_learns_where_points_are_and_follows_moments(tmp_path: Path) -> None:
    flags = "--train_num_steps 150 --measure_every 150 --measured_clouds 20 --ema_decay 0.9 --condition moments"
    before, after = rows(run(tmp_path, f"--geometry torus {flags}"))
    assert after["wasserstein"] < 0.7 * before["wasserstein"]
    assert after["chamfer"] < 0.7 * before["chamfer"]
    assert after["moments_error"] < 0.7 * before["moments_error"]
