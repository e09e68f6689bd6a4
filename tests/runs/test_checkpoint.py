"""Tests of checkpoints, which are whole or absent, found in order, and refused when damaged."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import nn

from rectified_flow.errors import DamageError, UsageError
from rectified_flow.runs import checkpoint
from rectified_flow.system.artifact import CHECKPOINT, find_damage, write_manifest
from tests.patience import wait_for
from tests.system.refusing import refusing

FORK = multiprocessing.get_context("fork")


def write(folder: Path, step: int, keep: int = 0, best: bool = False) -> Path:
    tensors = {"model.safetensors": {"weight": torch.full((64, 64), float(step))}}
    path = checkpoint.save(folder, step, tensors, {"trainer.json": {"step": step}}, best=best)
    checkpoint.prune(path, keep)
    return path


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 20, 100):
        write(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_00000020", "step_00000100"]
    assert checkpoint.newest_checkpoint(tmp_path) == tmp_path / "step_00000100"


def test_an_early_checkpoint_is_kept(tmp_path: Path) -> None:
    """The checkpoint nearest to an eighth of the steps is kept once it is written, also after the run is extended."""
    for total, steps in ((240, range(10, 130, 10)), (480, range(130, 250, 10))):
        for step in steps:
            checkpoint.prune(checkpoint.save(tmp_path, step, {}, {}), keep=2, total_steps=total)
        assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [30, step - 10, step]
    assert checkpoint.early_of(tmp_path / "step_00000240") == tmp_path / "step_00000030"
    assert checkpoint.early_of(tmp_path / "step_00000030") is None
    assert checkpoint.early_of(tmp_path / "step_00000100") is None, "30 is later than a quarter of it"
    assert checkpoint.early_of(tmp_path / "a copy") is None


def test_the_best_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    for step, best in ((1, True), (2, False), (3, False), (4, True), (5, False)):
        write(tmp_path, step, keep=1, best=best)
        expected = tmp_path / f"step_{1 if step < 4 else 4:08d}"
        assert checkpoint.best_of(tmp_path) == checkpoint.resolve(tmp_path / "best") == expected
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [4, 5]
    assert checkpoint.resolve(tmp_path) == tmp_path / "step_00000005", "a run goes on from its newest"
    shutil.rmtree(tmp_path / "step_00000004")
    assert checkpoint.best_of(tmp_path) is None


def test_files_and_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path, 5), tmp_path / "step_best")
    (tmp_path / "step_00000009").touch()
    for step in (6, 7):
        write(tmp_path, step, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000007", "step_00000009", "step_best"]


def test_damaged_checkpoints_ahead_do_not_push_out_a_good_one(tmp_path: Path) -> None:
    """A run went back to step 10 because 20 and 30 are damaged; what it saves next must stay."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    for step in (20, 30):
        cut(tmp_path / f"step_{step:08d}/model.safetensors")
    written = write(tmp_path, 15, keep=2)
    assert checkpoint.newest_checkpoint(tmp_path) == written
    assert (tmp_path / "step_00000010").exists()


def test_tied_weights(tmp_path: Path) -> None:
    weight = torch.rand(3, 3)
    content = checkpoint.to_bytes({"a": weight, "b": weight, "c": weight.T})
    (tmp_path / "model.safetensors").write_bytes(content)
    loaded = checkpoint.load_tensors(tmp_path, "model.safetensors")
    assert torch.equal(loaded["a"], loaded["b"])
    assert torch.equal(loaded["c"], weight.T)


class Halves(nn.Module):
    """A frozen half and a trained one."""

    def __init__(self, value: float, frozen_source: str | None = None) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.trained = nn.Parameter(torch.full((3,), value))
        self.register_buffer("count", torch.tensor(value))
        self.frozen_source = frozen_source

    @property
    def values(self) -> list[float]:
        return [value.mean().item() for value in self.state_dict().values()]


