"""Tests of stores: pictures are decoded once, and all processes share them."""

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Sequence
from errno import EACCES, EIO, EMFILE, ENODEV, ENOLCK, ESTALE
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from filelock import FileLock
from PIL import Image

from rectified_flow.data import store_writer
from rectified_flow.data.open import Pictures
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.synthetic_flowers import SPECIES, SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.errors import UsageError
from rectified_flow.system import artifact
from rectified_flow.system.signals import Interrupted
from tests.patience import PATIENCE, wait_for


def find_damage(path: Path) -> str | None:
    return artifact.find_damage(path, "image store")


FORK = multiprocessing.get_context("fork")


class Slow(SyntheticFlowers):
    """Counts how many pictures are decoded, and takes its time over each; at one it may hang."""

    def __init__(self, count: int, decoded: Path, hang_at: int | None = None) -> None:
        super().__init__(8, count=count)
        self.decoded, self.hang_at = decoded, hang_at

    def load(self, index: int) -> tuple[Image.Image, int]:
        with self.decoded.open("a") as file:
            file.write(".")
        time.sleep(PATIENCE if index == self.hang_at else 0.005)
        return super().load(index)


def open_slow(cache_dir: Path, decoded: Path, hang_at: int | None = None) -> ImageDataset:
    return ImageDataset(open_store(Slow(100, decoded, hang_at), 4, cache_dir=cache_dir))


def test_items_and_batches(flowers: ImageDataset) -> None:
    batch = flowers.read_batch([5, 0, 5])
    assert batch["images"].shape == (3, 3, 8, 8)
    assert batch["images"].dtype == torch.uint8
    assert batch["labels"].tolist() == [5, 0, 5]
    assert torch.equal(flowers[5]["images"], batch["images"][0])
    items = flowers.__getitems__([5, 0, 5])
    for row, item in enumerate(items):
        assert {name: value.tolist() for name, value in item.items()} == {
            name: values[row].tolist() for name, values in batch.items()
        }
    assert len(items) == 3
    assert isinstance(flowers.entries["images"], np.memmap), "the memory of all processes has the pixels once"
    assert flowers[-1]["labels"] == (len(flowers) - 1) % len(SPECIES)
    assert flowers.class_names[1] == "sunflower"
    for index in (46, -47):
        with pytest.raises(IndexError):
            flowers[index]


def test_writing_into_a_batch_leaves_the_store_alone(flowers: ImageDataset) -> None:
    before = flowers[0]["images"].clone()
    flowers.read_batch([0])["images"].zero_()
    assert torch.equal(flowers[0]["images"], before)


def test_it_pickles_as_a_recipe(flowers: ImageDataset) -> None:
    dataset = ImageDataset(flowers.path, Pictures("synthetic-flowers", image_size=8))
    unused, _, used = pickle.dumps(dataset), dataset[0], pickle.dumps(dataset)
    assert len(used) == len(unused) < 600
    back = pickle.loads(used)
    assert torch.equal(back[3]["images"], flowers[3]["images"])
    assert (len(back), back.described) == (len(dataset), dataset.described)


