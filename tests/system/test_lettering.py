"""Tests of texts in pictures: letters of any script, lines that fit, and an end of texts that are too long."""

import numpy as np
import pytest

from rectified_flow.system.lettering import default_font, has_letter, lettering, text_picture, wrapped

SIZE = 11


@pytest.mark.parametrize("text", ["fleur d'été, Łódź, 2 °C", "кошка", "γάτα", "חתול", "قطة"])
def test_scripts_of_the_default_font_are_drawn_as_they_are(text: str) -> None:
    assert lettering(text, SIZE) == (text, default_font(SIZE))


def test_a_letter_that_no_font_has_is_drawn_as_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rectified_flow.system.lettering.SYSTEM_FONTS", ())
    assert lettering("cat \u732b", SIZE)[0] == "cat \\u732b"
    cat, dog = (text_picture(text, 100, SIZE, 1) for text in ("\u732b", "\u72ac"))
    assert not cat.equal(dog), "two names never look the same"
    assert lettering("a\x1b[31mb\u202ec", SIZE)[0] == "a\\x1b[31mb\\u202ec"


def test_a_font_of_the_system_is_used_for_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A font of mathematical symbols stands for a font of the system."""
    name = default_font(SIZE).path
    assert isinstance(name, str)
    other, letter = name.replace("DejaVuSans.ttf", "STIXGeneral.ttf"), "\u24b6"
    monkeypatch.setattr("rectified_flow.system.lettering.SYSTEM_FONTS", ("missing.ttf", other))
    known = {number for number in range(0x2100, 0x2C00) if not has_letter(default_font(SIZE), chr(number))}
    letter = next(chr(number) for number in sorted(known) if lettering(chr(number), SIZE)[0] == chr(number))
    text, font = lettering(letter, SIZE)
    assert text == letter
    assert font.path == other


@pytest.mark.parametrize("text", ["one two three four five six", "a" * 90, "\u732b" * 20, "a b\nc", ""])
def test_lines_fit_and_keep_every_letter(text: str) -> None:
    lines, font = wrapped(text, 60, SIZE)
    assert all(font.getlength(line) <= 60 for line in lines)
    assert "".join("".join(lines).split()) == "".join(lettering(text, SIZE)[0].split())
    assert "two three" not in lines[0]


def test_a_text_that_is_too_long_ends_in_dots() -> None:
    long, short = (np.asarray(text_picture(text, 60, SIZE, 2)) for text in ("word " * 20, "word word"))
    assert long.shape == short.shape == (3, 28, 60)
    assert long[:, 14:].min() < 100, "its second line is not empty"
    assert text_picture("word " * 20, 60, SIZE).shape[1] > 100, "all lines without a limit"