def test_averages_are_loaded_over_the_model(tmp_path: Path) -> None:
    """The file of averages has no frozen weights."""
    averages = {"trained": torch.full((3,), 5.0), "count": torch.tensor(5.0)}
    model = {checkpoint.MODEL_FILE: checkpoint.own_weights(Halves(1.0))}
    bare = checkpoint.save(tmp_path, 1, model, {})
    path = checkpoint.save(tmp_path, 2, {**model, checkpoint.EMA_FILE: averages}, {})
    files = [[checkpoint.MODEL_FILE], [checkpoint.MODEL_FILE, checkpoint.EMA_FILE]]
    assert [checkpoint.averaged_files(each) for each in (bare, path)] == files
    network = Halves(0.0)
    for source, expected in ((path, [1.0, 5.0, 5.0]), (bare, [1.0, 1.0, 1.0])):
        checkpoint.load_averaged(network, source)
        assert network.values == expected


def test_frozen_weights_that_come_from_elsewhere_are_not_saved(tmp_path: Path) -> None:
    network = Halves(1.0, frozen_source="hub/backbone")
    assert checkpoint.own_weights(network).keys() == {"trained", "count"}
    path = checkpoint.save(tmp_path, 1, {checkpoint.MODEL_FILE: checkpoint.own_weights(network)}, {})
    other = Halves(7.0, frozen_source="hub/backbone")
    checkpoint.load_averaged(other, path)
    assert other.values == [7.0, 1.0, 1.0]
    with pytest.raises(UsageError, match=r"of another architecture \(frozen: missing saved, \(2,\) expected\)"):
        checkpoint.load_averaged(Halves(7.0), path)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"trained": torch.zeros(4)}, r"trained: \(4,\) saved, \(3,\) expected"),
        ({"more": torch.zeros(1)}, r"more: \(1,\) saved, missing expected"),
    ],
)
def test_weights_of_another_architecture_are_refused_and_change_nothing(
    tmp_path: Path, weights: dict[str, torch.Tensor], sentence: str
) -> None:
    saved = {**checkpoint.own_weights(Halves(1.0)), **weights}
    path = checkpoint.save(tmp_path, 1, {checkpoint.MODEL_FILE: saved}, {})
    network = Halves(3.0)
    with pytest.raises(UsageError, match=sentence):
        checkpoint.load_averaged(network, path)
    assert network.values == [3.0, 3.0, 3.0]


