"""Tests of the kinds of files and folders that are left out, or not called what they are named, a row each."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from rectified_flow.data.open import open_dataset, space_of_folder
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.name_notes import group_note, notes_on_names
from rectified_flow.errors import UsageError


def save(folder: Path, names: str) -> None:
    """A picture for each name, equal ones for names with the same mark, such as ``a.png=1``.

    ``~2`` makes it twice as large, and ``~J`` a coloured JPEG.
    """
    for number, each in enumerate(names.split("|")):
        name, _, mark = each.partition("=")
        name, _, kind = name.partition("~")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if kind:
            side = 8 * int(kind) if kind.isdecimal() else 8
            picture = Image.new("RGB", (side, side), (200, number, 0))
            picture.save(folder / name, "JPEG" if kind == "J" else "PNG")
            continue
        Image.new("RGB", (8, 8), (number, int(mark) if mark else 100 + number, 0)).save(folder / name, "PNG")
        if mark:
            Image.new("RGB", (8, 8), (0, int(mark), 0)).save(folder / name, "PNG")


READ = "read 1 pictures with the names of copies and other contents, such as {}: `exclude` leaves files out"
KINDS = {
    "masks of OneTrainer": ("1.jpg|1-masklabel.png|1-condlabel.png", "1.jpg", ["left out 2 masks beside"]),
    "masks of a medical dataset": ("a (1).png|a (1)_mask.png|a (1)_mask_1.png", "a (1).png", ["left out 2 masks"]),
    "masks in two formats": ("1.jpg|1_mask.png|1_mask.jpg", "1.jpg", ["left out 2 masks beside"]),
    "labels of ADE20K and of ISIC": ("1.jpg|1_parts_1.png|1_superpixels.png", "1.jpg", ["left out 2 masks beside"]),
    "maps of a rendering": ("r_0.png|r_0_depth_0001.png|r_0_normal_0001.png", "r_0.png", ["left out 2 maps of depth"]),
    "thumbnails of Telegram": ("s.webp|s.webp_thumb.jpg|p.jpg|p_thumb.jpg", "p.jpg|s.webp", ["left out 2 copies of"]),
    "maps of depth": ("1.png|1_depth.png", "1.png", ["left out 1 maps of depth or of normals beside their pictures"]),
    "copies of another size": ("1.jpg|1-300x200.jpg|1@2x.jpg|1_thumb.jpg", "1.jpg", ["left out 3 copies of another"]),
    "sizes of an icon": (
        "i.png|i@2x.png~2|i@3x.png~3",
        "i.png",
        ["left out 2 copies of another size", "i@2x.png is larger than i.png, which is read: move such smaller"],
    ),
    "coloured maps": ("1.jpg~J|1_normal.jpg~J|1_seg.jpg~J", "1.jpg", ["left out 1 maps", "left out 1 masks"]),
    "parts of a photograph": (
        "c.jpg~J|c_part_1.jpg~J",
        "c.jpg|c_part_1.jpg",
        [READ.format("c_part_1.jpg")],
    ),
    "equal copies": ("A.jpg=1|A(1).jpg=1|A (2).jpg=1|A - Copy.jpg=1|A copy 2.jpg=1", "A.jpg", ["left out 4 copies"]),
    "a numbered picture": ("A.jpg|A(1).jpg", "A(1).jpg|A.jpg", [READ.format("A(1).jpg")]),
    "an edited picture": ("A.jpg|A-edited.jpg", "A-edited.jpg|A.jpg", [READ.format("A-edited.jpg")]),
    "an edited picture of a phone": ("IMG_1.JPG|IMG_E1.JPG", "IMG_1.JPG|IMG_E1.JPG", [READ.format("IMG_E1.JPG")]),
    "numbers without a picture": (
        "A (1).jpg|A (2).jpg|mask.png|x_mask.png",
        "A (1).jpg|A (2).jpg|mask.png|x_mask.png",
        [],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_beside_pictures_are_left_out_or_said(tmp_path: Path, kind: str) -> None:
    names, read, notes = KINDS[kind]
    save(tmp_path, names)
    folder = FileFolder(tmp_path)
    assert [folder.name_of(number) for number in range(len(folder))] == read.split("|")
    assert len(folder.notes) == len(notes)
    assert all(note.startswith(start) for note, start in zip(folder.notes, notes, strict=True))


REPEATS = "ignored the number of repeats in the names of folders such as {}: each of the pictures is read once"
FOLDERS = {
    "kohya": (
        "img/10_zzz cat/1.png|img/5_zzz cat/2.png|reg/1_cat/3.png|log/4.png|model/sample/5.png",
        "zzz cat",
        ["left out 2 pictures for previews", "left out 1 pictures for regularisation, such as reg/1_cat/3.png",
         "read the pictures in", REPEATS.format("10_zzz cat")],
    ),
    "one folder of kohya": ("20_my dog/1.png", "my dog", [REPEATS.format("20_my dog")]),
    "two folders of kohya": ("10_cat/1.png|20_dog/1.png", "cat|dog", [REPEATS.format("10_cat")]),
    "dreambooth": (
        "instance_images/1.png|class_images/2.png",
        "",
        ["left out 1 pictures for regularisation", "read the pictures in"],
    ),
    "controlnet": ("images/1.png|conditioning_images/1.png", "", ["left out 1 pictures for conditioning", "read the"]),
    "cityscapes": ("leftImg8bit/train/a.png|gtFine/train/b.png", "", ["left out 1 pictures", "read the"]),
    "vessels of the retina": ("images/1.png|1st_manual/1.png|mask/1.png", "", ["left out 2 pictures of other", "read"]),
    "faces with masks": ("CelebA-HQ-img/1.png|CelebAMask-HQ-mask-anno/0/1.png", "", ["left out 1 pict", "read"]),
    "scales of a scene": ("images/1.png|images_2/1.png|images_4/1.png", "", ["left out 2 pictures for", "read"]),
    "grades": ("0_none/1.png|1_mild/1.png|2_severe/1.png", "0_none|1_mild|2_severe", []),
    "ages": ("10_years/1.png|20_years/1.png", "10_years|20_years", []),
    "numbers": ("10_20/1.png|30_40/1.png", "10_20|30_40", []),
    "groups of a trial": ("control/1.png|test/1.png", "control|test", []),
    "masks beside classes": ("a/1.png|b/2.png|masks/1.png", "a|b|masks", ["read 1 pictures with the names of labels"]),
    "thumbnails beside pictures": (
        "1.png|2.png|thumbs/1.png",
        "",
        ["no classes: 2 pictures are in no subfolder", "read 1 pictures with the names of previews, such as"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_are_called_what_they_hold(tmp_path: Path, kind: str) -> None:
    names, classes, notes = FOLDERS[kind]
    save(tmp_path, names)
    folder = FileFolder(tmp_path)
    assert folder.class_names == [name for name in classes.split("|") if name]
    assert len(folder.notes) == len(notes)
    assert all(note.startswith(start) for note, start in zip(folder.notes, notes, strict=True))


def odd(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def saved(kind: str, **options: object) -> Callable[[Path], None]:
    return lambda path: Image.new("RGB", (8, 8)).save(path, kind, **options)


EXIF = Image.Exif()
EXIF[0x010E] = "a description that is longer than a few bytes"
FIRST = {
    "a Git LFS pointer": lambda path: odd(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789"),
    "a WebP with Exif": saved("WEBP", exif=EXIF),
    "a JPEG with Exif": saved("JPEG", exif=EXIF),
    "a GIF": saved("GIF"),
    "an AVIF": saved("AVIF"),
    "nothing": lambda path: odd(path, b""),
}


@pytest.mark.parametrize("kind", FIRST)
def test_a_wrongly_named_file_makes_no_folder_of_measurements(tmp_path: Path, kind: str) -> None:
    FIRST[kind](tmp_path / "0.png")
    assert space_of_folder(tmp_path) is None
    FIRST[kind](tmp_path / "1.tif")
    assert space_of_folder(tmp_path) is None


def test_measurements_are_known_by_their_contents(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "0.png", np.zeros((8, 8), np.float32))
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "1.tif", "PNG")
    assert space_of_folder(tmp_path) == "Fields"


@pytest.mark.parametrize("name", ["1.nii.gz", "1.h5", "1.npz", "1.mp4", "1.CR3"])
def test_other_formats_are_counted(tmp_path: Path, name: str) -> None:
    save(tmp_path, "1.png")
    (tmp_path / name).write_bytes(b"1")
    [note] = FileFolder(tmp_path).notes
    assert note.startswith("left out 1 files of other formats")


@pytest.mark.parametrize("name", ["t.parquet", "a.csv", "1.png"])
def test_a_file_in_place_of_its_folder_is_named_with_the_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path, name)
    with pytest.raises(UsageError, match=f"is not a folder, but a file: pass its folder {tmp_path}$"):
        open_dataset("", tmp_path / name, image_size=8)


CHANNELS = "the files come in groups whose names differ in one part ({}), such as {} and {}, and each is read as a"
GROUPS = {
    "channels of microscopes": ("A_C0.tif|A_C1.tif|B_C0.tif|B_C1.tif", "C0, C1", "A_C0.tif|A_C1.tif"),
    "channels with other numbers": ("A_w1_1.TIF|A_w2_1.TIF|B_w1_3.TIF|B_w2_3.TIF", "w1, w2", "A_w1_1.TIF|A_w2_1.TIF"),
    "passes of Blender": ("Z1.png|Z2.png|Image1.png|Image2.png", "Image, Z", "Image1.png|Z1.png"),
    "a field of a microscope": ("x/s1_ch00.tif|x/s1_ch01.tif", "ch00, ch01", "x/s1_ch00.tif|x/s1_ch01.tif"),
    "colours of the Protein Atlas": ("A_red.png|A_green.png|A_blue.png", "blue, green, red", "A_blue.png|A_green.png"),
    "bands of a satellite": ("T_B02.tif|T_B03.tif|T_B8A.tif", "B02, B03, B8A", "T_B02.tif|T_B03.tif"),
    "exposures": ("S0_-2EV.jpg|S0_0EV.jpg|S0_+2EV.jpg", "+2EV, 0EV, 2EV", "S0_+2EV.jpg|S0_-2EV.jpg"),
    "copies of websites": ("a.jpg|a.webp|b.jpg|b.webp", ".jpg, .webp", "a.jpg|a.webp"),
    "maps of textures": ("w_albedo.png|w_ao.png|w_height.png|w_metal.png|w_rough.png", "albedo, ao, height, metal, ...",
                         "w_albedo.png|w_ao.png"),
    "copies with a watermark": ("a.jpg|a_wm.jpg|b.jpg|b_wm.jpg", "none, wm", "a.jpg|a_wm.jpg"),
    "scales of icons": ("i@1x.png|i@2x.png|i@3x.png", "1x, 2x, 3x", "i@1x.png|i@2x.png"),
    "views in front of the name": ("top_1.png|side_1.png|top_2.png|side_2.png", "side, top", "side_1.png|top_1.png"),
    "classes in front of the name": ("cat.0.jpg|cat.1.jpg|dog.0.jpg|dog.1.jpg", "cat, dog", "cat.0.jpg|dog.0.jpg"),
    "serial numbers behind a word": ("IMG-WA1.jpg|IMG-WA2.jpg|IMG-WA3.jpg|v-page_1.jpg|v-page_2.jpg", "", ""),
    "one channel": ("A_C0.tif|B_C0.tif", "", ""),
    "numbers": ("c1.png|cat_2.png|cat_3.png|IMG_0001.jpg|IMG_0002.jpg", "", ""),
    "classes with equal names": ("cat/1_a.png|dog/1_a.png", "", ""),
    "a few channels among photos": ("A_C0.tif|A_C1.tif|photo 1.jpg|photo 2.jpg|photo 3.jpg", "", ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROUPS)
def test_channels_and_versions_of_pictures_are_said(kind: str) -> None:
    names, parts, example = GROUPS[kind]
    note = group_note(names.split("|"))
    assert (note is not None) == bool(parts)
    assert note is None or note.startswith(CHANNELS.format(parts, *example.split("|")))


DOUBTFUL = {
    "_Rejected/1.png": "rejected pictures",
    "Originals/1.png": "originals of edited pictures",
    "samples/step_1000.png": "outputs of a program",
    "results/plot.png": "outputs of a program",
    "docs/x.png": "parts of a document",
    "res/derivatives/1_c.png": "copies of another size",
    "contact_sheet.jpg": "overviews",
    "folder.jpg": "overviews",
    "grid-0000.png": "overviews",
    "2023_profile_pic.jpg": "logos or avatars",
    "logo.png": "logos or avatars",
    "loss.png": "plots or charts",
    "a_red_cat_grid_0_12ab.png": "overviews",
    "atlas_0.png": "overviews",
    "ComfyUI_temp_abcd_00001_.png": "temporary files",
    "[Originals]/1.png": "originals of edited pictures",
    "logos_of_firms.png": "",
    "gridlock.png": "",
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_pictures_of_other_kinds_are_said_by_their_names(name: str) -> None:
    noun = DOUBTFUL[name]
    said = [f"read 1 pictures with the names of {noun}, such as {name}: `exclude` leaves files out"] if noun else []
    assert notes_on_names(["1.png", "2.png", "3.png", name], "pictures") == said
    assert notes_on_names([name], "pictures") == [], "if there are no others"


def test_pictures_that_are_not_downloaded_are_said(tmp_path: Path) -> None:
    save(tmp_path, "1.jpg|.2.jpg|.3.jpg.icloud")
    cloud, hidden = FileFolder(tmp_path).notes
    assert cloud == "left out 1 files that are not downloaded from iCloud, such as .3.jpg.icloud"
    assert hidden.startswith("left out 1 hidden files")


def test_what_belongs_to_an_excluded_picture_is_left_out_with_it(tmp_path: Path) -> None:
    save(tmp_path, "0.png=7|0_mask.png|0_thumb.png|0 (1).png=7|1.png|masks/1.png")
    assert [file.name for file in FileFolder(tmp_path, exclude=["0.png", "masks"]).files] == ["1.png"]
    with pytest.raises(UsageError, match="`exclude` lists all pictures of"):
        FileFolder(tmp_path, exclude=["0.png", "1.png", "masks"])
