"""Output that cannot be encoded, written or shown does not stop a program, and missing streams get no other file."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rectified_flow.system.terminal import open_missing_streams, tolerant_streams
from tests.patience import PATIENCE
from tests.programs import PROGRAMS
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --batch_size 8 --num_samples 2 "
    "--sample_steps 1 --train_num_steps 2 --log_every 1 --output_dir"
)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_lacks_is_escaped_and_the_rest_is_printed(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    with tolerant_streams():
        print("runs/\u82b1/caf\u00e9")
        print("a name that is not UTF-8: \udce9")
        print("the end")
    lines = written.getvalue().decode(encoding).splitlines()
    expected = "runs/\u82b1/caf\u00e9".encode(encoding, "backslashreplace").decode(encoding)
    assert lines == [expected, "a name that is not UTF-8: \\udce9", "the end"]


def test_a_mistake_in_printing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strict(io.StringIO):
        def write(self, text: str) -> int:
            raise UnicodeEncodeError("ascii", text, 0, 1, "no such character")

    monkeypatch.setattr(sys, "stdout", Strict())
    with pytest.raises(UnicodeEncodeError), tolerant_streams():
        print("a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_output_goes_on_when_a_full_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full, (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", full)
        with tolerant_streams():
            print("lost or late", flush=True)
            os.dup2(log.fileno(), full.fileno())
            print("kept", flush=True)
    assert (tmp_path / "log").read_text().endswith("kept\n")


def test_a_full_disk_at_the_end_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with tolerant_streams():
            print("lost")
        full.flush()


def without_streams(name: str, flags: list[str]) -> tuple[object, list[bool]]:
    """The exit code of a program that starts with closed streams, and whether the null device is in their place."""
    sys.stdin = sys.stdout = sys.stderr = None
    for descriptor in range(3):
        os.close(descriptor)
    sys.argv = [name, *flags]
    with pytest.raises(SystemExit) as end:
        PROGRAMS[name]()
    null = os.stat(os.devnull).st_rdev
    return end.value.code or 0, [os.fstat(descriptor).st_rdev == null for descriptor in range(3)]


def test_a_program_without_streams_works_and_no_file_takes_their_place(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    drawing = ["--checkpoint", run, "--num_samples", "2", "--steps", "1"]
    for name, flags, code in (
        ("train_oxford.py", [*TINY.split(), run], 0),
        ("sample.py", drawing, 0),
        ("sample.py", [*drawing, "--classes", "cat"], 2),
    ):
        assert run_on_ranks(1, without_streams, name, flags) == [(code, [True] * 3)]
    assert (tmp_path / "run/generated/00001.png").exists()


@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("--sede 1", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_shell_that_closes_streams(words: str, code: int, closed: str) -> None:
    command = f'"$0" "$1" {words} {closed}'
    script = str(ROOT / "evaluate.py")
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, script], capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def read_a_missing_stream() -> tuple[str, bool]:
    sys.stdin = sys.stdout = None
    os.close(0)
    os.close(1)
    open_missing_streams()
    print("nowhere")
    return input_left(), os.get_inheritable(1)


def input_left() -> str:
    return str(sys.stdin.read())


def test_a_missing_stream_is_empty_and_goes_on_to_children() -> None:
    assert run_on_ranks(1, read_a_missing_stream) == [("", True)]
