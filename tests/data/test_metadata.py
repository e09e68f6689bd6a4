"""Tests of columns beside pictures: formats, kinds, gaps, captions and bad metadata."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rectified_flow.condition import Labels, Number
from rectified_flow.data.description import Columns, PictureData
from rectified_flow.data.metadata import RESERVED, choose_columns, condition_among, condition_name
from rectified_flow.data.open import Pictures, open_dataset
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import variant_conditions
from rectified_flow.text.caption import Caption
from tests.text.tiny_encoder import write_encoder

COUNT = 20
HEADER = "file_name,text,size,parity"


def rows_of(count: int = COUNT) -> list[str]:
    return [f"{i:02}.png,a picture of number {i},{i / 10},{'even' if i % 2 == 0 else 'odd'}" for i in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    for i in range(COUNT):
        Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(tmp_path / f"pictures/{i:02}.png")
    return tmp_path / "pictures"


def opened(folder: Path, *names: str, rows: list[str] | None = None, **flags: object) -> ImageDataset:
    if rows is not None:
        (folder / "metadata.csv").write_text("\n".join([HEADER, *rows]))
    pictures = open_dataset("", folder, image_size=8, cache_dir=folder.parent / "cache")
    described: Any = pictures.described
    return PictureData(described, Columns(names or ("all",), **flags)).open()  # type: ignore[arg-type]


def test_each_column_gets_the_kind_of_its_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = opened(folder, rows=rows_of())
    kinds = pictures.conditions
    assert [type(kind) for kind in kinds.values()] == [Caption, Number, Labels]
    size, label = kinds["size"], kinds["parity"]
    assert isinstance(size, Number)
    assert size.quantiles[:: len(size.quantiles) // 2] == pytest.approx((0, 0.95, 1.9))
    assert isinstance(label, Labels)
    assert label.names == ("even", "odd")
    printed = capsys.readouterr().out
    assert "caption, 20 different: a picture of number 0 (1), a pic" in printed
    assert "number, 20 different: 0.0 (1), 0.1 (1)" in printed
    assert "label, 2 different: even (10), odd (10)" in printed
    batch = pictures.read_batch([3, 0])
    assert batch["size"].tolist() == pytest.approx([0.3, 0])
    assert batch["parity"].tolist() == [1, 0]
    assert batch["images"][0, 0, 0, 0] == 30, "the row of its own picture"
    assert pictures.condition_texts([3])["text"] == ["a picture of number 3"]
    assert torch.equal(pickle.loads(pickle.dumps(pictures)).read_batch([3])["text"], batch["text"][:1])
    part = pictures.subset([5, 3])
    assert part.read_batch([1])["size"].tolist() == pytest.approx([0.3])


def test_order_of_rows_and_gaps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows belong to their file, in any order; a missing value or row is "none", and counted."""
    rows = [row.replace(",0.3,", ",,") for row in reversed(rows_of(18))]
    pictures = opened(folder, rows=[*rows, "99.png,of no picture,1,even"])
    batch = pictures.read_batch([2, 3, 19])
    assert batch["size"][0].item() == pytest.approx(0.2)
    assert batch["size"][1:].isnan().all()
    assert batch["parity"].tolist() == [0, 1, 2], "2 stands for none"
    assert batch["text"][2].isnan().all()
    printed = capsys.readouterr().out
    assert "missing in 3 of 20 rows" in printed
    assert "1 of the file_names in metadata.csv name no picture that is read, such as 99.png" in pictures.notes


