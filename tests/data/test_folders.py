"""Tests of folders of users: splits, labels beside pictures, by-products of systems, formats and odd files."""

import io
import os
import struct
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import tifffile
from PIL import Image

from rectified_flow.cli.data import flags_of_files
from rectified_flow.cli.training_flags import DataConfig
from rectified_flow.data.description import PictureData, Sources
from rectified_flow.data.open import Pictures, open_dataset, space_of_folder
from rectified_flow.data.sources import listing
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.listing import find_files
from rectified_flow.data.store import pair_by_name
from rectified_flow.errors import UsageError
from rectified_flow.measurements.files import read_field
from rectified_flow.measurements.folder import FieldFolder
from rectified_flow.registry import build, describe
from rectified_flow.system.artifact import CHECKPOINT, write_manifest, write_output
from rectified_flow.system.pictures import fit, open_picture

SRGB = ((0.4360747, 0.2225045, 0.0139322), (0.3850649, 0.7168786, 0.0971045), (0.1430804, 0.0606169, 0.7141733))
ADOBE = ((0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457))
P3 = ((0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407))


def picture(path: Path, size: tuple[int, int] = (10, 8), colour: tuple[int, ...] = (40, 180, 60), **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".jpg": "JPEG", ".jpeg": "JPEG", ".jfif": "JPEG", ".tif": "TIFF"}.get(path.suffix.lower())
    Image.new("RGB", size, colour).save(path, kind, **how)
    return path


