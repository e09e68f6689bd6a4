"""Columns beside pictures: their kinds, gaps and captions; and bad metadata."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rectified_flow.cli.data import add_columns
from rectified_flow.cli.flags.data import ColumnConfig
from rectified_flow.condition import Labels, Number
from rectified_flow.data.metadata import choose_columns, condition_name
from rectified_flow.data.open import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.networks.captions import Caption
from tests.networks.tiny_encoder import write_encoder

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
    return add_columns(pictures, ColumnConfig(condition_on=names or ("all",), **flags))  # type: ignore[arg-type]


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
    assert "captions, 20 different" in printed
    assert "number, 0 to 1.9, 20 different" in printed
    assert "2 labels: even 10, odd 10" in printed
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
    assert "2 pictures have no row in the metadata, such as 18.png" in printed
    assert "1 rows of the metadata name no picture in the folder, such as 99.png" in printed


def test_one_of_several_captions_in_each_epoch(folder: Path) -> None:
    lines = [{"file_name": f"{i:02}.png", "text": [f"one {i}", f"two {i}", f"three {i}"]} for i in range(COUNT)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    pictures = opened(folder, "text")
    assert pictures.varies
    drawn = [pictures.condition_texts([4 + COUNT * epoch])["text"][0] for epoch in range(40)]
    assert set(drawn) == {"one 4", "two 4", "three 4"}
    again = [pictures.condition_texts([4 + COUNT * epoch])["text"][0] for epoch in range(40)]
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
    again = opened(folder, "text", text_encoder=encoder, text_tokens=5)
    assert torch.equal(again.read_batch([7, 2])["text"].nan_to_num(), values.nan_to_num())
    assert first.fingerprint == again.fingerprint


def test_the_fingerprint_is_that_of_the_values(folder: Path) -> None:
    first = opened(folder, "size", rows=rows_of()).fingerprint
    assert opened(folder, "size").fingerprint == first
    assert opened(folder, "parity").fingerprint != first
    assert opened(folder, "size", rows=[*rows_of(19), "19.png,a,5,odd"]).fingerprint != first


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("Unicode version", "Unicode_version"),
        ("x", "x_column"),
        ("kind", "kind_column"),
        ("2nd", "2nd_column"),
        ("é!", "é"),
    ],
)
def test_names_of_conditions_fit_the_network(column: str, name: str) -> None:
    assert condition_name(column) == name
    assert name.isidentifier() or name == "2nd_column"


@pytest.mark.parametrize(
    ("change", "flags", "sentence"),
    [
        (lambda rows: [*rows, rows[3]], {}, "row 21 of metadata.csv names 03.png again, after row 4"),
        (
            lambda rows: [*rows[:11], rows[11].replace("1.1", "tall"), *rows[12:]],
            {},
            "row 12 of metadata.csv has 'tall'",
        ),
        (
            lambda rows: [*rows[:5], rows[5].replace("a picture", "x" * 100_000), *rows[6:]],
            {},
            "100,012 characters in row 6",
        ),
        (lambda rows: [f"{row},more" for row in rows], {}, "row 1 has more values than the header"),
        (
            lambda rows: rows,
            {"condition_types": ("size=colour",)},
            "size=colour is no type: pass caption, label, number",
        ),
        (
            lambda rows: rows,
            {"condition_types": ("text=number",)},
            "--condition_on text has numbers, but row 1 of metadata.csv has 'a picture",
        ),
        (lambda rows: rows, {"condition_types": ("shape=label",)}, "--condition_types shape does not exist"),
    ],
)
def test_bad_metadata_is_named(folder: Path, change: object, flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        opened(folder, rows=change(rows_of()), **flags)  # type: ignore[operator]
    assert sentence in str(refusal.value)


def test_columns_that_are_not_there(folder: Path) -> None:
    with pytest.raises(UsageError, match="needs columns, and pictures has none: write a metadata"):
        opened(folder, "text")
    with pytest.raises(UsageError, match="--condition_on colour does not exist in pictures: pass text, size, parity"):
        opened(folder, "colour", rows=rows_of())
    with pytest.raises(UsageError, match="--condition_on parity is empty in all rows"):
        opened(folder, "parity", rows=[row.rsplit(",", 1)[0] + "," for row in rows_of()])
    with pytest.raises(UsageError, match="--text_encoder has no effect: no column"):
        opened(folder, "size", text_encoder="anything")
    (folder / "metadata.csv").write_text("name,size\n00.png,1")
    with pytest.raises(UsageError, match=r"row 1 of metadata\.csv has no file_name"):
        opened(folder)
    (folder / "metadata.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"metadata\.csv cannot be read"):
        opened(folder)


def test_flowers_have_a_known_size() -> None:
    """The share of pixels unlike the background grows with the radius in the table."""
    from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers

    flowers = SyntheticFlowers(64, count=240)
    table = flowers.read_table()
    chosen = range(0, 240, 12)  # daisies
    areas = []
    for index in chosen:
        pixels = np.asarray(flowers.load(index)[0]).astype(float)
        areas.append((pixels.min(axis=2) > 150).mean())  # white petals
    sizes = [table.read("size")[index][0] for index in chosen]
    assert np.corrcoef(sizes, areas)[0, 1] > 0.8
    assert table.read("petals")[0][0] == 13
    assert table.read("text")[0][0] == ["a white daisy", "a white flower with 13 petals"]
    [text] = choose_columns(table, ["text"], {}, flowers.name)
    assert text.kind == "caption"  # although there are only 24 different texts


def test_a_dataset_has_the_same_columns(tmp_path: Path) -> None:
    """Columns of datasets: names of classes, numbers, texts, and None where there is nothing."""
    import datasets

    pictures = [Image.new("RGB", (8, 8), (10 * i, 0, 0)) for i in range(COUNT)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "age": datasets.Value("float32"),
            "text": datasets.Value("string"),
        }
    )
    rows = {
        "image": pictures,
        "label": [i % 2 for i in range(COUNT)],
        "age": [None if i == 4 else float(i) for i in range(COUNT)],
        "text": [f"a picture of number {i}" for i in range(COUNT)],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    opened_again = open_dataset("", tmp_path / "saved", image_size=8, cache_dir=tmp_path / "cache")
    dataset = add_columns(opened_again, ColumnConfig(condition_on=("label", "age", "text")))
    assert dataset.conditions["label"] == Labels(2, ("cat", "dog"))
    batch = dataset.read_batch([3, 4])
    assert batch["label"].tolist() == [1, 0]
    assert batch["age"][0] == 3
    assert batch["age"][1].isnan()
    assert dataset.condition_texts([4]) == {"label": ["cat"], "age": [""], "text": ["a picture of number 4"]}


def test_encoding_resumes_after_a_kill(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of finished blocks are not encoded again."""
    encoder, encode, encoded = str(write_encoder(tmp_path / "encoder")), Caption.encode, list[str]()
    monkeypatch.setattr("rectified_flow.data.captions.TEXTS_AT_ONCE", 4)

    def until(limit: int, kind: Caption, texts: list[str]) -> torch.Tensor:
        if len(encoded) == limit:
            raise KeyboardInterrupt
        encoded.extend(texts)
        return encode(kind, texts)

    monkeypatch.setattr(Caption, "encode", lambda *arguments: until(12, *arguments))
    with pytest.raises(KeyboardInterrupt):
        opened(folder, "text", rows=rows_of(), text_encoder=encoder)
    killed = list(encoded)
    encoded.clear()
    monkeypatch.setattr(Caption, "encode", lambda *arguments: until(COUNT, *arguments))
    pictures = opened(folder, "text", text_encoder=encoder)
    assert killed + encoded == [f"a picture of number {i}" for i in range(COUNT)]
    monkeypatch.undo()
    kind = pictures.columns["text"].kind
    values = pictures.read_batch(range(COUNT))["text"]
    torch.testing.assert_close(values, kind.parse(killed + encoded).half())


