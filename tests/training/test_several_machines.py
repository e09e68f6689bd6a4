"""Tests of processes that differ, or that do not share a folder: they are refused before they train."""

import os
import platform
from pathlib import Path

import pytest
from accelerate import PartialState

from rectified_flow import distributed
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed import check_shared
from rectified_flow.errors import UsageError
from tests.contract.kinds import random_pixels, write_png
from tests.programs import program
from tests.ranks import run_on_ranks
from tests.training.runs import tiny_config, tiny_dataset, train

TINY = "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 16 --train_num_steps 1"


def own(*of_each_rank: object) -> object:
    """Return the argument of this rank."""
    return of_each_rank[PartialState().process_index]


def train_apart(folders: list[Path], counts: list[int], seeds: list[int], code: str) -> str:
    """The refusal of a program of one's own, with this folder, number of pictures, seed and code on each rank."""
    setattr(distributed, "_versions", lambda: {"the source": own(*code)})  # noqa: B010
    folder, count, seed = (own(*each) for each in (folders, counts, seeds))
    config = tiny_config(Path(str(folder)), seed=seed, train_num_steps=1, num_samples=0)
    try:
        train(config, tiny_dataset(Path(f"{folder}.cache"), int(str(count))))
    except UsageError as error:
        return str(error)
    return ""


def test_only_the_source_of_this_package_is_compared() -> None:
    assert list(distributed._versions()) == ["the version of torch", "the source of rectified_flow"]


@pytest.mark.parametrize(
    ("names", "counts", "seeds", "code", "expected"),
    [
        ("aa", [40, 37], [0, 0], "aa", ["the number of items is 37, not 40", "the fingerprint of the dataset is "]),
        ("aa", [40, 40], [0, 1], "aa", ["`seed` is 1, not 0"]),
        ("aa", [40, 40], [0, 0], "ab", ["the source is b, not a"]),
        ("ab", [40, 40], [0, 0], "aa", ["access to the files of rank 0 in `output_dir` is False, not True"]),
        ("aa", [40, 40], [0, 0], "aa", []),
    ],
)
def test_a_trainer_refuses_ranks_that_differ(
    tmp_path: Path, names: str, counts: list[int], seeds: list[int], code: str, expected: list[str]
) -> None:
    folders = [tmp_path / name for name in names]
    refusals = run_on_ranks(2, train_apart, folders, counts, seeds, code)
    assert refusals[0] == refusals[1]
    assert bool(refusals[0]) == bool(expected)
    for words in expected:
        assert words in refusals[0]
        assert f"rank 1 on {platform.node()} differs from rank 0 on" in refusals[0]
    trained = (tmp_path / "a/checkpoints/step_00000001").exists()
    assert trained == (not expected)


def call_apart(name: str, commands: list[str]) -> tuple[int, str]:
    return program(name, str(own(*commands)).split())


@pytest.mark.parametrize(
    ("name", "commands", "expected"),
    [
        ("train_oxford.py", ["{0} --dim 16 --output_dir {1}/a", "{0} --output_dir {1}/b"], "--dim is 8, not 16"),
        ("train_mean_flow.py", ["{0} --dry_run", "{0} --dry_run --num_samples 3"], "--num_samples is 3, not 64"),
        ("train_oxford.py", ["--dataset_path {1}/0", "--dataset_path {1}/1"], "the number of pictures is 4, not 3"),
        ("sample.py", ["--seed 1", "--seed 2"], "--seed is 2, not 1"),
        ("evaluate.py", ["", "--num_samples 5"], "--num_samples is 5, not 10000"),
    ],
)
def test_programs_refuse_different_flags(tmp_path: Path, name: str, commands: list[str], expected: str) -> None:
    for number in range(4):
        for folder in "01"[number // 3 :]:
            write_png(tmp_path / folder / f"{number}.png", random_pixels(number, 8, 8, 3))
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
        assert "access to the files of rank 0 in `output_dir` is False, not True" in first
    assert not list((tmp_path / "a").iterdir()), "the probe is left"