def test_one_of_several_captions_in_each_epoch(folder: Path) -> None:
    lines = [{"file_name": f"{i:02}.png", "text": [f"one {i}", f"two {i}", f"three {i}"]} for i in range(COUNT)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pictures = opened(folder, "text")
    drawn, again = ([pictures.condition_texts([4 + COUNT * i])["text"][0] for i in range(40)] for _ in range(2))
    assert set(drawn) == {"one 4", "two 4", "three 4"}
    assert drawn == again, "a function of the seed and the epoch"
    kind = pictures.columns["text"].kind
    assert torch.equal(pictures.read_batch([4])["text"], kind.parse([drawn[0]]))


def test_encoded_captions_are_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = str(write_encoder(tmp_path / "encoder"))
    first = opened(folder, "text", rows=rows_of(), text_encoder=encoder, text_tokens=5)
    values = first.read_batch([7, 2])["text"]
    kind = first.columns["text"].kind
    torch.testing.assert_close(
        values, kind.parse(["a picture of number 7", "a picture of number 2"]).half(), equal_nan=True
    )
    [store] = (tmp_path / "cache").glob("captions-*/captions.float16")
    assert store.stat().st_size == COUNT * 6 * 16 * 2
    monkeypatch.setattr(Caption, "encode", lambda *_: pytest.fail("encoded again"))
    moved = shutil.copytree(encoder, tmp_path / "moved")
    again = opened(folder, "text", text_encoder=str(moved), text_tokens=5)
    assert torch.equal(again.read_batch([7, 2])["text"].nan_to_num(), values.nan_to_num())
    assert first.fingerprint == again.fingerprint


def test_the_fingerprint_is_that_of_the_values(folder: Path) -> None:
    first = opened(folder, "size", rows=rows_of()).fingerprint
    assert opened(folder, "size").fingerprint == first
    assert opened(folder, "parity").fingerprint != first
    assert opened(folder, "size", rows=[*rows_of(19), "19.png,a,5,odd"]).fingerprint != first


def test_how_units_and_dates_are_read_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "metadata.csv").write_text(cells("size,day", ["1 cm,2020-01-31", "2 cm,2021-02-28"]))
    opened(folder)
    printed = capsys.readouterr().out
    assert "read as numbers of cm; pass size=label for labels" in printed
    assert "dates are read as texts; write a number such as the year" in printed
    assert isinstance(opened(folder, "size=label").conditions["size"], Labels)


def test_a_column_may_have_a_long_name(folder: Path) -> None:
    name = "a" * 300
    (folder / "metadata.csv").write_text(cells(name, ["a cat", "a red dog"]))
    assert isinstance(opened(folder, f"{name}=caption").conditions[name], Caption)


def test_each_line_of_a_text_is_a_caption(folder: Path) -> None:
    for number in range(COUNT):
        (folder / f"{number:02}.txt").write_text(f"a cat, number {number}\n\n  a red animal \n" if number else "one\n")
    pictures = opened(folder)
    assert isinstance(pictures.conditions["text"], Caption)
    column = pictures.columns["text"]
    assert [column.texts[number] for number in range(3)] == ["one", "a cat, number 1", "a red animal"]
    assert np.diff(column.first).tolist() == [1, *[2] * (COUNT - 1)]
    said = "the texts of 19 pictures, such as 01.png, have several lines: each is a caption"
    assert said in pictures.notes


def test_names_of_conditions_fit_the_network() -> None:
    assert variant_conditions(Pixels(augmentation=0.1)).keys() <= RESERVED, "a column would lose its place"
    names = {"Unicode version": "Unicode_version", "x": "x_column", "2nd": "2nd_column", "é!": "é"}
    assert {column: condition_name(column) for column in names} == names
    assert {column: condition_among([*names.values()], column) for column in names} == names
    assert condition_among(["kind_column"], "kind_column") == "kind_column"


def lines_of(*lines: str) -> str:
    return "\n".join(lines)


def cells(column: str, values: list[str], separator: str = ",", end: str = "\n") -> str:
    """A table of one column, whose values are used in turn."""
    rows = [f"{i:02}.png{separator}{values[i % len(values)]}" for i in range(COUNT)]
    return end.join([f"file_name{separator}{column}", *rows])


def jsonl(value: str) -> str:
    return f'{{"file_name": "00.png", "a": {value}}}'


