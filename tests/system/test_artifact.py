"""Tests of artifacts, which are whole or absent, resume, and never replace files of a user."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rectified_flow.errors import UsageError
from rectified_flow.system import files
from rectified_flow.system.artifact import Artifact, find_damage, owned_files, remove

KIND = "image store"


def artifact_in(folder: Path, kind: str = KIND) -> Artifact:
    return Artifact(folder / "store", kind, ("rows.uint8", "info.json"))


def write_stage(artifact: Artifact, size: int = 5) -> None:
    (artifact.stage / "rows.uint8").write_bytes(b"r" * size)
    (artifact.stage / "info.json").write_text("{}")


def build(folder: Path, kind: str = KIND, size: int = 5) -> Artifact:
    artifact = artifact_in(folder, kind)
    artifact.begin()
    write_stage(artifact, size)
    artifact.finish()
    return artifact


def test_it_is_built_and_whole(tmp_path: Path) -> None:
    artifact = build(tmp_path)
    assert artifact.is_whole
    assert sorted(path.name for path in artifact.path.iterdir()) == ["info.json", "manifest.json", "rows.uint8"]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    assert manifest["kind"] == KIND
    assert manifest["files"]["rows.uint8"].keys() == {"size", "sha256", "time"}


def test_a_build_resumes_where_it_was(tmp_path: Path) -> None:
    artifact = artifact_in(tmp_path)
    assert artifact.begin() == {}
    write_stage(artifact)
    artifact.reached({"done": 3, "hashes": ["a"]})
    assert artifact_in(tmp_path).begin() == {"done": 3, "hashes": ["a"]}
    assert not artifact.is_whole


def test_a_build_that_was_killed_before_its_rename_goes_on(tmp_path: Path) -> None:
    artifact = artifact_in(tmp_path)
    artifact.begin()
    write_stage(artifact)
    artifact.reached({"done": 5})
    artifact.seal()
    assert artifact_in(tmp_path).begin() == {"done": 5}
    artifact_in(tmp_path).finish()
    assert artifact.is_whole


def test_a_build_that_does_not_resume_starts_from_an_empty_stage(tmp_path: Path) -> None:
    artifact = artifact_in(tmp_path)
    artifact.begin()
    write_stage(artifact)
    artifact.reached({"done": 3})  # and the process is killed
    with artifact.building():
        assert artifact_in(tmp_path).begin() == {}
        assert not (artifact.stage / "rows.uint8").exists()


@pytest.mark.parametrize("change", [b"rrrrR", b"rrrr", None])
def test_damage_is_found_and_made_again(
    tmp_path: Path, change: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = build(tmp_path).path / "rows.uint8"
    rows.unlink() if change is None else rows.write_bytes(change)
    assert "rows.uint8" in (find_damage(rows.parent, KIND) or "")
    assert build(tmp_path).is_whole
    assert "and is made again" in capsys.readouterr().out


def test_a_large_file_is_hashed_again_only_if_its_time_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path, size=2**20 + 1).path
    assert find_damage(path, KIND) is None
    os.utime(path / "rows.uint8", (1, 1))
    hashed = list[str]()

    def hash_file(file: Path) -> str:
        hashed.append(file.name)
        return files.hash_file(file)

    monkeypatch.setattr("rectified_flow.system.artifact.hash_file", hash_file)
    assert find_damage(path, KIND) is None
    assert find_damage(path, KIND) is None
    assert hashed.count("rows.uint8") == 1, "after copying it is trusted once it was read"


def test_another_kind_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path).path
    other = artifact_in(tmp_path, "paths")
    assert not other.is_whole
    with pytest.raises(UsageError, match=r"is in the way of the paths, and holds info\.json"):
        other.begin()
    with pytest.raises(UsageError, match="is in the way of the paths"):
        remove(path, "paths")
    assert find_damage(path, KIND) is None


def a_folder(path: Path) -> None:
    (path / "more").mkdir(parents=True)
    (path / "more/thesis.tex").write_text("the only copy")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "notes.txt": lambda path: path.write_text("mine"),
    ".hidden": lambda path: path.write_text("mine"),
    ".git": a_folder,
    "features-of-my-thesis": a_folder,
    "rows.uint8.bak": lambda path: path.write_text("mine"),
    "labels.npy": lambda path: path.write_text("mine"),
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "broken link": lambda path: path.symlink_to("nowhere"),
    "link to a folder": lambda path: path.symlink_to("/etc"),
    "pipe": os.mkfifo,
    "progress.json": lambda path: path.write_text("{}"),
    "step_00000001": a_folder,
    ".tmpabcdef": lambda path: path.write_text("mine"),
}


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(folder)), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def refuses(folder: Path, name: str, action: Callable[[], object]) -> None:
    before = listing(folder)
    with pytest.raises(UsageError, match=r"is in the way of the image store, and holds ") as refused:
        action()
    assert name in str(refused.value)
    assert listing(folder) == before


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("damaged", [False, True])
def test_an_artifact_with_something_foreign_is_not_removed(tmp_path: Path, name: str, damaged: bool) -> None:
    artifact = build(tmp_path)
    FOREIGN[name](artifact.path / name)
    if damaged:
        (artifact.path / "rows.uint8").write_bytes(b"")
    refuses(tmp_path, name, artifact_in(tmp_path).begin)
    refuses(tmp_path, name, lambda: remove(artifact.path, KIND))


@pytest.mark.parametrize("name", [name for name in FOREIGN if name != ".tmpabcdef"])
def test_a_stage_with_something_foreign_is_not_removed(tmp_path: Path, name: str) -> None:
    artifact = artifact_in(tmp_path)
    artifact.begin()
    write_stage(artifact)
    FOREIGN[name](artifact.stage / name)
    for action in (artifact.begin, artifact.finish, lambda: remove(artifact.stage, KIND)):
        refuses(tmp_path, name, action)
    assert not artifact.path.exists()


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_folder_of_the_users_is_not_removed(tmp_path: Path, foreign: str) -> None:
    """A folder of a user is kept even if its files have the names of an artifact."""
    for name in ("store", "store.building", "store.removing"):
        folder = tmp_path / name
        folder.mkdir()
        for ours in ("rows.uint8", "info.json", "manifest.json"):
            (folder / ours).write_text("{}")
        FOREIGN[foreign](folder / foreign)
        refuses(folder, "", lambda: build(tmp_path))
        folder.rename(tmp_path / f"moved away, {name}")


@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_something_else_than_a_folder_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    for place in (artifact_in(tmp_path).path, artifact_in(tmp_path).stage):
        place.write_text("mine") if kind == "file" else place.symlink_to(target if kind == "link" else "nowhere")
        with pytest.raises(UsageError, match=r"is no folder: move it away"):
            artifact_in(tmp_path).begin()
        assert place.is_symlink() or place.read_text() == "mine"
        place.unlink()


def test_an_empty_folder_is_no_hindrance(tmp_path: Path) -> None:
    for place in (artifact_in(tmp_path).path, artifact_in(tmp_path).stage):
        place.mkdir()
    assert build(tmp_path).is_whole


@pytest.mark.parametrize("name", [".tmpabcdef", ".manifest.json.0123abcd.tmp"])
def test_hidden_files_without_a_manifest_beside_them_stay(tmp_path: Path, name: str) -> None:
    artifact = artifact_in(tmp_path)
    artifact.stage.mkdir()
    (artifact.stage / name).write_text("mine")
    refuses(tmp_path, name, artifact.begin)


def test_what_killed_builds_leave_goes(tmp_path: Path) -> None:
    """A temporary file of safetensors, and an artifact that was half removed."""
    path = build(tmp_path).path
    path.rename(tmp_path / "store.removing")
    (tmp_path / "store.removing/info.json").unlink()
    artifact = artifact_in(tmp_path)
    artifact.begin()
    (artifact.stage / ".tmpaB3dE9").write_text("half")
    assert artifact.begin() == {}
    assert build(tmp_path).is_whole
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    remove(artifact.path, KIND)
    remove(artifact.path, KIND)
    assert not list(tmp_path.iterdir())
    assert owned_files(artifact.path, KIND) == []
