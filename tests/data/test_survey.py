"""Tests of the framing that some pictures of a folder decide, and of what a person is told about them."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from rectified_flow.data.framing import Framing
from rectified_flow.data.mirroring import names_side, unmirrored_words
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.data.survey import suits_nearest, survey
from rectified_flow.errors import UsageError

GENERATOR = np.random.default_rng(0)
PALETTE = np.array([[0, 0, 0], [255, 0, 0], [0, 128, 0], [255, 255, 255]], np.uint8)


def noise(*shape: int, most: int = 256, dtype: str = "uint8") -> NDArray[np.uint8]:
    return GENERATOR.integers(0, most, shape).astype(dtype)


def save(folder: Path, name: str, pixels: NDArray[np.uint8]) -> Path:
    folder.mkdir(exist_ok=True)
    Image.fromarray(pixels).save(folder / name)
    return folder


def opened(folder: Path, framing: Framing) -> ImageDataset:
    return ImageDataset(open_store(FileFolder(folder), framing, cache_dir=folder.with_name("cache")))


def surveyed(folder: Path, size: int = 8, skip: int = 0) -> tuple[bool, int, str]:
    source = FileFolder(folder)
    found = survey(source, Framing(size, size), range(skip, len(source)))
    return found.is_grey, found.bits, found.resize


def sprite(side: int = 16) -> Image.Image:
    return Image.fromarray(PALETTE[noise(side, side, most=4)])


def drawing(width: int) -> Image.Image:
    image = Image.new("RGB", (400, 400), "white")
    draw = ImageDraw.Draw(image)
    for x in range(20, 400, 60):
        draw.line((x, 0, 400 - x, 400), "black", width)
    return image


def label_map() -> Image.Image:
    image = Image.new("P", (256, 192), 0)
    image.putpalette(PALETTE.tobytes())
    draw = ImageDraw.Draw(image)
    draw.ellipse((20, 20, 150, 150), 1)
    draw.rectangle((120, 90, 240, 180), 2)
    return image.convert("RGB")


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_grey_pictures_are_found_in_files_of_rgb(suffix: str, tmp_path: Path) -> None:
    for number in range(3):
        grey = np.repeat(np.kron(noise(6, 6), np.ones((8, 8), np.uint8))[..., None], 3, axis=2)
        save(tmp_path / "pics", f"{number}.{suffix}", grey)
    assert surveyed(tmp_path / "pics")[0]
    grey[:8, :8] = (200, 180, 150)
    save(tmp_path / "pics", f"sepia.{suffix}", grey)
    assert not surveyed(tmp_path / "pics")[0]
    dataset = opened(tmp_path / "pics", Framing(8, 8, grey=True))
    assert dataset[0]["images"].shape == (1, 8, 8)
    assert dataset.space.shape == (1, 8, 8)


def test_a_coloured_picture_among_grey_ones_is_named(tmp_path: Path) -> None:
    save(tmp_path / "pics", "a.png", noise(8, 8))
    save(tmp_path / "pics", "b.png", np.full((8, 8, 3), (255, 0, 0), np.uint8))
    dataset = opened(tmp_path / "pics", Framing(8, 8, grey=True))
    assert dataset[1]["images"].unique().tolist() == [76], "0.299 of 255"
    said = "1 picture is coloured, and trained on in grey, such as b.png"
    assert said in dataset.info.notes


@pytest.mark.parametrize(("bits", "most"), [(10, 1023), (12, 4095), (14, 16383), (16, 65535)])
@pytest.mark.parametrize("others", [0, 3])
def test_the_values_of_files_of_16_bits_decide_their_range(bits: int, most: int, others: int, tmp_path: Path) -> None:
    values = np.linspace(0, most, 64).round().astype(np.uint16).reshape(8, 8)
    save(tmp_path / "pics", "deep.png", values)  # type: ignore[arg-type]
    for number in range(others):
        save(tmp_path / "pics", f"other {number}.png", noise(8, 8, 3))
    assert surveyed(tmp_path / "pics")[:2] == (others == 0, bits)
    dataset = opened(tmp_path / "pics", Framing(8, 8, bits=bits))  # type: ignore[arg-type]
    assert dataset[0]["images"][0].flatten().tolist() == [int(value) * 255 // most for value in values.flatten()]


def test_a_brighter_file_than_those_of_the_survey_is_not_clipped_but_named(tmp_path: Path) -> None:
    save(tmp_path / "pics", "deep.png", np.full((8, 8), 40_000, np.uint16))
    save(tmp_path / "pics", "usual.png", np.arange(64, dtype=np.uint16).reshape(8, 8))  # type: ignore[arg-type]
    dataset = opened(tmp_path / "pics", Framing(8, 8, bits=12))
    assert dataset[0]["images"].unique().tolist() == [40_000 * 255 // 65_535]
    assert "1 picture is of more than 12 bits, so darker than the others, such as deep.png" in dataset.info.notes


@pytest.mark.parametrize("alpha", [False, True])
def test_transparent_pictures_are_named_and_not_trained_on_alone(alpha: bool, tmp_path: Path) -> None:
    for number in range(2):
        save(
            tmp_path / "pics", f"{number}.png", np.concatenate([noise(8, 8, 3), np.zeros((8, 8, 1), np.uint8)], axis=2)
        )
    with pytest.raises(UsageError, match="all 2 pictures of pics are wholly transparent: save them with visible"):
        opened(tmp_path / "pics", Framing(8, 8, alpha))
    save(tmp_path / "pics", "seen.png", noise(8, 8, 3))
    dataset = opened(tmp_path / "pics", Framing(8, 8, alpha))
    assert len(dataset) == 3
    assert dataset.info.notes.count("2 pictures are wholly transparent, such as 0.png") == 1


def test_what_is_left_out_and_why_is_said(tmp_path: Path) -> None:
    for number in range(6):
        save(tmp_path / "pics", f"{number}.png", noise(8, 8, 3))
    notes = dict[tuple[int, int | None], list[str]]()
    for excluded, limit in ((0, None), (2, None), (0, 4), (2, 3), (2, 4)):
        exclude = [f"{number}.png" for number in range(excluded)]
        source = FileFolder(tmp_path / "pics", exclude=exclude)
        path = open_store(source, Framing(8, 8), cache_dir=tmp_path / "cache", limit=limit)
        said = [*source.notes, *ImageDataset(path).info.notes]
        notes[excluded, limit] = [note for note in said if "exclude" in note or "limit" in note]
    assert notes == {
        (0, None): [],
        (2, None): ["left out 2 images by `exclude`"],
        (0, 4): ["read 4 of 6 images, spread over all of them, because of `limit`"],
        (2, 3): ["left out 2 images by `exclude`", "read 3 of 4 images, spread over all of them, because of `limit`"],
        (2, 4): ["left out 2 images by `exclude`"],
    }


def test_alpha_with_another_meaning_is_said(tmp_path: Path) -> None:
    for name, alpha in (("gloss", noise(8, 8, 1, most=120) + 40), ("icon", np.zeros((8, 8, 1), np.uint8))):
        alpha[2:4] = 255
        save(tmp_path / "pics", f"{name}.png", np.concatenate([noise(8, 8, 3), alpha], axis=2))
    said = "1 picture is partly transparent in most of the area, so that white shows through (`alpha` keeps the fourth"
    for is_kept in (False, True):
        notes = opened(tmp_path / "pics", Framing(8, 8, is_kept)).info.notes
        assert [note.startswith(said) for note in notes].count(True) == (not is_kept)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_an_animation_shows_its_first_frame_with_a_picture(suffix: str, tmp_path: Path) -> None:
    red, empty = Image.new("RGBA", (8, 8), "red"), Image.new("RGBA", (8, 8))
    red.paste("blue", (0, 0, 8, 4))
    (tmp_path / "pics").mkdir()
    frames = [empty, Image.new("RGBA", (8, 8), "white"), red, empty]
    frames[0].save(tmp_path / f"pics/1.{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    save(tmp_path / "pics", "2.png", noise(8, 8, 3))
    dataset = opened(tmp_path / "pics", Framing(8, 8))
    assert dataset[0]["images"][:, [0, 7], 0].T.tolist() == [[0, 0, 255], [255, 0, 0]]
    assert (
        f"1 picture is of a file with several pages or frames, of which one is read, such as 1.{suffix}"
        in dataset.info.notes
    )


def test_other_pages_of_a_file_are_said(tmp_path: Path) -> None:
    pages = [Image.fromarray(noise(8, 8, 3)) for _ in range(3)]
    (tmp_path / "pics").mkdir()
    pages[0].save(tmp_path / "pics/1.tif", save_all=True, append_images=pages[1:])
    pages[0].save(tmp_path / "pics/2.jpg", "MPO", save_all=True, append_images=pages[1:])
    with tifffile.TiffWriter(tmp_path / "pics/3.tif") as file:
        file.write(noise(8, 8, 3), photometric="rgb")
        file.write(noise(4, 4, 3), photometric="rgb", subfiletype=1)
    dataset = opened(tmp_path / "pics", Framing(8, 8))
    assert dataset[0]["images"].permute(1, 2, 0).tolist() == np.asarray(pages[0]).tolist()
    said = [note for note in dataset.info.notes if "of which one is read" in note]
    assert said == ["1 picture is of a file with several pages or frames, of which one is read, such as 1.tif"]


@pytest.mark.parametrize(
    ("framing", "kept", "is_said"),
    [
        (Framing(8, 8), 0.02, True),
        (Framing(16, 8), 0.04, True),
        (Framing(8, 16), 0.01, True),
        (Framing(400, 8), 1.0, False),
        (Framing(8, 8, crop="random"), 0.02, True),
        (Framing(8, 8, crop="none"), 1.0, False),
    ],
)
def test_a_crop_that_keeps_less_than_half_is_said(framing: Framing, kept: float, is_said: bool, tmp_path: Path) -> None:
    save(tmp_path / "pics", "wide.png", noise(40, 2000, 3))
    assert framing.kept(2000, 40) == pytest.approx(kept)
    notes = opened(tmp_path / "pics", framing).info.notes
    said = "1 picture is cropped to half of the area or less (`aspect_ratio` and `crop` none keep more), such as"
    assert any(note.startswith(said) for note in notes) == is_said
    assert Framing(8, 8).kept(3, 2) == pytest.approx(2 / 3)


ART = {
    "a sprite, enlarged": (sprite(), 64, True),
    "a sprite, enlarged by a fraction": (sprite(), 24, True),
    "a sprite that was enlarged": (sprite().resize((256, 256), Image.Resampling.NEAREST), 32, True),
    "a sprite that was enlarged, below its own size": (
        sprite(32).resize((256, 256), Image.Resampling.NEAREST),
        16,
        False,
    ),
    "a sprite of its size": (sprite(), 16, None),
    "one colour": (Image.new("RGB", (40, 40), "red"), 16, None),
    "a label map": (label_map(), 32, True),
    "line art, reduced": (drawing(3), 50, False),
    "a photograph, enlarged": (Image.fromarray(noise(32, 32, 3)), 64, False),
    "an icon with soft edges": (drawing(9).resize((32, 32), Image.Resampling.LANCZOS), 64, False),
}


@pytest.mark.parametrize(("image", "side", "expected"), ART.values(), ids=ART)
def test_pictures_that_are_resized_without_new_colours(image: Image.Image, side: int, expected: bool | None) -> None:
    assert suits_nearest(image, (side, side)) is expected


@pytest.mark.parametrize(("image", "side"), [(sprite(), 40), (label_map(), 32)], ids=["sprite", "label map"])
def test_nearest_makes_no_new_colours(image: Image.Image, side: int, tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "pics", f"{number}.png", np.asarray(image))
    assert surveyed(tmp_path / "pics", side)[2] == "nearest"
    colours = {tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()}
    for resize, same in (("nearest", True), ("lanczos", False)):
        stored = opened(tmp_path / "pics", Framing(side, side, resize=resize))[0]["images"]  # type: ignore[arg-type]
        found = {tuple(pixel) for pixel in stored.reshape(3, -1).T.tolist()}
        assert (found <= colours) == same


def test_a_few_other_pictures_do_not_decide(tmp_path: Path) -> None:
    for number in range(4):
        save(tmp_path / "pics", f"{number}.png", noise(32, 32, 3))
    save(tmp_path / "pics", "sprite.png", np.asarray(sprite()))
    assert surveyed(tmp_path / "pics", 64)[2] == "lanczos"
    assert surveyed(tmp_path / "pics", 64, skip=4)[2] == "nearest"


@pytest.mark.parametrize(
    "text",
    [
        *("left", "turn_Left", "turnRight", "links abbiegen", "ein rechtes Auge", "tourner \u00e0 gauche"),
        *("mano derecha", "\u5de6\u624b", "\u5411\u53f3\u8f6c", "\uc67c\ucabd", "counterclockwise", "RIGHT-ARROW"),
    ],
)
def test_sides_are_found_in_texts(text: str) -> None:
    assert names_side(text)


@pytest.mark.parametrize("text", ["bright", "leftover", "upright", "gaucherie", "sunflower", "copyright", ""])
def test_other_words_name_no_side(text: str) -> None:
    assert not names_side(text)


@pytest.mark.parametrize(
    ("classes", "captions", "reason"),
    [
        (["ahead", "left"], {}, "the class left names a side"),
        ([str(digit) for digit in range(10)], {}, "the classes are digits or letters, such as 0"),
        (["A", "b", "C"], {}, "the classes are digits or letters, such as A"),
        (["zero", "one"], {}, "the classes are digits or letters, such as zero"),
        (["digit_0", "digit_1"], {}, "the classes are digits or letters, such as digit_0"),
        (["#", "a", "U+0041", "uni0042"], {}, "the classes are digits or letters, such as #"),
        (["cat", "dog"], {"text": ["a cat", None, "a cat on the left"]}, "1 texts of the column text name a side"),
        (["cat"], {"text": [["a cat", "left of it"], []]}, "1 texts of the column text name a side"),
        (["cat", "7"], {"text": ["a cat"] * 200 + ["right"]}, None),
        (["1", "2", "12"], {"size": [1, 2, 3]}, None),
        (["x"], {}, None),
        ([], {}, None),
    ],
)
def test_words_that_a_mirror_image_makes_false(
    classes: list[str], captions: dict[str, list[object]], reason: str | None
) -> None:
    found = unmirrored_words(classes, captions)
    assert found == reason if reason is None else (found or "").startswith(reason)


@pytest.mark.parametrize(
    ("stems", "reason"),
    [
        ([*"abcdefgh"], "the files have the names of letters or signs, such as a"),
        ([f"uni004{digit}" for digit in range(8)], "the files have the names of letters or signs, such as uni0040"),
        ([f"{number}_{side}" for number in range(4) for side in ("left", "right")], "8 files name a side, such as 0_l"),
        ([f"{number}_left" for number in range(8)] + [f"{number}" for number in range(9)], None),
        ([*"abc"], None),
        ([*"0123456789"], None),
        ([f"photo {number}" for number in range(8)], None),
    ],
)
def test_names_of_files_may_speak_against_mirror_images(stems: list[str], reason: str | None) -> None:
    found = unmirrored_words([], {}, stems)
    assert found == reason or (reason is not None and str(found).startswith(reason))


def test_white_shapes_are_shown_by_their_transparency(tmp_path: Path) -> None:
    for number in range(3):
        shape = np.full((8, 8, 4), 255, np.uint8)
        shape[number + 1 :, :, 3] = 0
        save(tmp_path / "pics", f"{number}.png", shape)
    with pytest.raises(
        UsageError, match=r"all 3 pictures of pics are of one colour once white .*: pass `alpha`, which"
    ):
        opened(tmp_path / "pics", Framing(8, 8))
    assert not any("of one colour" in note for note in opened(tmp_path / "pics", Framing(8, 8, True)).info.notes)


def test_grey_pictures_are_no_fault_if_all_are_trained_on_in_grey(tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path / "pics", f"{number}.png", np.repeat(noise(8, 8, 1), 3, axis=2))
    assert any("grey" in note for note in opened(tmp_path / "pics", Framing(8, 8)).info.notes)
    assert not any("grey" in note for note in opened(tmp_path / "pics", Framing(8, 8, grey=True)).info.notes)