TEXTS: dict[str, str | bytes] = {f"{i:02}.txt": f"a picture of number {i}\n" for i in range(1, COUNT)}
GERMAN = cells("size", ["3,5", "0,25", "10"], ";", "\r\n")
FILES: dict[str, tuple[dict[str, str | bytes], str]] = {
    "semicolons": ({"metadata.csv": GERMAN}, "size: Number 3.5 0.25 10"),
    "quoted names": ({"metadata.csv": GERMAN.replace("file_name;size", '"file_name";"size"')}, "size: Number 3.5"),
    "points between groups of digits": (
        {"metadata.csv": cells("price", ["950", "12,50", "1.200", "15.000", "1.200,5"], ";")},
        "price: Number 950 12.5 1200 15000 1200.5",
    ),
    "points before decimals": ({"metadata.csv": cells("size", ["1.200", "0.5"], ";")}, "size: Number 1.2 0.5"),
    "the separator for Excel": ({"metadata.csv": "sep=;\r\n" + GERMAN}, "size: Number 3.5 0.25 10"),
    "the separator for Excel in another table": (
        {"data.csv": "\ufeffsep=;\r\n" + GERMAN.replace("file_name", "Bild")},
        "size: Number 3.5 0.25 10",
    ),
    "a title with a number sign": (
        {"metadata.csv": "#size,file_name\n3,00.png\n4,01.png"},
        "size: Number 3 4 nan",
    ),
    "a remark in front of the titles": (
        {"metadata.csv": "# by a program\n" + GERMAN},
        "size: Number 3.5 0.25 10",
    ),
    "names before colons": (
        {"captions.txt": "\n".join(f"{i:02}.png: at {i % 2}:00" for i in range(COUNT))},
        "text: Labels 0 1 0",
    ),
    "tabs": ({"metadata.csv": cells("size", ["3,5", "7"], "\t")}, "size: Number 3.5 7"),
    "decimal comma in quotes": ({"metadata.csv": cells("size", ['"3,5"', '"0,1"', "2"])}, "size: Number 3.5 0.1 2"),
    "three decimals": ({"metadata.csv": cells("size", ["1,250", "0,125"], ";")}, "size: Number 1.25 0.125"),
    "UTF-8 with a mark": ({"metadata.csv": GERMAN.encode("utf-8-sig")}, "size: Number 3.5 0.25 10"),
    "UTF-16": ({"metadata.csv": GERMAN.encode("utf-16")}, "size: Number 3.5 0.25 10"),
    "UTF-16, big end first": ({"metadata.csv": ("\ufeff" + GERMAN).encode("utf-16-be")}, "size: Number 3.5 0.25 10"),
    "old Macintosh": ({"metadata.csv": cells("size", ["3"], end="\r")}, "size: Number 3 3 3"),
    "spaces after commas": ({"metadata.csv": cells(" size", [" 3"])}, "size: Number 3 3 3"),
    "columns without a name": ({"metadata.csv": cells("size,,", ["3,,"])}, "size: Number 3 3 3"),
    "a title with the number of a repeated one": (
        {"metadata.csv": cells("size_2, size, size", ["3,4,5"])},
        "size_2: Number 3 3 3; size: Number 4 4 4; size_3: Number 5 5 5",
    ),
    "a repeated title": (
        {"metadata.csv": cells("size, size", ["3,4"])},
        "size: Number 3 3 3; size_2: Number 4 4 4",
    ),
    "short rows": ({"metadata.csv": cells("size,more", ["3"])}, "size: Number 3 3 3"),
    "a minus of typographers": ({"metadata.csv": cells("size", ["\N{MINUS SIGN}3.5", "4"])}, "size: Number -3.5 4"),
    "exponents": ({"metadata.csv": cells("size", ["1e-3", "+2.5E2", ".5", "7."])}, "size: Number 0.001 250 0.5 7"),
    "zeros in front": ({"metadata.csv": cells("code", ["007", "012"])}, "code: Number 7 12"),
    "words for nothing in words": ({"metadata.csv": cells("land", ["NA", "DE"])}, "land: Labels 1 0"),
    "a unit": ({"metadata.csv": cells("size", ["12 cm", "3.5 cm", "", "7cm"])}, "size: Number 12 3.5 nan 7"),
    "per cent": ({"metadata.csv": cells("share", ["35%", "NA", "7 %"])}, "share: Number 35 nan 7"),
    "prices": ({"metadata.csv": cells("price", ["$3.5", "$12"])}, "price: Number 3.5 12"),
    "several units": ({"metadata.csv": cells("size", ["12 cm", "3 m"])}, "size: Labels 0 1"),
    "underscores": ({"metadata.csv": cells("size", ["1_2", "3_4"])}, "size: Labels 0 1"),
    "digits of another script": ({"metadata.csv": cells("size", ["\u0663", "\u0664"])}, "size: Labels 0 1"),
    "texts beside pictures": (TEXTS, "text: Caption nan 0.4472 0.4472"),
    "no words": ({"metadata.csv": cells("text", ["!!!", *(f"a {i}" for i in range(19))])}, "text: Caption nan 0.7071"),
    "texts with marks of Windows": ({f"{i:02}.txt": b"\xef\xbb\xbfa\r\n" for i in range(COUNT)}, "text: Labels 0 0"),
    "texts and a table": ({"metadata.csv": cells("size", ["3"]), **TEXTS}, "size: Number 3; text: Caption nan 0.4472"),
    "the table has the texts": ({"metadata.csv": cells("text", ["x", "y"]), **TEXTS}, "text: Labels 0 1 0"),
    "a list with a gap": ({"metadata.jsonl": jsonl('["a", null]')}, "a: Labels 0 1"),
}
for mark in ("NA", "NaN", "null", "-", "", "n/a", "#N/A", "None", "?", "\N{EN DASH}"):
    FILES[f"missing as {mark!r}"] = {"metadata.csv": cells("size", [mark, "2", "1.5", "3"])}, "size: Number nan 2 1.5 3"


