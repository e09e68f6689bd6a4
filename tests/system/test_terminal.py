"""Lines that are printed, whatever they hold and whatever the terminal can show."""

import io
import sys

import pytest

from rectified_flow.system.terminal import escape_unencodable, escaped


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    escape_unencodable()
    print("runs/\u82b1/caf\u00e9, not UTF-8: \udce9", flush=True)
    expected = "runs/\u82b1/caf\u00e9, not UTF-8: \udce9\n".encode(encoding, "backslashreplace")
    assert written.getvalue() == expected


def test_characters_that_control_a_terminal_are_escaped() -> None:
    assert escaped("a\tb\nc\x1b[31m\u202ed") == "a\tb\nc\\x1b[31m\\u202ed"
