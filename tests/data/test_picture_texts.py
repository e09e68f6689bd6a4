"""Tests of tables and texts beside pictures as other programs write them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from rectified_flow.data.open import open_dataset
from rectified_flow.data.sources.folder import FileFolder

NAMES = ("IMG_0.JPG", "IMG_1.JPG", "IMG_2.JPG", "caf\u00e9.png")
FIVE = [f"caption {number}, of five" for number in range(5)]
THREE = ["a", "b", "c"]
COCO = {"images": [{"id": 7, "file_name": "IMG_1.JPG"}], "categories": [{"id": 1, "name": "cat"}]}

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
    "addresses of a museum": (
        {"t.csv": "id,url,title\n1,https://a.org/i/IMG_1.JPG?w=300,Rose\n2,https://a.org/caf%C3%A9.png,Tea\n"},
        {"id": [None, "1", None, "2"], "title": [None, "Rose", None, "Tea"]},
    ),
    "names quoted as in a URL": ({"t.csv": "file,age\ncaf%C3%A9.png,3\n"}, {"age": [None, None, None, "3"]}),
    "paths of Windows": (
        {"t.csv": "path,kind\nC:\\Users\\Ann\\IMG_0.JPG,a\n\\\\host\\x\\IMG_2.JPG,b\n"},
        {"kind": ["a", None, "b", None]},
    ),
    "absolute paths of another machine": ({"t.csv": "path,n\n/home/a/IMG_1.JPG,2\n"}, {"n": [None, "2", None, None]}),
    "names relative to the folder of the dataset": (
        {"Anno/list.txt": "IMG_0.JPG 3\nIMG_1.JPG 4\n"}, {"text": ["3", "4", None, None]}
    ),
    "lines of Tesseract": ({"IMG_0.gt.txt": "some words"}, {"text": ["some words", None, None, None]}),
    "a list with blanks": ({"list.txt": "IMG_0.JPG 3\nIMG_1.JPG  4\n"}, {"text": ["3", "4", None, None]}),
    "lines of remarks": ({"w.txt": "#\n# all words\nIMG_0 ok 7\nIMG_1 err 8\n"}, {"column_2": ["ok", "err", None, None],
                                                                                "column_3": ["7", "8", None, None]}),
    "captions behind a blank": (
        {"c.txt": "IMG_0.JPG a red cat\nIMG_1.JPG two dogs\n"}, {"text": ["a red cat", "two dogs", None, None]}
    ),
    "groups of digits": ({"labels.csv": 'file,size\nIMG_0.JPG,"1,234"\n'}, {"size": ["1,234", None, None, None]}),
    "two tables that differ": (
        {"a.csv": "file,kind\nIMG_0.JPG,cat\n", "b.csv": "file,kind,age\nIMG_0.JPG,dog,3\nIMG_1.JPG,fox,4\n"},
        {"kind": ["cat", None, None, None], "age": ["3", "4", None, None]},
    ),
    "equal numbers in two tables": (
        {
            "a.csv": "file,age\nIMG_0.JPG,3\n",
            "b.jsonl": '{"file": "IMG_0.JPG", "age": 3}\n{"file": "IMG_1.JPG", "age": 4}\n',
        },
        {"age": [3, 4, None, None]},
    ),
    "two metadata files in a folder of their own": (
        {
            "meta/metadata.csv": "file_name,kind\n../IMG_0.JPG,cat\n",
            "meta/metadata.jsonl": '{"file_name": "../IMG_1.JPG", "age": 4}\n',
        },
        {"kind": ["cat", None, None, None], "age": [None, 4, None, None]},
    ),
    "attributes of CelebA": (
        {"list_attr.txt": "2\nBald Smiling\nIMG_0.JPG  1 -1\nIMG_1.JPG -1  1\n"},
        {"Bald": ["1", "-1", None, None], "Smiling": ["-1", "1", None, None]},
    ),
    "boxes in a table": (
        {"boxes.csv": "image,x,kind\nIMG_0.JPG,1,a\nIMG_0.JPG,2,a\nIMG_1.JPG,3,b\n"},
        {"kind": ["a", "b", None, None]},
    ),
    "captions.json by name": (
        {"c.json": '{"IMG_0.JPG": "a cat", "IMG_2": ["a", "b"]}'}, {"text": ["a cat", None, THREE[:2], None]}
    ),
    "meta_cap.json of kohya": (
        {"meta.json": '{"x": {"tags": "no"}, "IMG_1": {"caption": "a dog", "size": [8, 8]}}'},
        {"caption": [None, "a dog", None, None], "size": [None, [8, 8], None, None]},
    ),
    "dataset.json of StyleGAN": (
        {"dataset.json": '{"labels": [["IMG_0.JPG", 1], ["IMG_2.JPG", 0]]}'}, {"label": ["1", None, "0", None]}
    ),
    "a list of LLaVA": (
        {"llava.json": '[{"image": "IMG_0.JPG", "caption": "a hat"}]'}, {"caption": ["a hat", None, None, None]}
    ),
    "an object of Eagle": ({"metadata.json": '{"name": "IMG_2", "star": 3}'}, {"star": [None, None, 3, None]}),
    "lines in .json": ({"p.json": '{"id": "IMG_0", "n": 1}\n{"id": "x", "n": 2}'}, {"n": [1, None, None, None]}),
    "lines of JSON": (
        {"prompts.jsonl": '{"image": "img_1.jpg", "prompt": "a hat"}\n'}, {"prompt": [None, "a hat", None, None]}
    ),
    "captions of COCO": (
        {"captions.json": json.dumps(COCO | {"annotations": [{"image_id": 7, "caption": each} for each in THREE]})},
        {"caption": [None, THREE, None, None]},
    ),
    "categories of COCO": (
        {"instances.json": json.dumps(COCO | {"annotations": [{"image_id": 7, "category_id": 1}] * 2})},
        {"category": [None, ["cat"], None, None]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tables_and_texts_are_found(tmp_path: Path, case: str) -> None:
    for name in NAMES:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    files, columns = CASES[case]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    found = FileFolder(tmp_path).read_table()
    assert {name: values for name, values in found.items() if any(values)} == columns


@pytest.mark.parametrize("places", [("train.csv", "val.csv"), ("train/labels.csv", "val/labels.csv")])
def test_the_table_of_another_split_is_not_read(tmp_path: Path, places: tuple[str, str]) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in (1, 2):
            Image.new("RGB", (8, 8)).save(tmp_path / f"{split}/{number}.png")
    for place, labels in zip(places, (("cat", "dog"), ("horse", "cow")), strict=True):
        (tmp_path / place).write_text("".join(f"{n},{label}\n" for n, label in zip((1, 2), labels, strict=True)))
    assert [*FileFolder(tmp_path).read_table().values()] == [["cat", "dog"]]


def test_a_metadata_file_does_not_describe_pictures_of_another(tmp_path: Path) -> None:
    """A picture was deleted from b, and its row is still there."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in (1, 2):
            Image.new("RGB", (8, 8)).save(tmp_path / f"{folder}/{number}.png")
        (tmp_path / folder / "metadata.csv").write_text(f"file_name,text\n1.png,{folder} one\n2.png,{folder} two\n")
    (tmp_path / "b/2.png").unlink()
    found = FileFolder(tmp_path)
    assert found.read_table()["text"] == ["a one", "a two", "b one"]
    said = "1 of the file_names in metadata.csv name no picture that is read, such as 2.png"
    assert any(said in note for note in found.notes)