def profile(primaries: Sequence[Sequence[float]], gamma: float = 2.19921875) -> bytes:
    """An ICC profile, version 2, of RGB with these primaries (XYZ, D50) and a gamma."""
    xyz = [b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(65536 * each) for each in row)) for row in primaries]
    white = b"XYZ \0\0\0\0" + struct.pack(">3i", 63190, 65536, 54061)
    curve = b"curv\0\0\0\0" + struct.pack(">IHxx", 1, round(256 * gamma))
    text = b"desc\0\0\0\0" + struct.pack(">I", 6) + b"other\0" + bytes(78) + b"\0\0"
    content = {b"desc": text, b"wtpt": white, b"rXYZ": xyz[0], b"gXYZ": xyz[1], b"bXYZ": xyz[2]}
    content |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    table, body, start = b"", b"", 128 + 4 + 12 * len(content)
    for tag, value in content.items():
        table += tag + struct.pack(">II", start + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    size = struct.pack(">I", start + len(body))
    head = size + bytes(4) + b"\2\x40\0\0mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(28)
    return head + struct.pack(">3i", 63190, 65536, 54061) + bytes(48) + struct.pack(">I", len(content)) + table + body


LAYOUTS = {
    "train/cat test/cat train/dog test/dog": (["cat", "dog"], "train/cat train/dog"),
    "Training/cat Training/dog Validation/cat": (["cat", "dog"], "Training/cat Training/dog"),
    "train val": ([], "train"),
    "train2017 val2017": ([], "train2017"),
    "seg_train/seg_train/sea seg_test/seg_test/sea seg_train/seg_train/ice seg_pred": (
        ["ice", "sea"],
        "seg_train/seg_train/ice seg_train/seg_train/sea",
    ),
    "images labels": ([], "images"),
    "images/cat images/dog masks/cat": (["cat", "dog"], "images/cat images/dog"),
    "train/images train/labels valid/images": ([], "train/images"),
    "images/train images/val labels/train": ([], "images/train"),
    "JPEGImages SegmentationClass SegmentationObject": ([], "JPEGImages"),
    "cat/train cat/test dog/train dog/test": (["cat", "dog"], "cat/train dog/train"),
    "pets/pets/cat pets/pets/dog": (["cat", "dog"], "pets/pets/cat pets/pets/dog"),
    "train": ([], "train"),
    "train test .": ([], "train"),
    # Names of splits and of labels that are classes.
    "train bus": (["bus", "train"], "bus train"),
    "train bus/red": (["bus", "train"], "bus/red train"),
    "mask no_mask": (["mask", "no_mask"], "mask no_mask"),
    "steam_train freight_train": (["freight_train", "steam_train"], "freight_train steam_train"),
    "train_station crash_test park": (["crash_test", "park", "train_station"], "crash_test park train_station"),
    "trash glass": (["glass", "trash"], "glass trash"),
    "#cat #dog": (["#cat", "#dog"], "#cat #dog"),
    "cat": (["cat"], "cat"),
    "cat dog .": ([], "1.png cat dog"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_subfolders_are_read_and_which_are_classes(tmp_path: Path, layout: str) -> None:
    for name in layout.split():
        picture(tmp_path / name / "1.png")
    classes, read = LAYOUTS[layout]
    folder = FileFolder(tmp_path)
    assert folder.class_names == classes
    names = [name if name.endswith(".png") else f"{name}/1.png" for name in read.split()]
    assert [folder.name_of(index) for index in range(len(folder))] == names
    left = len(layout.split()) - len(read.split())
    assert (left > 0) == any(f"left out {left} pictures of other splits or of labels" in note for note in folder.notes)


@pytest.mark.parametrize(
    "layout",
    [
        *("test val", "trainA trainB testA testB", "train test cat", "cat/test cat/val dog"),
        *("train/cat train/dog other", "other test/cat/a", "train/cat train/dog other .", "train/cat training/cat"),
    ],
)
def test_subfolders_that_may_be_splits_or_classes_are_refused(tmp_path: Path, layout: str) -> None:
    for name in layout.split():
        picture(tmp_path / name / "1.png")
    with pytest.raises(UsageError, match=r"may be splits or classes: pass one of them, such as "):
        FileFolder(tmp_path)


def test_the_split_of_a_folder_can_be_chosen(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png", "val/dog/4.png", "val/dog/5.png"):
        picture(tmp_path / name)
    assert len(open_dataset(str(tmp_path), image_size=4, split="validation")) == 3
    assert open_dataset(str(tmp_path), image_size=4).labels.tolist() == [0, 1]


BYPRODUCTS = [
    "@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg",
    "cat/@eaDir/1.jpg/SYNOFILE_THUMB_XL.jpg",
    "#recycle/1.jpg",
    "@Recycle/1.jpg",
    "$RECYCLE.BIN/S-1-5/$R1.jpg",
    "System Volume Information/1.jpg",
    "__MACOSX/cat/1.jpg",
    "cat/._1.jpg",
    ".thumbnails/1.jpg",
    ".Trash-1000/files/1.jpg",
    "cat/.ipynb_checkpoints/1-checkpoint.jpg",
    ".@__thumb/default1.jpg",
    "lost+found/1.jpg",
    "Previews.lrdata/1.jpg",
]


def test_by_products_of_systems_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "dog/1.jpg", *BYPRODUCTS):
        picture(tmp_path / name)
    folder = FileFolder(tmp_path)
    assert [folder.name_of(index) for index in range(len(folder))] == ["cat/1.jpg", "dog/1.jpg"]
    assert folder.class_names == ["cat", "dog"]
    [note] = folder.notes
    assert note.startswith(
        f"left out {len(BYPRODUCTS)} hidden files, by-products of systems, or unreadable folders, such as "
    )


def test_files_that_programs_wrote_are_left_out_and_counted(tmp_path: Path) -> None:
    """Manifests count in the folder of pictures and in that of a run within it; other files are the user's."""
    for name in ("cat/1.jpg", "dog/1.jpg", "dog/samples/mine.jpg"):
        picture(tmp_path / name)
    for name in ("cat/data.png", "cat/config.json", "dog/samples/step_00000002.png", "runs/a/generated/00000.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_output(tmp_path / name, (tmp_path / "cat/1.jpg").read_bytes())
    (tmp_path / "runs/a/checkpoints/step_00000002").mkdir(parents=True)
    (tmp_path / "runs/a/checkpoints/step_00000002/model.safetensors").touch()
    write_manifest(tmp_path / "runs/a/checkpoints/step_00000002", CHECKPOINT, ["model.safetensors"])
    (tmp_path / "dog/manifest.json").write_text('{"files": {"1.jpg": null}}')  # of another program
    folder = FileFolder(tmp_path)
    assert [folder.name_of(index) for index in range(len(folder))] == ["cat/1.jpg", "dog/1.jpg", "dog/samples/mine.jpg"]
    assert folder.class_names == ["cat", "dog"]
    told = "pictures that runs or samples wrote (copies without .manifest.json are read), such as cat/data.png"
    assert folder.notes[0] == f"left out 3 {told}"
    with pytest.raises(UsageError, match=r"generated holds no pictures .*; left out 1 pictures that runs or samples"):
        FileFolder(tmp_path / "runs/a/generated")


STORED = {"adobe": (ADOBE, (106, 179, 72)), "p3": (P3, (89, 176, 78)), "srgb": (SRGB, (44, 179, 62))}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif"])
def test_an_embedded_colour_profile_is_converted_to_srgb(tmp_path: Path, name: str, suffix: str) -> None:
    primaries, stored = STORED[name]
    file = picture(tmp_path / f"1.{suffix}", colour=stored, icc_profile=profile(primaries))
    pixels = np.asarray(fit(open_picture(file), (4, 4))).astype(int)
    assert abs(pixels - (40, 180, 60)).max() <= (12 if suffix in ("jpg", "webp") else 3)


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "CMYK"])
@pytest.mark.parametrize("content", [b"", b"damaged", profile(ADOBE)[:200], profile(ADOBE)])
def test_pictures_of_other_modes_keep_their_transparency_with_any_profile(
    tmp_path: Path, mode: str, content: bytes
) -> None:
    image = Image.new("RGBA", (8, 8), (100, 100, 100, 128)).convert(mode)
    image.save(tmp_path / "1.tif", icc_profile=content)
    pixels = np.asarray(fit(open_picture(tmp_path / "1.tif"), (4, 4), mode="RGBA")).astype(int)
    assert abs(pixels[..., :3] - 100).max() <= 3
    assert np.all(pixels[..., 3] == (128 if mode == "RGBA" else 255))


@pytest.mark.parametrize("name", ["0.png", "0.tif"])
def test_the_majority_decides_whether_files_are_measurements(tmp_path: Path, name: str) -> None:
    if name == "0.png":
        Image.fromarray(np.full((8, 10), 20_000, np.uint16)).save(tmp_path / name)
    else:
        tifffile.imwrite(tmp_path / name, np.zeros((2, 8, 10), np.uint8))
    for number in range(1, 11):
        picture(tmp_path / f"{number}.jpg")
        np.savez(tmp_path / f"{number}_sd.npz", np.zeros((8, 10)))  # the cache of a captioning program
    assert space_of_folder(tmp_path) is None
    opened = open_dataset(str(tmp_path), image_size=4, cache_dir=tmp_path / "cache")
    assert len(opened) == 11
    found = (
        f"1 files of fields are read as pictures, such as {tmp_path}/{name}: `space` Fields reads all files as fields"
    )
    assert found in opened.notes


def test_the_size_of_the_first_picture_can_be_that_of_all(tmp_path: Path) -> None:
    picture(tmp_path / "1.png", (30, 20))
    picture(tmp_path / "2.png", (40, 40))
    data = DataConfig(dataset_path=tmp_path, image_size=0)
    assert flags_of_files(data) == {"image_size": 20, "aspect_ratio": "3:2"}


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ((60, 40), (40, 40), False),
        ((40, 60), (60, 40), False),
        ((40, 40), (40, 43), False),
        ((60, 40), (30, 20), True),
        ((100, 67), (50, 33), True),
    ],
)
def test_pairs_may_differ_in_size_but_not_in_shape(
    tmp_path: Path, one: tuple[int, int], other: tuple[int, int], fits: bool
) -> None:
    for number, sizes in enumerate(((one, other), ((20, 20), (40, 40)))):
        picture(tmp_path / f"a/{number}.png", sizes[0])
        picture(tmp_path / f"b/{number}.png", sizes[1])
    mine, theirs = (open_dataset(str(tmp_path / name), image_size=4) for name in "ab")
    paired = pair_by_name(mine, theirs, skip_unpaired=True)
    assert paired.rows is not None
    assert paired.rows.tolist() == ([0, 1] if fits else [1])
    if not fits:
        with pytest.raises(UsageError, match=r"1 pictures in .* have no partner of the same name and shape, such as 0"):
            pair_by_name(mine, theirs, skip_unpaired=False)


