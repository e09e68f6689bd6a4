"""Tests of processes that differ, or that do not share a folder: they are refused before they train."""

import os
import platform
from pathlib import Path

import pytest
from accelerate import PartialState

from rectified_flow import distributed
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import check_equal, check_shared
from rectified_flow.errors import UsageError
from tests.programs import program
from tests.ranks import run_on_ranks
from tests.training.runs import tiny_config, tiny_dataset, train

TINY = "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 16 --train_num_steps 1"


def own(*of_each_rank: object) -> object:
    """Return the argument of this rank."""
    return of_each_rank[PartialState().process_index]


def train_apart(folders: list[Path], counts: list[int], seeds: list[int]) -> str:
    """The refusal of a program of one's own, with this folder, number of pictures and seed on each rank."""
    folder, count, seed = (own(*each) for each in (folders, counts, seeds))
    config = tiny_config(Path(str(folder)), seed=seed, train_num_steps=1, num_samples=0)
    try:
        train(config, tiny_dataset(Path(f"{folder}.cache"), int(str(count))))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("names", "counts", "seeds", "expected"),
    [
        ("aa", [40, 37], [0, 0], ["the number of items is 37, not 40", "the fingerprint of the dataset is "]),
        ("aa", [40, 40], [0, 1], ["--seed is 1, not 0"]),
        ("ab", [40, 40], [0, 0], ["access to the files of rank 0 in --output_dir is False, not True"]),
        ("aa", [40, 40], [0, 0], []),
    ],
)
def test_a_trainer_refuses_ranks_that_differ(
    tmp_path: Path, names: str, counts: list[int], seeds: list[int], expected: list[str]
) -> None:
    folders = [tmp_path / name for name in names]
    refusals = run_on_ranks(2, train_apart, folders, counts, seeds)
    assert refusals[0] == refusals[1]
    assert bool(refusals[0]) == bool(expected)
    for words in expected:
        assert words in refusals[0]
    trained = (tmp_path / "a/checkpoints/step_00000001").exists()
    assert trained == (not expected)


def call_apart(name: str, commands: list[str]) -> tuple[int, str]:
    return program(name, str(own(*commands)).split())


@pytest.mark.parametrize(
    ("name", "commands", "expected"),
    [
        ("train_oxford.py", ["{} --dim 16 --output_dir {}/a", "{} --output_dir {}/b"], "--dim is 8, not 16"),
        ("train_mean_flow.py", ["{} --dry_run", "{} --dry_run --num_samples 3"], "--num_samples is 3, not 64"),
        ("sample.py", ["--seed 1", "--seed 2"], "--seed is 2, not 1"),
        ("evaluate.py", ["", "--num_samples 5"], "--num_samples is 5, not 10000"),
    ],
)
def test_programs_refuse_different_flags(tmp_path: Path, name: str, commands: list[str], expected: str) -> None:
    given = [words.format(TINY, tmp_path) for words in commands]
    ended = run_on_ranks(2, call_apart, name, given)
    assert [code for code, _ in ended] == [2, 2]
    written = ended[0][1]
    assert written.count(expected) == 1, written
    assert "output_dir" not in written, "paths may differ"


def test_sampling_refuses_different_checkpoints_at_one_place(tmp_path: Path, flowers: ImageDataset) -> None:
    """Each machine has another run under the same name."""
    for name, seed in (("a", 0), ("b", 1)):
        run_on_ranks(1, train, tiny_config(tmp_path / name, seed=seed, train_num_steps=1, num_samples=0), flowers)
    ended = run_on_ranks(2, sample_apart, tmp_path)
    assert [code for code, _ in ended] == [2, 2]
    assert ended[0][1].count("the manifest of") == 1, ended


def sample_apart(folder: Path) -> tuple[int, str]:
    (folder / f"at-{own(0, 1)}").mkdir()
    os.chdir(folder / f"at-{own(0, 1)}")
    Path("run").symlink_to(folder / str(own("a", "b")))
    return program("sample.py", ["--checkpoint", "run", "--num_samples", "2", "--steps", "1"])


def refusal(facts: list[dict[str, object]], code: list[str]) -> str:
    """The refusal of a rank that has these facts and runs this code; empty if there is none."""
    rank = PartialState().process_index
    setattr(distributed, "_versions", lambda: {"the source": code[rank]})  # noqa: B010
    try:
        check_equal(PartialState(), lambda: facts[rank])
        check_equal(PartialState(), lambda: facts[rank])  # as a second training in one program does
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("facts", "code", "expected"),
    [
        ([{"--seed": 1}] * 2, ["a", "a"], []),
        ([{"--seed": 1}, {"--seed": 0}], ["a", "a"], ["--seed is 0, not 1"]),
        ([{"--seed": 1}] * 2, ["a", "b"], ["the source is b, not a"]),
        ([{"--ema": None}, {}], ["a", "a"], []),  # a path that only one was given
        ([dict.fromkeys("abcde", 1), dict.fromkeys("abcde", "x" * 99)], ["a", "a"], ["a is xxx", "c is"]),
    ],
)
def test_ranks_that_differ_are_named(facts: list[dict[str, object]], code: list[str], expected: list[str]) -> None:
    first, second = run_on_ranks(2, refusal, facts, code)
    assert first == second
    assert bool(first) == bool(expected)
    for words in expected:
        assert words in first
        assert f"rank 1 on {platform.node()} differs from rank 0 on" in first
    assert len(first) < 500


def share(folders: list[Path]) -> str:
    """The refusal of a rank to which ``output_dir`` is its own folder."""
    try:
        check_shared(PartialState(), folders[PartialState().process_index])
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "refused"), [("a", False), ("b", True)])
def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, name: str, refused: bool) -> None:
    (tmp_path / "a").mkdir()
    first, second = run_on_ranks(2, share, [tmp_path / "a", tmp_path / name])
    assert bool(first) == bool(second) == refused
    if refused:
        assert "access to the files of rank 0 in --output_dir is False, not True" in first
    assert not list((tmp_path / "a").iterdir()), "the probe is left"