def test_a_caption_without_known_words_is_none_in_training(folder: Path) -> None:
    rows = rows_of()
    rows[4] = rows[4].replace("a picture of number 4", "!!!")
    pictures = opened(folder, "text", rows=rows)
    values = pictures.read_batch([4, 5])["text"]
    assert values[0].isnan().all()
    assert values[1].isfinite().all()


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


def test_rows_that_name_no_picture_at_all(folder: Path) -> None:
    with pytest.raises(UsageError, match="names a picture in the folder, such as elsewhere/00"):
        opened(folder, rows=[f"elsewhere/{row}" for row in rows_of()])


def test_all_leaves_out_what_suits_no_condition(folder: Path) -> None:
    lines = [
        {
            "file_name": f"{i:02}.png",
            "text": f"a thing {i}",
            "id": f"x{i}",
            "box": [1, i],
            "empty": None,
            "meta": {"a": i},
        }
        for i in range(COUNT)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert list(opened(folder).conditions) == ["text"]
    assert list(opened(folder, "id").conditions) == ["id"], "if it is named"


def test_numbers_that_float32_does_not_hold_are_none(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"row 3 of metadata\.csv has '4e38'"):
        opened(folder, "size", rows=[row.replace(",0.2,", ",4e38,") for row in rows_of()])


def test_a_moved_encoder_is_the_same_data(folder: Path, tmp_path: Path) -> None:
    first = opened(folder, "text", rows=rows_of(), text_encoder=str(write_encoder(tmp_path / "one")))
    second = opened(folder, "text", text_encoder=str(write_encoder(tmp_path / "two")))
    assert first.fingerprint == second.fingerprint