PAIRS = {
    "two formats": ("1.jpg 1.png", "1.jpg 1.png", "1.jpg=1.jpg 1.png=1.png"),
    "one of two formats": ("1.jpg 1.png 2.jpg", "1.jpg 2.png", "1.jpg=1.jpg 2.jpg=2.png"),
    "no telling which": ("1.jpg 1.bmp 2.jpg", "1.png 2.png", "2.jpg=2.png"),
    "another case": ("IMG_1.JPG img_2.jpg", "img_1.png IMG_2.PNG", "IMG_1.JPG=img_1.png img_2.jpg=IMG_2.PNG"),
    "a case that is not unique": ("a.png A.png b.png", "a.jpg b.png", "a.png=a.jpg b.png=b.png"),
    "scales": ("0001.png 0002.png", "0001x4.png 0002x4.png", "0001.png=0001x4.png 0002.png=0002x4.png"),
    "roles": ("a_HR.png b_HR.png", "a_LR.png b_SRF_4_LR.png", "a_HR.png=a_LR.png"),
    "two scales": ("1.png 2.png", "1x2.png 1x4.png 2.png", "2.png=2.png"),
    "another normalisation": ("caf\u00e9.png", "cafe\u0301.jpg", "caf\u00e9.png=cafe\u0301.jpg"),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_partners_have_the_same_name_in_any_spelling_that_is_unique(tmp_path: Path, kind: str) -> None:
    for folder, names in zip("ab", PAIRS[kind], strict=False):
        for number, name in enumerate(names.split()):
            picture(tmp_path / folder / name, colour=(number, 0, 0))
    mine, theirs = (open_dataset(str(tmp_path / name), image_size=4) for name in "ab")
    paired = pair_by_name(mine, theirs, skip_unpaired=True)
    assert paired.rows is not None
    assert paired.partners is not None
    found = [f"{mine.names[row]}={theirs.names[paired.partners[row]]}" for row in paired.rows.tolist()]
    assert sorted(found) == sorted(PAIRS[kind][2].split())
    assert any("have no partner" in remark for remark in paired.remarks) == ({len(mine), len(theirs)} != {len(found)})


@pytest.mark.parametrize(
    ("mine", "theirs", "excluded", "count"),
    [
        ("0001.png 0002.png 0003.png", "0001x4.png 0002x4.png 0003x4.png", "0001.png", 2),
        ("1.jpg 1.png 2.png", "1.jpg 1.bmp 2.png", "1.jpg", 2),
    ],
)
def test_pictures_without_an_excluded_pair_are_all_paired(
    tmp_path: Path, mine: str, theirs: str, excluded: str, count: int
) -> None:
    for folder, names in {"a": mine, "b": theirs}.items():
        for name in names.split():
            picture(tmp_path / folder / name)
    pictures = Pictures(dataset_path=tmp_path / "a", image_size=4, exclude=(excluded,), cache_dir=tmp_path / "cache")
    opened = PictureData(pictures, sources=Sources(tmp_path / "b", paired=True)).open()
    assert len(opened) == count


MARKS = {"-9999": -9999, " 7 \0": 7, "7.0": 7, "nan": -1, "1e400": -1, "none": -1}
"""Texts of the tag for unknown values, and the value that they stand for; -1 for none of the values."""


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "float32", "float64"])
def test_the_mark_of_a_geotiff_for_unknown_values_is_nan(tmp_path: Path, dtype: str) -> None:
    values = np.arange(80).reshape(8, 10).astype(dtype)
    values[0, 0] = 0 if dtype.startswith("u") else -9999
    for mark, value in MARKS.items():
        tifffile.imwrite(tmp_path / "1.tif", values, extratags=[(42113, 2, len(mark) + 1, mark, True)])
        field, unknown = read_field(tmp_path / "1.tif", None)[0], values == value
        assert (np.isnan(field[0]) == unknown).all()
        assert (field[0][~unknown] == values[~unknown]).all()
    assert field.dtype == dtype, "without a mark"