def test_a_file_system_that_refuses_shared_maps_is_read(flowers: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    create = np.memmap

    def private_alone(*arguments: Any, **options: Any) -> Any:
        if "r" in arguments:
            raise OSError(ENODEV, "No such device")
        return create(*arguments, **options)

    expected = flowers.read_batch([0, 1])
    monkeypatch.setattr(np, "memmap", private_alone)
    for name, values in ImageDataset(flowers.path).read_batch([0, 1]).items():
        assert torch.equal(values, expected[name])


def test_one_process_builds_while_others_wait(tmp_path: Path) -> None:
    decoded = tmp_path / "decoded"
    builders = [FORK.Process(target=open_slow, args=(tmp_path / "cache", decoded)) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(PATIENCE)
        assert builder.exitcode == 0
    assert len(decoded.read_text()) == 100


def test_a_build_that_was_killed_is_done_again(tmp_path: Path) -> None:
    cache, decoded = tmp_path / "cache", tmp_path / "decoded"
    builder = FORK.Process(target=open_slow, args=(cache, decoded, 30))
    builder.start()
    wait_for("20 pictures", lambda: decoded.exists() and len(decoded.read_text()) >= 20)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    assert [path for path in cache.iterdir() if path.suffix == ".building"], "killed too late"
    dataset = open_slow(cache, decoded)
    assert len(dataset) == 100
    assert dataset.entries["images"].min() < dataset.entries["images"].max()
    assert torch.equal(dataset[99]["images"], ImageDataset(open_store(SyntheticFlowers(8, count=100), 4))[99]["images"])
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


def test_what_shapes_a_store_names_it(tmp_path: Path) -> None:
    paths = {
        open_store(SyntheticFlowers(8, count=count, seed=seed), size, cache_dir=tmp_path)
        for count, seed, size in [(4, 0, 4), (5, 0, 4), (4, 1, 4), (4, 0, 8), (4, 0, 4)]
    }
    assert len(paths) == 4


def test_equal_pictures_have_equal_fingerprints(tmp_path: Path) -> None:
    """A run resumes after its pictures were copied to another machine."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8), "red").save(tmp_path / name / "a.png")
    os.utime(tmp_path / "there/a.png", (0, 0))
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    here, there, other = (ImageDataset(open_store(FileFolder(tmp_path / name), 4)) for name in ("here", "there", ""))
    assert here.path != there.path
    assert here.fingerprint == there.fingerprint != other.fingerprint


def test_broken_images_are_named_or_skipped(tmp_path: Path) -> None:
    for index in range(5):
        Image.new("RGB", (8, 8), (50 * index, 0, 0)).save(tmp_path / f"{index}.png")
    whole = (tmp_path / "2.png").read_bytes()
    (tmp_path / "2.png").write_bytes(whole[: len(whole) - 25])
    with pytest.raises(UsageError, match=r"broken image .*/2\.png \(.+\): remove it, or pass `skip_broken_images`"):
        open_store(FileFolder(tmp_path), 4, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/")), "a store was left half-built"
    dataset = ImageDataset(open_store(FileFolder(tmp_path), 4, skip_broken_images=True))
    assert len(dataset) == 4
    assert dataset.entries["images"].shape == (4, 3, 4, 4)
    assert dataset.entries["images"][:, 0, 0, 0].tolist() == [0, 50, 150, 200]
    assert dataset.info.skipped == [str(tmp_path / "2.png")]
    (tmp_path / "more").mkdir()
    (tmp_path / "more/a.png").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="none of the 1 images"):
        open_store(FileFolder(tmp_path / "more"), 4, skip_broken_images=True)


@pytest.mark.parametrize("name", ["images.uint8", "labels.npy", "info.json"])
def test_a_truncated_store_is_built_again(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = open_store(SyntheticFlowers(8, count=20), 4, cache_dir=tmp_path)
    expected = ImageDataset(path)[7]["images"]
    os.truncate(path / name, (path / name).stat().st_size // 2)
    assert find_damage(path) is not None
    assert open_store(SyntheticFlowers(8, count=20), 4, cache_dir=tmp_path) == path
    assert "and is made again" in capsys.readouterr().out
    assert find_damage(path) is None
    assert torch.equal(ImageDataset(path)[7]["images"], expected)


def test_edited_names_of_classes_in_a_store_are_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = open_store(SyntheticFlowers(8, count=20), 4, cache_dir=tmp_path)
    names, text = ImageDataset(path).class_names, (path / "info.json").read_text()
    (path / "info.json").write_text(text.replace(f'"{names[0]}"', f'"{"x" * len(names[0])}"'))
    assert open_store(SyntheticFlowers(8, count=20), 4, cache_dir=tmp_path) == path
    assert "and is made again" in capsys.readouterr().out
    assert ImageDataset(path).class_names == names


@pytest.mark.parametrize(("number", "advice"), [(ESTALE, "or try again"), (EACCES, "change its permissions")])
def test_a_store_that_cannot_be_read_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    """A store on a network disk that does not answer, or without the rights, is not built again."""
    source = SyntheticFlowers(8, count=4)
    path = open_store(source, 4, cache_dir=tmp_path)
    open_file = os.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        if Path(name).name == "info.json":
            raise OSError(number, os.strerror(number), str(name))
        return open_file(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(UsageError, match=f"cannot be read .*{advice}"):
            open_store(source, 4, cache_dir=tmp_path)
    assert find_damage(path) is None


@pytest.mark.parametrize("error", [OSError(EMFILE, "Too many open files"), OSError(EIO, "I/O error"), MemoryError()])
def test_what_may_pass_is_not_skipped_for_good(error: Exception, tmp_path: Path) -> None:
    class Busy(SyntheticFlowers):
        def load(self, index: int) -> tuple[Image.Image, int]:
            if index == 2:
                raise error
            return super().load(index)

    with pytest.raises(UsageError, match=r"^row 2 of .* cannot be read now \(.*\): try again, or leave it out with"):
        open_store(Busy(8, count=4), 4, cache_dir=tmp_path, skip_broken_images=True)
    assert (
        len(ImageDataset(open_store(SyntheticFlowers(8, count=4), 4, cache_dir=tmp_path, skip_broken_images=True))) == 4
    )


def test_what_another_plugin_reads_is_not_skipped_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in (("a.png", "PNG"), ("b.png", "WEBP")):
        Image.new("RGB", (8, 8), "red").save(tmp_path / name, kind)
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "skip_broken_images": True}
    with monkeypatch.context() as patch:
        patch.setattr("rectified_flow.system.pictures.FORMATS", ["PNG"])
        patch.setattr("rectified_flow.data.store_writer.FORMATS", ["PNG"])
        [note, *_] = ImageDataset(open_store(FileFolder(tmp_path), 4, **options)).info.notes
        assert (
            note
            == f"skipped 1 broken image; the first is {tmp_path}/b.png (cannot identify image file '{tmp_path}/b.png')"
        )
    assert len(ImageDataset(open_store(FileFolder(tmp_path), 4, **options))) == 2


def test_several_processes_do_not_build_at_once_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would remove the stage of the other."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", fail)
    source = SyntheticFlowers(8, count=4)
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            UsageError, match=r"cannot be locked \(.*No locks available\), and .*: run with one process"
        ):
            open_store(source, 4, cache_dir=tmp_path)
    assert not list(tmp_path.glob("*/"))
    path = open_store(source, 4, cache_dir=tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert open_store(source, 4, cache_dir=tmp_path) == path


@pytest.mark.parametrize(("limit", "excluded"), [(20, 0), (None, 980)])
def test_pictures_that_are_not_read_need_no_disk(
    limit: int | None, excluded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for 21 of 1,000 pictures."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=21 * 3 * 8 * 8))
    source = SyntheticFlowers(8, count=1000)
    source.exclude([str(number) for number in range(excluded)])
    assert len(ImageDataset(open_store(source, 8, cache_dir=tmp_path, limit=limit))) == 20
    with pytest.raises(UsageError, match="1000 rows of the image store would need at least"):
        open_store(SyntheticFlowers(8, count=1000), 8, cache_dir=tmp_path)


def test_a_store_in_a_read_only_cache_opens(tmp_path: Path) -> None:
    path = open_store(SyntheticFlowers(8, count=4), 4, cache_dir=tmp_path)
    (tmp_path / f".{path.name}.lock").unlink()
    assert open_store(SyntheticFlowers(8, count=4), 4, cache_dir=tmp_path) == path
    assert not (tmp_path / f".{path.name}.lock").exists(), "opening wrote to the cache"


def test_the_end_of_the_launcher_ends_the_writing_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState()
    requests = iter(["launcher exited"])
    monkeypatch.setattr(store_writer, "stop_requested", lambda: next(requests, None))
    made = list[int]()

    def make(numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        made.extend(numbers)
        return {"values": torch.tensor(numbers)}

    def write() -> None:
        store = store_writer.StoreWriter(tmp_path / "rows", 4, "rows", recipe={})
        with store_writer.claimed(store) as is_missing:
            assert is_missing
            store_writer.fill(store, make, dict, batch_size=2)

    with pytest.raises(Interrupted, match="launcher exited"):
        write()
    assert made == [0, 1]
    write()
    assert made == [0, 1, 2, 3], "the rows that were written are kept"
