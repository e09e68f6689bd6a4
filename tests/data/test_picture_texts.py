"""Tests of tables and texts beside pictures as other programs write them."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rectified_flow.data.sources.folder import FileFolder

NAMES = ("IMG_0.JPG", "IMG_1.JPG", "IMG_2.JPG", "caf\u00e9.png")
FIVE = [f"caption {number}, of five" for number in range(5)]
THREE = ["a", "b", "c"]

CASES: dict[str, tuple[dict[str, str], dict[str, list[Any]]]] = {
    "NAME.caption": ({"IMG_0.caption": "a cat", "IMG_1.caption": "a dog"}, {"text": ["a cat", "a dog", None, None]}),
    "NAME.png.txt": ({"IMG_0.JPG.txt": "a cat", "caf\u00e9.png.txt": "tea"}, {"text": ["a cat", None, None, "tea"]}),
    "another case": ({"img_0.TXT": "a cat"}, {"text": ["a cat", None, None, None]}),
    "another normalisation": ({"cafe\u0301.txt": "a pot"}, {"text": [None, None, None, "a pot"]}),
    "captions.txt of Kaggle": (
        {"captions.txt": "image,caption\nIMG_0.JPG,a cat , sitting\nIMG_1.JPG,a dog\n"},
        {"caption": ["a cat , sitting", "a dog", None, None]},
    ),
    "labels.csv of Kaggle": (
        {"labels.csv": "id,breed\nIMG_0,pug\nIMG_1,boxer\nIMG_2,pug\n"},
        {"breed": ["pug", "boxer", "pug", None]},
    ),
    "an index and names": ({"t.csv": ",file,age\n0,img_1.jpg,3\n1,img_0.jpg,4\n"}, {"column_1": ["1", "0", None, None],
                                                                                     "age": ["4", "3", None, None]}),
    "folders of elsewhere": ({"t.csv": "path;age\nIMG_0.JPG;3,5\nother.jpg;4\n"}, {"age": ["3.5", None, None, None]}),
    "captions without a header": (
        {"token.txt": "".join(f"IMG_0.JPG#{n}\t{text}\n" for n, text in enumerate(FIVE))},
        {"text": [FIVE, None, None, None]},
    ),
    "five captions of Flickr30k": (
        {"results.csv": "image_name| comment_number| comment\n"
         + "".join(f"IMG_1.JPG| {n}| {text}\n" for n, text in enumerate(FIVE))},
        {"comment": [None, FIVE, None, None]},
    ),
    "five rows of metadata.csv": (
        {"metadata.csv": "file_name,text,kind\n" + "".join(f'IMG_2.JPG,"{text}",x\n' for text in FIVE)},
        {"text": [None, None, FIVE, None], "kind": [None, None, "x", None]},
    ),
    "boxes of YOLO": ({f"IMG_{n}.txt": "0 0.5 0.5 0.1 0.2\n15 0.1 0.2 0.3 0.4\n" for n in range(3)}, {}),
    "boxes of KITTI": ({"IMG_0.txt": "Car 0.00 0 -1.57 599.41 156.40 629.75 189.25 2.85\n"}, {}),
    "polygons": ({"IMG_0.txt": "0 0.1 0.2 0.3 0.4 0.5 0.6\n", "classes.txt": "cat\ndog\n"}, {}),
    "a caption of numbers": ({"IMG_0.txt": "2 cats and 3 dogs"}, {"text": ["2 cats and 3 dogs", None, None, None]}),
    "tables of other things": ({"log.csv": "step,loss\n1,2\n2,3\n", "notes.txt": "one, two\nthree, four\n"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tables_and_texts_are_found(tmp_path: Path, case: str) -> None:
    for name in NAMES:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    files, columns = CASES[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert FileFolder(tmp_path).read_table() == columns


def test_a_table_may_name_pictures_of_a_subfolder_if_they_are_unique(tmp_path: Path) -> None:
    for name in ("train/a.png", "train/cat/b.png", "train/dog/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text("id,age\na,1\nb,2\ntrain/cat/b.png,3\ntrain/a.png,1\n")
    assert FileFolder(tmp_path).read_table() == {"age": ["1", "3", None]}