def test_files_with_and_without_unknown_values_are_read_alike(tmp_path: Path) -> None:
    values = np.arange(80, dtype=np.int16).reshape(8, 10)
    tifffile.imwrite(tmp_path / "1.tif", values, extratags=[(42113, 2, 2, "7", True)])
    tifffile.imwrite(tmp_path / "2.tif", values)
    assert FieldFolder(tmp_path).format.dtype == "float32"
    dataset = open_dataset(
        str(tmp_path), image_size=8, space="Fields", aspect_ratio="5:4", cache_dir=tmp_path / "cache"
    )
    assert np.isnan(dataset.entries["images"]).sum(axis=(1, 2, 3)).tolist() == [1, 0]
    assert dataset.info.space is not None
    assert (dataset.info.space["low"], dataset.info.space["high"]) == ([0], [79])


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"image_size": 8, "aspect_ratio": "3"}, "`aspect_ratio` is 3; it must be width:height"),
        ({"image_size": 8, "exclude": ["2.png"]}, r"`exclude` names 2\.png, which is no image and no folder of"),
        ({"image_size": 8, "exclude": ["1.png"]}, "`exclude` lists all images of"),
    ],
)
def test_python_takes_a_folder_and_its_errors_name_parameters(
    tmp_path: Path, how: dict[str, Any], sentence: str
) -> None:
    picture(tmp_path / "1.png")
    with pytest.raises(UsageError, match=f"^{sentence}"):
        open_dataset(str(tmp_path), **how)
    dataset = open_dataset(str(tmp_path), image_size=8)
    assert build(describe(dataset.described)).open().path == dataset.path


