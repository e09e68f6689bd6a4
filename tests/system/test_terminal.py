"""Tests of the lines that a program prints, and of the streams to which it prints them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rectified_flow.errors import quoted
from rectified_flow.system.terminal import line, shown, spelling_arguments


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("`seed` 3 is no `size`", "-s seed 3 is no -s size"),
        ("pass a number (`seed`), or `size`.", "pass a number (-s seed), or -s size."),
        ("`seed`: `size`; `seed`", "-s seed: -s size; -s seed"),
    ],
)
def test_a_program_spells_the_arguments_of_a_message(message: str, printed: str) -> None:
    with spelling_arguments("-s {}".format):
        assert shown(message) == printed
        assert line("note", message) == f"note        {printed}"
    assert shown(message) == message


@pytest.mark.parametrize(
    "file", ["`seed`.png", "a`seed`", "/all/`seed`", "/all/`seed`/1.png", "--seed", "`my seed`", "``", "`Seed`", "`"]
)
def test_the_name_of_a_file_is_printed_as_it_is(file: str) -> None:
    with spelling_arguments("-s {}".format):
        assert shown(f"`seed` {file} is no file: {file}") == f"-s seed {file} is no file: {file}"


def test_a_program_inside_another_spells_for_itself() -> None:
    with spelling_arguments("outer {}".format):
        with spelling_arguments("inner {}".format):
            assert shown("`seed`") == "inner seed"
        assert shown("`seed`") == "outer seed"


def test_an_argument_in_a_message_is_in_backticks_and_its_value_is_not() -> None:
    assert [quoted("seed"), quoted("path a `b` c")] == ["`seed`", "`path` a `b` c"]


PRINTING = """
import os
from rectified_flow.system.terminal import prepare_streams
prepare_streams()
print("one line")
os._exit(0)  # as a kill, nothing is flushed
"""


def test_a_file_has_each_line_of_a_program_that_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("wb") as log:
        subprocess.run([sys.executable, "-c", PRINTING], stdout=log, check=True)
    assert (tmp_path / "log.txt").read_text() == "one line\n"


WITHOUT_STREAMS = """
import os, sys
from rectified_flow.system.terminal import prepare_streams, progress_bar
prepare_streams()
with open("file", "wb", buffering=0) as file:
    print("a line")
    print("a line", file=sys.stderr)
    list(progress_bar(iterable=range(2)))
    for descriptor in (1, 2):
        os.write(descriptor, b"a line")
    file.write(b"content")
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_takes_nothing_and_no_file_takes_its_place(closed: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", WITHOUT_STREAMS]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=variables, check=False, capture_output=True)
    assert (done.returncode, (tmp_path / "file").read_bytes()) == (0, b"content"), done.stderr


def test_a_reader_that_leaves_after_a_line_ends_no_program() -> None:
    """``rectified-flow --help | head -1``: no error is printed, and the exit code is that of a success."""
    end, start = os.pipe()
    os.close(end)
    done = subprocess.run(
        [sys.executable, "-m", "rectified_flow", "--help"], stdout=start, stderr=subprocess.PIPE, check=False
    )
    os.close(start)
    assert (done.returncode, done.stderr) == (0, b"")