@pytest.mark.parametrize("case", FILES)
def test_files_are_read(folder: Path, case: str) -> None:
    """The kind of each column and the values of the first rows."""
    files, expected = FILES[case]
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    pictures = opened(folder)
    batch = pictures.read_batch(range(COUNT))
    found = {
        name: (type(kind).__name__, batch[name].flatten(1).amax(1) if batch[name].ndim > 1 else batch[name])
        for name, kind in pictures.conditions.items()
    }
    assert list(found) == [each.split(":")[0] for each in expected.split("; ")]
    for each in expected.split("; "):
        name, kind, *values = each.replace(":", "").split()
        assert found[name][0] == kind
        np.testing.assert_allclose(found[name][1][: len(values)], np.array(values, dtype=float), rtol=1e-3)


TABLE = lines_of(HEADER, *rows_of())
NUMBERS = [str(number) for number in range(19)]


@pytest.mark.parametrize(
    ("suffix", "content", "sentence"),
    [
        (
            "csv",
            lines_of(TABLE, rows_of()[3][:-3] + "even"),
            "metadata.csv names 03.png again: remove one of its two rows",
        ),
        (
            "csv",
            cells("size", [*NUMBERS, "tall"]),
            "'tall' for the picture 19.png: correct this value, or pass size=label",
        ),
        ("csv", cells("size", [*NUMBERS, "4e38"]), "'4e38' for the picture 19.png"),
        ("csv", cells("size", ['"1,234"', "12"]), "has numbers, but '1,234' for the picture 00.png"),
        ("csv", cells("size", ['"1,234.5"']), "'1,234.5' for the picture"),
        ("csv", cells("size", ["1'234.5"]), "for the picture 00.png"),
        ("csv", cells("size", ["3"], "|"), "the first line has no column file_name between commas, semicolons or tabs"),
        ("csv", "", "has no column file_name"),
        (
            "csv",
            "file_name,size\n,1",
            "1 of the file_names in metadata.csv name no picture that is read, such as : write paths relative to it",
        ),
        ("csv", cells("text", ["a,more"]), "(row 1: it has more values than the header"),
        ("csv", cells("text", ['"a']), "metadata.csv cannot be read (row 1: "),
        ("csv", cells("text", ["gr\xfcn"]).encode("cp1252"), "not encoded as UTF-8, but perhaps as Windows-1252"),
        ("csv", cells("text", ["a"]).encode("utf-16-le"), "is not encoded as UTF-8"),
        ("csv", TABLE.replace("\n", "\nelsewhere/"), "metadata.csv name no picture that is read, such as elsewhere/00"),
        ("jsonl", jsonl("["), "metadata.jsonl cannot be read (row 1: "),
        ("jsonl", jsonl("[[]]"), "finds no suitable column in pictures: its columns are a"),
        ("jsonl", "[1, 2]", "metadata.jsonl cannot be read (row 1: "),
        ("jsonl", jsonl("[" * 100_000), "metadata.jsonl cannot be read (row 1: it is nested too deeply): correct it"),
        ("jsonl", "{}", "metadata.jsonl name no picture that is read, such as None: write paths"),
    ],
)
def test_bad_metadata_is_named(folder: Path, suffix: str, content: str | bytes, sentence: str) -> None:
    (folder / f"metadata.{suffix}").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=re.escape(sentence)):
        opened(folder)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("meta", "`condition_on` meta has no values (texts, numbers or lists of texts)"),
        ("empty", "`condition_on` empty has no values"),
        ("colour", "`condition_on` colour does not exist in pictures: its columns are size, meta, empty, text"),
        ("size size=colour", "`condition_on` size=colour is not a type: pass "),
        ("text text=number", "`condition_on` text has numbers, but 'a' for the picture 00.png"),
        ("all=label", "`condition_on` all takes no type: pass all, and NAME=label for single columns"),
        ("all colour=label", "`condition_on` colour does not exist in pictures"),
        ("size number number!", "`condition_on` number!: another column is number, too; rename one of them"),
    ],
)
def test_flags_that_do_not_suit_the_columns(folder: Path, flags: str, sentence: str) -> None:
    row = {"file_name": "00.png", "size": 1, "meta": {"b": 1}, "empty": "", "text": "a"}
    row |= {"number": 1, "number!": 2} if "!" in flags else {}
    (folder / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match=re.escape(sentence)):
        opened(folder, *flags.split())
    with pytest.raises(UsageError, match="`text_encoder` has no effect: no column"):
        opened(folder, "size", text_encoder="any")