@pytest.mark.parametrize(
    ("name", "value"),
    [("crop", "middle"), ("resize", "bicubic"), ("bits", 11), ("image_size", -8), ("image_size", "8"), ("limit", -1)],
)
def test_an_argument_without_meaning_is_refused_before_a_store_is_written(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(UsageError, match=f"`{name}` is {value}; it must be "):
        open_dataset("synthetic-flowers", cache_dir=tmp_path, **{name: value})
    assert not [*tmp_path.iterdir()]


def test_a_limited_number_of_pictures_is_spread_over_the_classes(tmp_path: Path) -> None:
    for number in range(8):
        picture(tmp_path / f"{'ab'[number // 4]}/{number}.png")
    names = [{*open_dataset(str(tmp_path), image_size=4, limit=limit).names} for limit in (2, 5, 9)]
    assert {name[0] for name in names[0]} == {"a", "b"}
    assert names[0] < names[1] < names[2]
    assert [*map(len, names)] == [2, 5, 8]


NAMES = "1.gif 1.avif 1.jfif 1.jpe 1.JPG 1.Jpeg 1.WEBP 1.bmp 1.tiff 1.TIF jpeg.png png.jpg gif.webp"


@pytest.mark.parametrize("name", NAMES.split())
def test_what_pillow_opens_is_read(tmp_path: Path, name: str) -> None:
    kind = {"jpeg": "JPEG", "png": "PNG", "gif": "GIF"}.get(Path(name).stem)
    kind = kind or {".jfif": "JPEG", ".jpe": "JPEG", ".jpeg": "JPEG"}.get(Path(name).suffix.lower())
    frames = [Image.new("RGB", (10, 8), colour) for colour in ((40, 180, 60), (255, 0, 0))]
    several = {} if kind == "JPEG" or name in ("1.JPG", "1.bmp") else {"save_all": True, "append_images": frames[1:]}
    frames[0].save(tmp_path / name, kind, **several)
    [row] = open_dataset(str(tmp_path), image_size=4).entries["images"]
    assert abs(row.astype(int).mean(axis=(1, 2)) - (40, 180, 60)).max() < 12, "the first frame"


def archive(kind: str) -> bytes:
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w") as file:
            file.writestr("1.png", b"")
    else:
        with tarfile.open(fileobj=content, mode="w:gz" if kind == "gz" else "w") as tar:
            tar.addfile(tarfile.TarInfo("1.png"))
    return content.getvalue()


CONTENTS = {
    "a Git LFS pointer; git lfs pull fetches the file": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a zip archive; unpack it": archive("zip"),
    "a tar archive; unpack it": archive("tar"),
    "a gzip archive; unpack it": archive("gz"),
    "a DICOM file; convert it to PNG or TIFF": bytes(128) + b"DICM" + bytes(100),
    "a HEIC picture; pip install": b"\0\0\0\x18ftypheic" + bytes(100),
    "a JPEG XL picture; pip install": b"\xff\x0a" + bytes(100),
    "text such as a web page": b"<!DOCTYPE html><html></html>",
    "the file is empty": b"",
}


@pytest.mark.parametrize("content", CONTENTS)
def test_files_that_are_no_pictures_are_named_for_what_they_are(tmp_path: Path, content: str) -> None:
    file = tmp_path / "all/1.jpg"
    file.parent.mkdir()
    file.write_bytes(CONTENTS[content])
    with pytest.raises(UsageError, match=rf"broken image .*1\.jpg \({content}"):
        open_dataset(str(file.parent), image_size=4)
    with pytest.raises(UsageError, match=rf"^`dataset_path` /.*1\.jpg is not a folder, but {content}"):
        open_dataset("", file, image_size=4)
    if content.startswith("a zip archive"):
        file.with_suffix(".npz").write_bytes(CONTENTS[content])
        with pytest.raises(UsageError, match=r"1\.npz is not a folder, but a NumPy archive; save one of its arrays as"):
            open_dataset("", file.with_suffix(".npz"), image_size=4)
        file.with_suffix(".npz").unlink()
    file.rename(file.with_suffix(".unknown"))
    with pytest.raises(UsageError, match=rf"holds no pictures .*; .*1\.unknown is {content}"):
        open_dataset(str(file.parent), image_size=4)


def test_a_folder_of_a_dangling_link_or_a_pipe_holds_no_pictures(tmp_path: Path) -> None:
    for number, make in enumerate((lambda path: path.symlink_to("nowhere"), os.mkfifo)):
        (tmp_path / str(number)).mkdir()
        make(tmp_path / str(number) / "notes.txt")
        with pytest.raises(UsageError, match="holds no pictures"):
            open_dataset(str(tmp_path / str(number)), image_size=4)


def test_a_table_that_is_a_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UsageError, match=r"cannot be read as a dataset \(a Git LFS pointer; git lfs pull"):
        open_dataset(str(tmp_path), image_size=4)


