"""Tests of documents that are read with the types they were written with."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from rectified_flow.errors import DamageError, NewerError
from rectified_flow.system.files import misfit, parse_document, read_document


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Document:
    step: int
    kind: Literal["a", "b"] = "a"
    parts: dict[str, Part] = field(default_factory=dict)
    place: Path | None = None
    sides: tuple[int, ...] = ()
    share: float = 0.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("null", "is damaged: it is null, but input should be an object"),
        ("[]", "is damaged: it is [], but"),
        ("{}", "is damaged: the key 'step' is missing"),
        ('{"step": "6"}', 'is damaged: step is "6", but input should be a valid integer'),
        ('{"step": 6.5}', "step is 6.5"),
        ('{"step": true}', "step is true"),
        ('{"step": NaN}', "step is NaN"),
        ('{"step": 1, "share": "0.5"}', "share is"),
        ('{"step": 1, "kind": "c"}', 'is damaged: kind is "c", but input'),
        ('{"step": 1, "parts": []}', "parts is []"),
        ('{"step": 1, "parts": {"x": {"size": null}}}', "parts.x.size is null"),
        ('{"step": 1, "sides": [1, "2"]}', 'sides.1 is "2"'),
        ('{"step": 1, "place": 3}', "place is 3"),
        ('{"step": "' + 1000 * "x" + '"}', "xxx..., but"),
        ("{", "cannot be read (Invalid JSON: "),
        ("", "cannot be read (Invalid JSON: "),
        (100_000 * "[", "cannot be read (Invalid JSON: recursion"),
        ('{"step": ' + 5000 * "9" + "}", "cannot be read (Invalid JSON: number out of range"),
        (b"\xff\xfe{}", "cannot be read (Invalid JSON: "),
        (b'{"step": 1, "place": "\xff"}', "cannot be read (Invalid JSON: "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_document_that_does_not_fit(tmp_path: Path, text: str | bytes, words: str) -> None:
    path = tmp_path / "document.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamageError) as refused:
        read_document(path, Document)
    sentence = str(refused.value)
    assert sentence.startswith(f"{path} ")
    assert words in sentence
    assert len(sentence) < len(str(path)) + 200
    assert "\n" not in sentence


def test_a_document_that_fits() -> None:
    text = '{"step": 3, "kind": "b", "parts": {"x": {"size": 1}}, "place": "/a", "sides": [1, 2], "share": 1}'
    expected = Document(3, "b", {"x": Part(1)}, Path("/a"), (1, 2), 1.0)
    assert parse_document(text, Document, "a text") == expected


@pytest.mark.parametrize("document", [{"step": 1, "later": 2}, {"step": "1", "parts": {"x": {"size": 1, "later": 2}}}])
def test_a_key_of_a_newer_version(document: dict[str, Any]) -> None:
    with pytest.raises(
        NewerError, match=r"^the text was written by a newer version .* 'parts.x.later'|'later'.*: upgrade"
    ):
        parse_document(json.dumps(document), Document, "the text")


def test_values_that_are_no_documents() -> None:
    assert misfit((1, 2), tuple[int, ...] | None) is None
    assert misfit(Part(1), Part) is None
    assert misfit(1, float) is None
    assert misfit("1", int) == '"1", but input should be a valid integer'
    assert misfit(float("nan"), float) == "NaN, but input should be a finite number"
    assert "but input should be an instance of Path" in (misfit(Part(1), Path) or "")
