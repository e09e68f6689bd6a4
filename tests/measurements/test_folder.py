"""Tests of folders of fields: exact values, written files, and damaged files."""

import dataclasses
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from rectified_flow.data.open import open_dataset, space_of_folder
from rectified_flow.data.store_writer import open_store
from rectified_flow.errors import UsageError
from rectified_flow.measurements.files import TYPES, FieldFormat, encode_field, fit_field, read_field
from rectified_flow.measurements.folder import FieldFolder

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, np.dtype[Any]]


def random_field(dtype: str, channels: int = 3, height: int = 8, width: int = 10) -> Array:
    """A field with the whole range of its type, and NaN in those of float."""
    if np.dtype(dtype).kind == "f":
        values = (RNG.normal(size=(channels, height, width)) * 1e4).astype(dtype)
        values[0, 0, :2] = np.nan, np.finfo(dtype).max
        return values
    limits = np.iinfo(dtype)
    values = RNG.integers(limits.min, limits.max, (channels, height, width), dtype=dtype, endpoint=True)
    values[0, 0, :2] = limits.min, limits.max
    return values


def save(path: Path, values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, values)
    return path


FORMATS = [
    *(FieldFormat(suffix, dtype, 3, False) for suffix in (".npy", ".tif") for dtype in TYPES),
    *(FieldFormat(suffix, "int16", 1, False, True) for suffix in (".npy", ".tif")),
    *(FieldFormat(suffix, "float32", 3, True) for suffix in (".npy", ".tif")),
    FieldFormat(".tif", "float16", 5, False, pages=True),
    *(FieldFormat(".png", dtype, 1, False, True) for dtype in ("uint8", "uint16")),
    *(FieldFormat(".png", dtype, channels, True) for dtype in ("uint8", "uint16") for channels in (2, 3, 4)),
]