@pytest.mark.parametrize("form", ["bytes", "struct", "struct with gaps"])
def test_columns_of_encoded_pictures_are_read(tmp_path: Path, form: str) -> None:
    content = picture(tmp_path / "elsewhere/1.png").read_bytes()
    values: list[Any] = [content] * 3
    if form != "bytes":
        values = [{"bytes": content, "path": "1.png"}] * 3
    if form == "struct with gaps":
        values[0] = None
    rows = datasets.Dataset.from_dict({"text": list("abc"), "noise": [b"none"] * 3, "picture": values})
    (tmp_path / "table").mkdir()
    rows.to_parquet(tmp_path / "table/train.parquet")
    how: dict[str, Any] = {"image_size": 4, "skip_broken_images": form == "struct with gaps"}
    dataset = open_dataset(str(tmp_path / "table"), **how)
    assert len(dataset) == (2 if form == "struct with gaps" else 3)
    assert dataset.entries["images"][0, :, 0, 0].tolist() == [40, 180, 60]


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_files_can_be_left_out_by_their_names(tmp_path: Path, kind: str) -> None:
    for number in range(3):
        picture(tmp_path / f"pics/{'ab'[number % 2]}/{number}.png", colour=(number, 0, 0))
    (tmp_path / "pics/metadata.csv").write_text("file_name,text\na/0.png,zero\nb/1.png,one\na/2.png,two\n")
    names = ["a/0.png", "b/1.png"]
    if kind == "table":
        files = [tmp_path / "pics" / name for name in ("a/0.png", "a/2.png", "b/1.png")]
        images = [{"bytes": file.read_bytes(), "path": None} for file in files]
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 0, 1]})
        (tmp_path / "table").mkdir()
        rows.cast_column("image", datasets.Image()).to_parquet(tmp_path / "table/train.parquet")
        names = ["0", "2"]
    folder = tmp_path / ("pics" if kind == "folder" else "table")
    dataset = open_dataset(str(folder), image_size=4, exclude=names)
    assert dataset.entries["images"][:, 0, 0, 0].tolist() == [2]
    assert dataset.names == (["a/2.png"] if kind == "folder" else ["1"])
    assert len(dataset.class_names) == {"folder": 1, "table": 2}[kind], "the labels of a table keep their numbers"
    assert len(open_dataset(str(folder), image_size=4)) == 3
    assert len(build(describe(dataset.described)).open()) == 1


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_measurements_that_are_no_picture_are_named_with_the_way_to_read_them(tmp_path: Path, dtype: str) -> None:
    values = np.zeros((5, 8, 10) if dtype == "int32" else (8, 10), "uint8" if dtype == "int32" else dtype)
    tifffile.imwrite(tmp_path / "0.tif", values, planarconfig="separate" if dtype == "int32" else None)
    for number in range(1, 4):
        picture(tmp_path / f"{number}.jpg")
    with pytest.raises(UsageError, match=r"broken image .*0\.tif \(.*; `space` Fields reads measurements\): remove it"):
        open_dataset(str(tmp_path), image_size=4)