def test_metadata_that_is_no_file(folder: Path) -> None:
    with pytest.raises(UsageError, match="text does not exist in pictures: its columns are none; write a metadata"):
        opened(folder, "text")
    os.mkfifo(folder / "metadata.csv")
    with pytest.raises(UsageError, match=r"metadata\.csv cannot be read .*not a regular file"):
        opened(folder, "text")


def test_flowers_have_a_known_size() -> None:
    """The share of pixels unlike the background grows with the radius in the table."""
    flowers = SyntheticFlowers(64, count=240)
    columns, daisies = flowers.read_table(), range(0, 240, 12)
    areas = [(np.asarray(flowers.load(index)[0]).min(axis=2) > 150).mean() for index in daisies]  # white petals
    assert np.corrcoef([columns["size"][index] for index in daisies], areas)[0, 1] > 0.8
    assert columns["petals"][0] == 13
    assert columns["text"][0] == ["a white daisy", "a white flower with 13 petals"]
    [text] = choose_columns(columns, {str(index): index for index in range(240)}, ["text"], flowers.name)
    assert text.kind is Caption  # although there are only 24 different texts


def test_a_dataset_has_the_same_columns(tmp_path: Path) -> None:
    """Columns of datasets: names of classes, numbers, texts, and None where there is nothing."""
    import datasets

    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    columns |= {"age": datasets.Value("float32"), "text": datasets.Value("string")}
    rows = {
        "image": [Image.new("RGB", (8, 8), (10 * i, 0, 0)) for i in range(COUNT)],
        "label": [i % 2 for i in range(COUNT)],
        "age": [None if i == 4 else float(i) for i in range(COUNT)],
        "text": [f"a picture of number {i}" for i in range(COUNT)],
    }
    features = datasets.Features(columns)
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    saved = Pictures(dataset_path=tmp_path / "saved", image_size=8, cache_dir=tmp_path / "cache")
    dataset = PictureData(saved, Columns(("label", "age", "text"))).open()
    assert dataset.conditions["label"] == Labels(2, ("cat", "dog"))
    batch = dataset.read_batch([3, 4])
    assert batch["label"].tolist() == [1, 0]
    assert batch["age"][0] == 3
    assert batch["age"][1].isnan()
    assert dataset.condition_texts([4]) == {"label": ["cat"], "age": [""], "text": ["a picture of number 4"]}


def test_odd_metadata_files(folder: Path) -> None:
    """Windows paths, another Unicode normalisation, halves of characters, line separators in texts, hidden files."""
    Image.new("RGB", (8, 8), (5, 5, 5)).save(folder / "caf\u00e9.png")
    lines = [{"file_name": f".\\{i:02}.png", "text": f"one\u2028two {i} \ud83d"} for i in range(COUNT)]
    lines.append({"file_name": "cafe\u0301.png", "text": "a caf\u00e9"})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / ".hidden").mkdir()
    (folder / ".hidden/metadata.csv").write_text("broken")
    pictures = opened(folder, "text")
    assert pictures.condition_texts([20])["text"] == ["a caf\u00e9"]
    assert pictures.condition_texts([3])["text"] == ["one\u2028two 3 ?"]


def test_all_leaves_out_what_suits_no_condition(folder: Path) -> None:
    row = {"box": [1, 2], "empty": None, "meta": {"a": 1}, "missing": "NA"}
    lines = [{"file_name": f"{i:02}.png", "text": f"a thing {i}", "id": f"x{i}", **row} for i in range(COUNT)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(opened(folder).conditions) == ["text"]
    assert list(opened(folder, "id").conditions) == ["id"], "if it is named"
