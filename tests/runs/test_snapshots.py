"""Averages of any length, from snapshots of two."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ema_pytorch.post_hoc_ema import KarrasEMA
from torch import Tensor, nn

from rectified_flow.errors import UsageError
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import RunIdentity, TrainerFile
from rectified_flow.runs.snapshots import (
    LENGTHS,
    drop_snapshots,
    file_of,
    intact_snapshots,
    keep_snapshots,
    synthesize,
)
from rectified_flow.training.state import constant_average, power_averages

UPDATES, EVERY = 400, 40


def counters(step: int, updates: int) -> dict[str, Any]:
    """The contents of ``trainer.json``."""
    return asdict(TrainerFile(step, updates=updates, run=RunIdentity("data", 0, 8, "new", "float32")))


class Weights(nn.Module):
    """Weights that go somewhere, as in training, one that does not, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = nn.Parameter(torch.zeros(3))
        self.constant = nn.Parameter(torch.tensor([7.0]))
        self.frozen = nn.Parameter(torch.tensor([5.0]), requires_grad=False)

    def go(self, update: int) -> None:
        time = update / UPDATES
        self.moving.data = torch.tensor([time, time**3, torch.sin(torch.tensor(25 * time)).item()])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[float, Tensor]]:
    """A folder of checkpoints of which only the last is left, and what averages of some lengths really are."""
    folder, weights = tmp_path_factory.mktemp("checkpoints"), Weights()
    kept = power_averages(weights)
    true = {length: KarrasEMA(weights, length, update_every=1) for length in (*LENGTHS, 0.02, 0.07, 0.15, 0.25)}
    for update in range(1, UPDATES + 1):
        weights.go(update)
        for average in (*kept.values(), *true.values()):
            average.update()
        if update % EVERY == 0:
            averages = {file: each.ema_model.state_dict() for file, each in kept.items()}
            files = {file: {name: each[name] for name in ("moving", "constant")} for file, each in averages.items()}
            path = checkpoint.save(folder, update, files, {checkpoint.STATE_FILE: counters(update, update)})
            keep_snapshots(folder)
            checkpoint.prune(path, keep=1)
    return path, {length: average.ema_model.moving.detach() for length, average in true.items()}


def test_the_kept_lengths_come_out_exactly(trained: tuple[Path, dict[float, Tensor]]) -> None:
    path, true = trained
    for length in LENGTHS:
        assert torch.allclose(synthesize(intact_snapshots(path), length)["moving"], true[length], atol=1e-6)


@pytest.mark.parametrize(("length", "tolerance"), [(0.07, 0.005), (0.15, 0.01), (0.25, 0.03), (0.02, 0.05)])
def test_other_lengths_come_out_nearly(
    trained: tuple[Path, dict[float, Tensor]], length: float, tolerance: float
) -> None:
    path, true = trained
    made = synthesize(intact_snapshots(path), length)
    assert torch.allclose(made["moving"], true[length], atol=tolerance)
    assert made["constant"].item() == pytest.approx(7, abs=1e-6), "what never changes must stay"
    nearest_kept = min(LENGTHS, key=lambda kept: (true[kept] - true[length]).norm())
    assert (made["moving"] - true[length]).norm() < 0.5 * (true[nearest_kept] - true[length]).norm()


def test_frozen_weights_are_shared_and_in_no_file(trained: tuple[Path, dict[float, Tensor]]) -> None:
    path, _ = trained
    assert synthesize(intact_snapshots(path), 0.1).keys() == {"moving", "constant"}
    for length in LENGTHS:
        assert "frozen" not in checkpoint.load_tensors(path, file_of(length))
    weights = Weights()
    average = constant_average(weights, decay=0.9)
    weights.go(UPDATES)
    for _ in range(20):
        average.update()
    assert average.ema_model.frozen is weights.frozen
    assert average.ema_model.moving is not weights.moving
    assert 0 < average.ema_model.moving[0] <= 1


def test_snapshots_stay_when_checkpoints_go(trained: tuple[Path, dict[float, Tensor]]) -> None:
    path, _ = trained
    assert checkpoint.list_checkpoints(path.parent) == [path]
    snapshots = sorted((path.parent / "averages").iterdir())
    assert [checkpoint.step_of(each) for each in snapshots] == list(range(EVERY, UPDATES + 1, EVERY))
    assert (snapshots[-1] / file_of(0.05)).stat().st_nlink == 2, "the newest one takes no room of its own"