def test_a_table_may_name_pictures_of_a_subfolder_if_they_are_unique(tmp_path: Path) -> None:
    for name in ("train/a.png", "train/cat/b.png", "train/dog/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "labels.csv").write_text("id,age\na,1\nb,2\ntrain/cat/b.png,3\ntrain/a.png,1\n")
    assert FileFolder(tmp_path).read_table() == {"age": ["1", "3", None]}


def test_numbers_name_pictures_with_zeros_in_front(tmp_path: Path) -> None:
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number:04}.png")
    (tmp_path / "t.csv").write_text("kind,id\n" + "".join(f"{number % 2},{number}\n" for number in (3, 2, 1)))
    assert FileFolder(tmp_path).read_table() == {"kind": [None, "1", "0", "1"]}, "not by the column of classes"


def test_a_parquet_table_beside_pictures_has_their_columns(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "00000").mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (0, number, 0)).save(tmp_path / f"00000/{number:09}.jpg")
    table = pa.table(
        {
            "url": ["u"] * 3,
            "key": [f"{number:09}" for number in range(3)],
            "caption": ["a", None, "b"],
            "boxes": [[1.5]] * 3,
        }
    )
    parquet.write_table(table, tmp_path / "00000.parquet")
    opened = open_dataset("", tmp_path, image_size=8)
    assert (len(opened), opened.table) == (3, ["url", "caption", "boxes"])
    assert FileFolder(tmp_path).read_table()["caption"] == ["a", None, "b"]


UNREAD = {
    "labels.xlsx": "left out tables that name none of the pictures (1 .xlsx), such as labels.xlsx: columns for",
    "log.csv": "left out tables that name none of the pictures (1 .csv), such as log.csv: columns for",
    "other.json": "left out tables that name none of the pictures (1 .json), such as other.json: columns for",
    "deep.json": "left out tables that name none of the pictures (1 .json), such as deep.json: columns for",
    "IMG_0.JPG.json": "left out files beside pictures (1 .json), such as IMG_0.JPG.json: columns for",
    "metadata.csv": "columns for conditions are not read: ",
}


@pytest.mark.parametrize("name", UNREAD)
def test_tables_that_are_not_read_are_said(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "IMG_0.JPG")
    (tmp_path / name).write_text("[" * 100_000 if name == "deep.json" else '{"a": 1}\n')
    [note] = open_dataset("", tmp_path, image_size=8).notes[:1]
    assert note.startswith(UNREAD[name])
