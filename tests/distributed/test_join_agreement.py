"""Processes that differ, or do not share a folder, are refused before they begin."""

import platform
from pathlib import Path
from threading import Timer

import pytest
from accelerate import PartialState

from rectified_flow.distributed import join
from rectified_flow.distributed.join import check_equal, check_shared
from rectified_flow.errors import UsageError
from tests.ranks import run_on_ranks


def refusal(facts: list[dict[str, object]], code: list[str]) -> str:
    """The refusal of a rank that has these facts and runs this code; empty if there is none."""
    rank = PartialState().process_index
    setattr(join, "_versions", lambda: {"the source": code[rank]})  # noqa: B010
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
        ([dict.fromkeys("abcde", 1), dict.fromkeys("abcde", "x" * 99)], ["a", "a"], ["a is xxx", "c is", "2 more"]),
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


def share(folders: list[Path], appears: float) -> str:
    """The refusal of a rank to which ``output_dir`` is its own folder, in which rank 0's shows after some seconds."""
    join.SHARED_TIMEOUT = 1.0
    rank = PartialState().process_index
    mine = folders[rank]
    if rank == 1 and appears:
        Timer(appears, mine.symlink_to, [folders[0]]).start()
    try:
        check_shared(PartialState(), {"output_dir": mine})
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "appears", "refused"), [("a", 0, False), ("b", 0, True), ("b", 0.5, False)])
def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, name: str, appears: float, refused: bool) -> None:
    (tmp_path / "a").mkdir()
    first, second = run_on_ranks(2, share, [tmp_path / "a", tmp_path / name], appears)
    assert bool(first) == bool(second) == refused
    if refused:
        assert "access to the files of rank 0 in --output_dir is False, not True" in first
    assert not list((tmp_path / "a").iterdir()), "the probe is left"