@pytest.mark.parametrize("how", FORMATS, ids=lambda how: f"{how.suffix}-{how.dtype}-{how.channels}-{how.channels_last}")
def test_a_field_is_written_and_read_to_the_bit(tmp_path: Path, how: FieldFormat) -> None:
    values = random_field(how.dtype, how.channels)
    for number in range(2):
        (tmp_path / f"{number}{how.suffix}").write_bytes(encode_field(values, how))
    folder = FieldFolder(tmp_path)
    read, label = folder.load(1)
    assert (read.dtype, read.shape, label) == (values.dtype, values.shape, -1)
    assert read.tobytes() == values.tobytes()
    assert read.flags.c_contiguous
    assert read.flags.writeable
    assert (folder.format, folder.size_of(0)) == (how, (10, 8))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("uint16", {"compression": "lzw"}),
        ("float32", {"compression": "zlib", "predictor": True}),
        ("uint16", {"bigtiff": True, "rowsperstrip": 3}),
        ("float32", {"byteorder": ">", "tile": (16, 16)}),
    ],
)
def test_other_programs_tiff_files_are_read_to_the_bit(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    values = random_field(dtype, 4, 20, 24)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack", **options)
    tifffile.imwrite(tmp_path / "b.tiff", values, photometric="minisblack", planarconfig="separate", **options)
    last = np.moveaxis(values, 0, 2)
    tifffile.imwrite(tmp_path / "c.TIF", last, photometric="minisblack", planarconfig="contig", **options)
    folder = FieldFolder(tmp_path)
    assert [folder.load(index)[0].tobytes() for index in range(3)] == [values.tobytes()] * 3
    assert folder.notes == [f"read .tif files as 4 channels of {dtype}, 24 x 20 px"]


def test_copies_and_masks_among_the_pages_are_no_channels(tmp_path: Path) -> None:
    values = random_field("uint16", 1)[0]
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        file.write(values, photometric="minisblack")
        file.write(values[::2, ::2], photometric="minisblack", subfiletype=1)
    assert np.array_equal(read_field(tmp_path / "a.tif", None)[0], values[None])
    picture = tmp_path / "pyramid/a.tif"
    picture.parent.mkdir()
    with tifffile.TiffWriter(picture) as file:
        file.write(np.zeros((8, 8, 3), np.uint8), photometric="rgb")
        file.write(np.zeros((4, 4, 3), np.uint8), photometric="rgb", subfiletype=1)
    assert not space_of_folder(picture.parent)


def test_the_size_of_pixels_is_the_only_tag_that_is_copied(tmp_path: Path) -> None:
    values = random_field("int16", 1)
    described: dict[str, Any] = {"description": "patient 7", "software": "scanner", "datetime": "2020:01:01 00:00:00"}
    resolution: dict[str, Any] = {"resolution": (1 / 0.65e-4, 300.5), "resolutionunit": 3}
    tifffile.imwrite(tmp_path / "a.tif", values[0], extratags=[(42113, 2, 4, "-99", True)], **described, **resolution)
    how = FieldFolder(tmp_path).format
    assert how.pixel_size == (200000 / 13, 300.5, 3)
    content = encode_field(values, how)
    assert not any(text.encode() in content for text in described.values())
    tags = {tag.name: tag.value for tag in tifffile.TiffFile(io.BytesIO(content)).pages[0].tags.values()}  # type: ignore[union-attr]
    assert tags["XResolution"] == (200000, 13)
    assert tags["ResolutionUnit"] == 3
    assert "42113" not in tags
    assert not tags.keys() & {"Software", "DateTime", "Artist", "ImageDescription"}


def test_other_arrays_are_read_in_the_order_of_the_machine(tmp_path: Path) -> None:
    values = random_field("float32")
    for name, stored in (("big", values.astype(">f4")), ("fortran", np.asfortranarray(values))):
        assert read_field(save(tmp_path / f"{name}.npy", stored), None)[0].tobytes() == values.tobytes()
    assert read_field(save(tmp_path / "bool.npy", np.eye(4, dtype=bool)), None)[0].tolist() == [np.eye(4).tolist()]
    assert read_field(tmp_path / "bool.npy", None)[1].dtype == "uint8"


def test_values_are_rounded_and_clipped_when_they_are_written(tmp_path: Path) -> None:
    how = FieldFormat(".npy", "uint16", 1, False, True)
    (tmp_path / "a.npy").write_bytes(encode_field(np.array([[[1.5, 2.6, -3, 1e9, np.nan]]], np.float32), how))
    assert read_field(tmp_path / "a.npy", None)[0].tolist() == [[[2, 3, 0, 65535, 0]]]
    for dtype, most in (("uint32", 2**32 - 1), ("float16", 65504)):
        content = encode_field(np.array([[[1e10, 7]]], np.float32), dataclasses.replace(how, dtype=dtype))
        (tmp_path / "a.npy").write_bytes(content)
        assert read_field(tmp_path / "a.npy", None)[0].tolist() == [[[most, 7]]]


@pytest.mark.parametrize(("shape", "channels"), [((3, 9, 12), 3), ((9, 12, 3), 3), ((64, 128, 128), 64), ((9, 12), 1)])
def test_the_axis_of_channels_is_the_short_one(tmp_path: Path, shape: tuple[int, ...], channels: int) -> None:
    for name in ("a.npy", "b.npy"):
        save(tmp_path / name, np.zeros(shape, np.uint8))
    folder = FieldFolder(tmp_path)
    assert len(folder.load(0)[0]) == folder.format.channels == channels
    words = f"{channels} channel{'s' * (channels > 1)} of uint8"
    assert folder.notes == ["read .npy files as {}, {} x {} px".format(words, *folder.size_of(0))]
    first, last = (FieldFolder(tmp_path, channels_last=answer) for answer in (False, True))
    if len(shape) == 3:
        assert (first.load(0)[0].shape, last.load(0)[0].shape) == (shape, (shape[2], *shape[:2]))
        assert first.fingerprint != last.fingerprint


@pytest.mark.parametrize(("channels", "dtype"), [(3, "uint8"), (2, "float32")])
def test_a_file_that_differs_from_the_first_counts_as_broken(tmp_path: Path, channels: int, dtype: str) -> None:
    save(tmp_path / "1.npy", np.zeros((3, 8, 8), np.float32))
    save(tmp_path / "2.npy", np.zeros((channels, 8, 8), dtype))
    with pytest.raises(ValueError, match=f"it has {channels} channels of {dtype}, and the first file has 3 channels"):
        FieldFolder(tmp_path).load(1)


def npy(values: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def tiff(values: Array, **options: Any) -> bytes:
    content = io.BytesIO()
    tifffile.imwrite(content, values, metadata=None, **{"photometric": "minisblack"} | options)
    return content.getvalue()


SMALL = np.zeros((8, 8), np.float32)
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "four axes": (".npy", npy(np.zeros((1, 2, 3, 4))), r"its shape is \(1, 2, 3, 4\); save arrays of two axes"),
    "complex": (".npy", npy(np.zeros((4, 4), complex)), "of the type complex128; convert them to one of uint8, uint16"),
    "objects": (".npy", npy(np.full((4, 4), None)), "Object arrays cannot be loaded"),
    "empty": (".npy", npy(np.zeros((0, 4))), r"its shape is \(0, 4\)"),
    "infinite": (".npy", npy(np.array([[1, np.inf]], np.float32)), "an infinite value, or one too large for float32"),
    "cut": (".npy", npy(SMALL)[:-9], "Failed to read all data"),
    "cut tiff": (".tif", tiff(SMALL)[:-9], "failed to read"),
    "cut compressed tiff": (".tif", tiff(random_field("uint16", 1), compression="lzw")[:-9], "cannot be reshaped"),
    "complex tiff": (".tif", tiff(np.zeros((4, 4), np.complex64)), "of the type complex64"),
    "pages of colours": (".tif", tiff(np.zeros((2, 4, 4, 3), np.uint8), photometric="rgb"), "2 pages of shape"),
    "no png": (".png", b"\xff\xd8\xff", "."),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_ends_in_a_sentence(tmp_path: Path, name: str) -> None:
    suffix, content, words = DAMAGED[name]
    save(tmp_path / "0.npy", SMALL)
    (tmp_path / f"1{suffix}").write_bytes(content)
    with pytest.raises(UsageError, match=rf"broken image .*1\{suffix} \(.*({words}).*\): remove it"):
        open_store(FieldFolder(tmp_path), 8, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "gone"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "1.npy", SMALL)
    odd = tmp_path / "2.npy"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to({"device": "/dev/zero", "loop": odd.name, "gone": "nowhere"}[kind])
    folder = FieldFolder(tmp_path)
    with pytest.raises(OSError, match=r"regular file|symbolic links|No such file"):
        folder.load(1)


def test_the_first_file_that_can_be_read_decides(tmp_path: Path) -> None:
    save(tmp_path / "1.npy", SMALL)
    (tmp_path / "0.npy").write_bytes(b"broken")
    folder = FieldFolder(tmp_path)
    assert folder.load(1)[0].shape == (1, 8, 8)
    with pytest.raises(ValueError, match="magic string"):
        folder.load(0)
    (tmp_path / "1.npy").unlink()
    with pytest.raises(UsageError, match=r"holds no field that can be read; the first is .*0\.npy \(.*magic"):
        FieldFolder(tmp_path)


@pytest.mark.parametrize(("name", "package"), [("a.tif", "tifffile"), ("a.png", "imagecodecs")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    how = FieldFormat(Path(name).suffix, "uint16", 3, True)
    (tmp_path / name).write_bytes(encode_field(random_field("uint16"), how))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=package):
        FieldFolder(tmp_path)
    assert space_of_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "measured"),
    [
        ("a.png", np.zeros((4, 4), np.uint8), False),
        ("a.png", np.zeros((4, 4), np.uint16), True),
        ("a.tif", np.zeros((4, 4), np.uint8), False),
        ("a.tif", np.zeros((4, 4), np.uint16), True),
        ("a.tif", np.zeros((4, 4), np.float32), True),
        ("a.tif", np.zeros((4, 4, 2), np.uint8), True),
        ("a.tif", np.zeros((4, 4, 3), np.uint8), False),
        ("a.tif", np.zeros((4, 4, 4), np.uint8), False),
        ("a.tif", np.zeros((4, 4, 5), np.uint8), True),
        ("a.tif", np.zeros((2, 4, 4), np.uint8), True),
        ("a.jpg", np.zeros((4, 4), np.uint8), False),
    ],
)
def test_measurements_are_told_from_pictures(tmp_path: Path, name: str, values: Array, measured: bool) -> None:
    if name == "a.tif":
        planar = "contig" if values.shape[0] == 4 and values.ndim == 3 else None
        (tmp_path / name).write_bytes(tiff(values, planarconfig=planar, bigtiff=values.dtype != np.uint8))
    else:
        Image.fromarray(values).save(tmp_path / name)
    (tmp_path / "0.png").write_bytes(b"broken")
    for number in (1, 2):
        (tmp_path / f"{number}{name[1:]}").write_bytes((tmp_path / name).read_bytes())
    assert bool(space_of_folder(tmp_path)) == measured
    save(tmp_path / "more/0.npy", SMALL)
    assert bool(space_of_folder(tmp_path)) == measured, "a stray array beside pictures"
    for number in range(1, 6):
        save(tmp_path / f"more/{number}.npy", SMALL)
    assert space_of_folder(tmp_path)


def test_a_field_of_the_right_size_is_returned_as_it_is() -> None:
    values = random_field("float32")
    assert fit_field(values, (10, 8)) is values
    assert np.array_equal(fit_field(values, (8, 8)), values[:, :, 1:9], equal_nan=True), "a crop changes no value"


@pytest.mark.parametrize("dtype", ["uint16", "float16", "float64"])
@pytest.mark.parametrize("size", [(7, 7), (30, 17), (40, 40)])
@pytest.mark.parametrize("pad", [False, True])
def test_a_constant_stays_constant(dtype: str, size: tuple[int, int], pad: bool) -> None:
    number = 0.3 if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max
    fitted = fit_field(np.full((2, 20, 30), number, dtype), size, pad=pad)
    assert fitted.shape == (2, *size[::-1])
    assert fitted.dtype == ("float32" if dtype == "float64" else dtype)
    np.testing.assert_allclose(fitted[~np.isnan(fitted)], number, rtol=1e-3 if dtype == "float16" else 1e-6)
    assert pad or not np.isnan(fitted).any()


@pytest.mark.parametrize("side", [5, 8, 13, 20, 45])
def test_resizing_keeps_the_mean_of_a_wave_and_the_range(side: int) -> None:
    """The centre of a wide field is cropped; a wave whose period is the side has the mean 3."""
    places = np.arange(32)
    wave = 3 + np.sin(2 * np.pi * (places[:, None] + places) / 32) + np.zeros((2, 1, 1))
    fitted = fit_field(np.concatenate((wave, wave[..., :8]), axis=2)[..., -36:], (side, side))
    assert fitted.mean(axis=(1, 2)) == pytest.approx([3, 3], abs=0.02)
    noise = RNG.lognormal(size=(2, 32, 32)).astype(np.float32)
    resized = fit_field(noise, (side, side))
    assert noise.min() <= resized.min() < resized.max() <= noise.max()


def test_sixteen_bits_are_averaged_without_a_step_through_eight() -> None:
    values = np.array([[[1000, 1001], [1003, 1002]]], np.uint16)
    assert fit_field(values, (1, 1)).item() == 1002  # 1001.5, to the even number
    assert fit_field(np.array([[[0, 4]] * 2], np.float32), (4, 4))[0, 0].tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(("name", "value"), [("resize", "nearest"), ("bits", 12), ("grey", True), ("alpha", True)])
def test_what_only_pictures_obey_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    """Label maps would be blended in silence."""
    save(tmp_path / "maps/a.npy", random_field("uint16"))
    save(tmp_path / "maps/b.npy", random_field("uint16"))
    where: dict[str, Any] = {"image_size": 4, "space": "Fields", "cache_dir": tmp_path / "cache"}
    with pytest.raises(UsageError, match=f"`{name}` has no effect on Fields: leave it out"):
        open_dataset(tmp_path / "maps", **where, **{name: value})
    assert len(open_dataset(tmp_path / "maps", **where, resize="lanczos", crop="none")) == 2


def test_unknown_pixels_do_not_spread() -> None:
    values = np.full((1, 8, 8), 5, np.float32)
    values[0, :, :4] = np.nan
    values[0, 0, 6] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = fit_field(values, (4, 4))[0]
        assert np.isnan(fit_field(np.full((1, 4, 4), np.nan), (2, 2))).all()
    assert np.isnan(fitted[:, :2]).all()
    np.testing.assert_allclose(fitted[:, 2:], 5, rtol=1e-6)


def test_padding_is_nan_or_the_smallest_value() -> None:
    values = np.arange(5, 13, dtype=np.float32).reshape(1, 2, 4)
    padded = fit_field(values, (4, 4), pad=True)
    assert np.isnan(padded[0, [0, 3]]).all()
    assert np.array_equal(padded[0, 1:3], values[0])
    whole = fit_field(values.astype(np.int16), (4, 4), pad=True)
    assert whole[0, [0, 3]].tolist() == [[5] * 4] * 2


def test_a_few_planes_are_one_picture(tmp_path: Path) -> None:
    save(tmp_path / "x.npy", np.zeros((4, 20, 30), np.uint8))
    assert FieldFolder(tmp_path).format.channels == 4
    save(tmp_path / "x.npy", np.zeros((9, 20, 30), np.uint8))
    save(tmp_path / "y.npy", np.zeros((9, 20, 30), np.uint8))
    assert FieldFolder(tmp_path).format.channels == 9, "as many as in another file"


@pytest.mark.parametrize("shape", [(500, 28, 28), (50, 32, 32), (20, 28, 28), (100, 784), (9, 20, 30)])
def test_a_stack_of_pictures_is_refused_with_both_readings(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save(tmp_path / "x.npy", np.zeros(shape, np.uint8))
    readings = f"save {shape[0]} pictures of .* px in {shape[0]} files .* or pass channels_last=False"
    with pytest.raises(UsageError, match=readings):
        FieldFolder(tmp_path)
    assert FieldFolder(tmp_path, channels_last=False).format.channels == (shape[0] if len(shape) == 3 else 1)
    save(tmp_path / "x.npy", np.zeros((50, 32, 32, 3), np.uint8))
    with pytest.raises(UsageError, match="in 50 files, one for each item"):
        FieldFolder(tmp_path)