def test_a_flipped_bit_a_cut_and_a_missing_file_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, damage in ((1, flip_bit), (2, cut), (3, Path.unlink)):
        weights = write(tmp_path, step) / "model.safetensors"
        damage(weights)
        assert find_damage(weights.parent) is not None
    with pytest.raises(UsageError, match=r"every checkpoint in .* is damaged"):
        checkpoint.newest_checkpoint(tmp_path)
    whole = write(tmp_path, 0)
    assert checkpoint.newest_checkpoint(tmp_path) == whole
    assert capsys.readouterr().out.count("ignoring checkpoint") == 3, "each is reported once"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, r"manifest\.json is missing"),
        (lambda path: path.write_bytes(bytes(200)), r"manifest\.json is damaged"),
    ],
)
def test_a_checkpoint_without_its_manifest_is_damaged_and_makes_room_for_a_new_one(
    damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    previous, newest = write(tmp_path, 1), write(tmp_path, 2)
    damage(newest / "manifest.json")
    with pytest.raises(UsageError, match=f"step_00000002 is damaged: .*{words}"):
        checkpoint.resolve(newest)
    assert checkpoint.newest_checkpoint(tmp_path) == previous
    checkpoint.set_aside(tmp_path)
    assert write(tmp_path, 2) == checkpoint.newest_checkpoint(tmp_path)
    [aside] = tmp_path.glob("step_00000002.damaged-*")
    assert {file.name for file in aside.iterdir()} >= {"model.safetensors", "trainer.json"}


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_checkpoint_or_a_run_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", 3)
    assert (
        checkpoint.resolve(path) == checkpoint.resolve(tmp_path) == checkpoint.resolve(tmp_path / "checkpoints") == path
    )
    flip_bit(path / "model.safetensors")
    with pytest.raises(UsageError, match=r"is damaged: model\.safetensors was altered"):
        checkpoint.resolve(path)


def test_no_python_object_is_ever_loaded(tmp_path: Path) -> None:
    """A pickle where weights are expected does nothing but fail, even with a manifest that vouches for it."""
    path = write(tmp_path, 1)
    victim = tmp_path / "executed"
    weights = path / "model.safetensors"
    weights.write_bytes(b"cos\nsystem\n(S'touch " + str(victim).encode() + b"'\ntR.")
    write_manifest(path, CHECKPOINT, ("model.safetensors", "trainer.json"))
    assert find_damage(path) is None
    with pytest.raises(UsageError, match=r"(?i)model.safetensors cannot be read .*header"):
        checkpoint.load_tensors(path, "model.safetensors")
    assert not victim.exists()


def test_a_pipe_in_place_of_weights_is_a_sentence(tmp_path: Path) -> None:
    """Opening it would wait for a writer forever."""
    os.mkfifo(tmp_path / checkpoint.MODEL_FILE)
    with pytest.raises(DamageError, match=r"model\.safetensors cannot be read .* is not a regular file"):
        checkpoint.load_tensors(tmp_path, checkpoint.MODEL_FILE)


def test_killed_at_any_moment_what_is_there_is_whole(tmp_path: Path) -> None:
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        writer = FORK.Process(target=write_forever, args=(folder,))
        writer.start()
        wait_for("a checkpoint", partial(checkpoint.list_checkpoints, folder), every=0.001)
        time.sleep(0.0171 * attempt)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        found = checkpoint.list_checkpoints(folder)
        assert found
        assert [find_damage(path) for path in found] == [None] * len(found)
        write(folder, 10**7)
        assert not list(folder.glob("step_*.*")), "what the killed one left was not removed"


def write_forever(folder: Path) -> None:
    for step in range(10**6):
        write(folder, step, keep=3)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_every_file_has_the_rights_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = checkpoint.save(tmp_path, 1, {checkpoint.MODEL_FILE: {"w": torch.zeros(2)}}, {"trainer.json": {}})
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == dict.fromkeys(
        ("model.safetensors", "trainer.json", "manifest.json"), oct(0o666 & ~umask)
    )


@pytest.mark.parametrize("name", [checkpoint.MODEL_FILE, "manifest.json"])
def test_a_file_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = checkpoint.save(tmp_path, 1, {checkpoint.MODEL_FILE: {"w": torch.zeros(2)}}, {})
    words = f"{name} cannot be read .Permission denied.: change its permissions"
    with refusing(monkeypatch, name), pytest.raises(UsageError, match=words):
        checkpoint.newest_checkpoint(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("name", ["/dev/zero", "../other.json", "folder/model.safetensors", ".", "..", "", "a\0b"])
def test_a_manifest_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, 1)
    (tmp_path / "other.json").write_text("{}")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size": 2, "sha256": sha256(b"{}").hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json is damaged: files." in (find_damage(path) or "")


def test_a_checkpoint_of_a_newer_version_is_no_damaged_one(tmp_path: Path) -> None:
    """A run does not resume from an older checkpoint instead, and so does not remove a newer one."""
    write(tmp_path, 1)
    manifest = write(tmp_path, 2) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"hashes": "blake3"}))
    with pytest.raises(UsageError, match=r"was written by a newer version of this project .*: upgrade"):
        checkpoint.newest_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"../step_00000001\n", b"\xff\xfe", b"", b"step_00000009"])
def test_what_best_may_say(tmp_path: Path, content: bytes) -> None:
    folder, best = tmp_path / "checkpoints", tmp_path / "checkpoints/best"
    write(tmp_path, 1)
    newest = write(folder, 2)
    best.write_bytes(content)
    assert checkpoint.best_of(folder) is None
    checkpoint.prune(newest, keep=1)
    with pytest.raises(UsageError, match="there is no checkpoint at"):
        checkpoint.resolve(best)


def test_a_checkpoint_with_a_users_file_is_kept_and_the_others_are_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_00000001/notes.txt").write_text("mine")
    checkpoint.prune(tmp_path / "step_00000003", keep=1)
    assert "step_00000001 is in the way of the checkpoint, and holds notes.txt" in capsys.readouterr().out
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(tmp_path)] == [1, 3]