def snapshot(folder: Path, step: int, updates: int, value: float) -> Path:
    """A checkpoint after so many updates whose averages are all ``value``."""
    tensors = {file_of(length): {"weight": torch.full((2,), value)} for length in LENGTHS}
    path = checkpoint.save(folder, step, tensors, {checkpoint.STATE_FILE: counters(step, updates)})
    keep_snapshots(folder)
    return path


def test_a_run_that_kept_none(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, {}, {})
    with pytest.raises(UsageError, match="train with --power_ema"):
        synthesize(intact_snapshots(path), 0.1)


def test_averages_of_another_step_are_not_taken(tmp_path: Path) -> None:
    """The run went on without --power_ema."""
    snapshot(tmp_path, 10, 10, 1.0)
    with pytest.raises(UsageError, match="no averages of step_00000020"):
        intact_snapshots(checkpoint.save(tmp_path, 20, {}, {}))


def test_steps_that_were_skipped(tmp_path: Path) -> None:
    """Nothing was averaged before the first snapshot, nor between the last two."""
    path = [snapshot(tmp_path, step, updates, 2.0) for step, updates in ((5, 0), (10, 10), (20, 20), (30, 20))][-1]
    assert synthesize(intact_snapshots(path), 0.07)["weight"].tolist() == pytest.approx([2.0, 2.0])
    with pytest.raises(UsageError, match="nothing to average"):
        synthesize(intact_snapshots(tmp_path / "step_00000005"), 0.07)


def test_too_few_snapshots_for_a_length(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"length 0\.25 cannot be made of the 1 snapshots"):
        synthesize(intact_snapshots(snapshot(tmp_path, 10, 10, 1.0)), 0.25)


def test_a_run_that_goes_back_drops_what_came_after(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        snapshot(tmp_path, step, step, float(step))
    drop_snapshots(tmp_path, after=10)
    assert [each.name for each in (tmp_path / "averages").iterdir()] == ["step_00000010"]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # it may be a link to that of the checkpoint
    path.write_bytes(content)


@pytest.mark.parametrize("name", [file_of(LENGTHS[0]), checkpoint.STATE_FILE])
def test_a_damaged_snapshot_is_left_out(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        path = snapshot(tmp_path, step, step, 2.0)
    damaged = tmp_path / "averages/step_00000020"
    flip_bit(damaged / name)
    snapshots = intact_snapshots(path)
    assert [checkpoint.step_of(each) for each in snapshots] == [10, 30]
    warning = f"warning: the averages {damaged} are damaged: {name} was altered; they are left out"
    assert capsys.readouterr().out == f"{warning}\n"
    assert synthesize(snapshots, 0.07)["weight"].tolist() == pytest.approx([2.0, 2.0])
    flip_bit(tmp_path / "averages/step_00000030" / name)
    with pytest.raises(UsageError, match="step_00000030 are damaged"):
        intact_snapshots(path)


def test_other_folders_among_the_snapshots_are_left_alone(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 10, 10, 2.0)
    others = ["step_00000010.building", "step_00000099.bak", "step_best"]
    for name in others:
        (tmp_path / "averages" / name).mkdir()
    link = tmp_path / "averages/step_00000030"
    link.symlink_to(tmp_path)
    assert [each.name for each in intact_snapshots(path)] == [path.name]
    with pytest.raises(UsageError, match=r"step_00000030 is in the way of the checkpoint, and is no folder"):
        drop_snapshots(tmp_path, after=5)
    link.unlink()
    drop_snapshots(tmp_path, after=5)
    assert sorted(each.name for each in (tmp_path / "averages").iterdir()) == others
    assert path.exists()


def test_a_checkpoint_with_a_damaged_manifest_is_no_hindrance(tmp_path: Path) -> None:
    path = snapshot(tmp_path, 10, 10, 2.0)
    shutil.rmtree(tmp_path / "averages")
    (path / "manifest.json").write_text("{")
    newest = snapshot(tmp_path, 20, 20, 2.0)
    assert [each.name for each in (tmp_path / "averages").iterdir()] == [newest.name]
