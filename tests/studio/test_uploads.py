"""Tests of dropped files."""

import zipfile
from pathlib import Path

import pytest

from rectified_flow.errors import UsageError
from rectified_flow.studio import uploads
from rectified_flow.studio.uploads import receive


def zipped(path: Path, *names: str, content: str = "x") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content)
    return path


def test_files_and_zips_get_a_folder_of_their_own(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text(name)
    archive = zipped(tmp_path / "more.zip", "cat/1.png", "dog/1.png")
    folder = receive(tmp_path / "runs", "pets", [tmp_path / "a.png", tmp_path / "b.png", archive])
    found = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    assert found == ["a.png", "b.png", "cat/1.png", "dog/1.png"]
    assert folder == tmp_path / "runs/pictures/pets"
    again = receive(tmp_path / "runs", "pets", [tmp_path / "a.png", archive])
    assert again == tmp_path / "runs/pictures/pets-2"
    assert len([*again.rglob("*.png")]) == 3, "the page sends the same files again"


@pytest.mark.parametrize("name", ["../out.png", "a/../../out.png", "/out.png", "C:\\out.png", "..\\out.png"])
def test_a_zip_writes_nothing_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    archive = zipped(tmp_path / "evil.zip", name)
    folder = receive(tmp_path / "runs", "pets", [archive])
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == {archive, *folder.rglob("*.png")}
    assert not Path("/out.png").exists()


@pytest.mark.parametrize(
    "damage", [lambda content: b"", lambda content: content[:40], lambda content: b"PK" + content[9:]]
)
def test_a_broken_zip_is_a_sentence(tmp_path: Path, damage: object) -> None:
    archive = zipped(tmp_path / "broken.zip", "a.png")
    archive.write_bytes(damage(archive.read_bytes()))  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"broken.zip cannot be unpacked .*: make the zip again, or make room"):
        receive(tmp_path / "runs", "pets", [archive])
    assert [*(tmp_path / "runs/pictures").iterdir()] == []


def test_damaged_content_is_a_sentence(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "broken.zip", "a.png", content="abc" * 1000)
    content = bytearray(archive.read_bytes())
    content[45] ^= 255
    archive.write_bytes(content)
    with pytest.raises(UsageError, match=r"broken.zip cannot be unpacked"):
        receive(tmp_path / "runs", "pets", [archive])


def test_a_zip_that_does_not_fit_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "ROOM", 2**62)
    with pytest.raises(UsageError, match=r"big.zip cannot be unpacked \(its files need 0.0 GB, more than is free\)"):
        receive(tmp_path / "runs", "pets", [zipped(tmp_path / "big.zip", "a.png")])


def test_two_files_of_one_name_are_both_kept(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_text(name)
    folder = receive(tmp_path / "runs", "pets", [tmp_path / "1/a.png", tmp_path / "2/a.png"])
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"a.png": "1", "a-2.png": "2"}


@pytest.mark.parametrize("name", ["1.png", "cat/1.png", "/1.png", "../1.png"])
def test_files_of_one_name_in_two_zips_are_both_kept(tmp_path: Path, name: str) -> None:
    archives = [zipped(tmp_path / f"{content}.zip", name, content=content) for content in ("cats", "dogs")]
    folder = receive(tmp_path / "runs", "pets", archives)
    found = {file.name: file.read_text() for file in folder.rglob("*.png")}
    assert found == {"1.png": "cats", "1-2.png": "dogs"}
    assert len({file.parent for file in folder.rglob("*.png")}) == 1, "they are of one class"
