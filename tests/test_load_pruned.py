"""What sample.py and evaluate.py read of a run that trains meanwhile, and prunes what they found."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from accelerate import PartialState

from rectified_flow import load
from rectified_flow.errors import UsageError
from rectified_flow.load import Trained, load_flow, load_trained
from rectified_flow.runs import checkpoint
from tests.ranks import run_on_ranks
from tests.test_load import FLOWS, same, write


def go_on(run: Path) -> None:
    """Write the next checkpoint of a run, and prune the others."""
    newest = checkpoint.resolve(run)
    files = {checkpoint.MODEL_FILE: checkpoint.load_tensors(newest, checkpoint.MODEL_FILE)}
    documents = {checkpoint.FLOW_FILE: checkpoint.load_document(newest, checkpoint.FLOW_FILE)}
    checkpoint.prune(checkpoint.save(newest.parent, checkpoint.step_of(newest) + 1, files, documents), keep=1)


@pytest.mark.parametrize(("module", "part"), [(load, "build_flow"), (load, "network_of"), (checkpoint, "load_weights")])
def test_a_flow_is_read_from_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, part: str
) -> None:
    """The one that was found goes before its description, its weights or its averages are read."""
    flow = FLOWS["rectified"]()
    write(flow, tmp_path)
    original, calls = getattr(module, part), list[int]()

    def prune_first(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            go_on(tmp_path)
        return original(*arguments)

    monkeypatch.setattr(module, part, prune_first)
    same(load_flow(tmp_path), flow)
    assert len(calls) > 1
    calls.clear()
    with pytest.raises(UsageError, match=r"there is no checkpoint at .* its run may have pruned"):
        load_flow(tmp_path / "checkpoints/step_00000002")


def load_while_pruned(run: Path, late_rank: int) -> str:
    """One rank reads before, the other after the checkpoint that both found is gone; returns which they have."""
    state = PartialState()
    read: Callable[[Path], Trained] = load.read_trained
    found: list[Path] = []

    def read_and_prune(source: Path) -> Trained:
        found.append(source)
        if len(found) > 1:
            return read(source)
        early = None if state.process_index == late_rank else read(source)
        state.wait_for_everyone()
        if state.is_main_process:
            go_on(run)
        state.wait_for_everyone()
        return early or read(source)

    load.read_trained = read_and_prune
    source = load_trained(run, state).source
    assert [checkpoint.step_of(each) for each in found] == [1, 2]
    return source.name


@pytest.mark.parametrize("late_rank", [0, 1])
def test_two_processes_read_the_same_checkpoint(tmp_path: Path, late_rank: int) -> None:
    write(FLOWS["rectified"](), tmp_path)
    assert run_on_ranks(2, load_while_pruned, tmp_path, late_rank) == ["step_00000002"] * 2