def test_a_folder_that_takes_long_to_list_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listing, "SILENT_LISTING", -1)
    assert find_files(tmp_path) == []
    assert f"warning: still listing the files of {tmp_path}" in "".join(capfd.readouterr())


def test_files_of_unknown_formats_are_named(tmp_path: Path) -> None:
    """A person takes them for pictures: a cache without suffixes, downloads, files of other programs."""
    picture(tmp_path / "a.png")
    for name in ("b", "c.jpg_large", "d.pef", "e.pef", "labels.yaml", "notes.txt"):
        (tmp_path / name).write_bytes(b"?")
    kinds = "2 .pef, 1 without a suffix, 1 .jpg_large, 1 .yaml"
    assert FileFolder(tmp_path).notes == [f"left out 5 files of unknown formats ({kinds}), such as b"]


def test_nothing_depends_on_excluded_files(tmp_path: Path) -> None:
    for name in ("cats/0.png", "cats/1.png", "masks/0.png", "masks/left_1.png", "masks/left_2.png"):
        picture(tmp_path / "pics" / name, colour=(len(name), 0, 0))
    masks = [f"masks/{name}.png" for name in ("0", "left_1", "left_2")]
    excluding = FileFolder(tmp_path / "pics", exclude=masks)
    without = FileFolder(tmp_path / "pics" / "cats")
    assert [file.name for file in excluding.files] == [file.name for file in without.files]
    assert excluding.class_names == ["cats"]
    assert excluding.notes[0] == "left out 3 images by `exclude`"
    assert FileFolder(tmp_path / "pics", exclude=["masks"]).files == excluding.files
    with pytest.raises(UsageError, match="`exclude` lists all images of pics: list fewer images"):
        FileFolder(tmp_path / "pics", exclude=["masks", "cats"])


def test_a_source_of_ones_own_is_excluded_from_without_a_change(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / f"pics/{'ab'[number % 2]}/{number}.png", colour=(number, 0, 0))
    source = FileFolder(tmp_path / "pics")
    assert len(open_dataset(source=source, image_size=4, exclude=["a"])) == 1
    assert len(open_dataset(source=source, image_size=4)) == 3
    with pytest.raises(UsageError, match="`exclude` names c, which is no image and no folder of pics"):
        open_dataset(source=source, image_size=4, exclude=["c"])


def test_an_excluded_subfolder_may_have_partners(tmp_path: Path) -> None:
    for folder in ("from", "to"):
        for name in ("a/0.png", "a/1.png", "masks/0.png"):
            picture(tmp_path / folder / name)
    pictures = Pictures(dataset_path=tmp_path / "to", image_size=4, exclude=("masks",), cache_dir=tmp_path / "cache")
    assert len(PictureData(pictures, sources=Sources(tmp_path / "from", paired=True)).open()) == 2
