"""Tests that no program removes or changes a file of a user, in whichever folder a flag names."""

import ctypes
import os
import runpy
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from rectified_flow.system.artifact import OUTPUTS_MANIFEST, claimed_names
from tests.programs import assert_refused, program, quick_program
from tests.ranks import run_on_ranks

TINY = "--image_size 8 --dim 8 --dim_mults 1 --batch_size 2 --sample_steps 1 --num_samples 1"
TRAIN = f"--dataset_path {{pictures}} {TINY} --train_num_steps 1 --holdout 0"
SMALL = "--width 32 --layers 1 --train_num_steps 1 --batch_size 4"
TEXT = f"--text {{text}} --vocabulary 40 --length 8 --measured_lines 20 --measure_every 1 {SMALL}"
CLOUDS = f"--points 10 {SMALL}"
OURS = (
    *("config.json", "status.json", "metrics.jsonl", "metrics.old.jsonl", "bad_steps.jsonl", "loss.png", "data.png"),
    *("evaluations.jsonl", "evaluations.png", "evaluation.json", "evaluation.png", "neighbours.png", "best"),
    *("index.html", "style.css", "model.json", "model.onnx", "model.onnx", "model.safetensors", "README.md"),
    *("0.png", "00000.png", "000000.png", "grid.png", "manifest.json"),
    *("info.json", "labels.npy", "recipe.json", "images.uint8", "starts.uint64", "steps.png", ".tmpabcdef", "lora"),
    *(".manifest.json", ".manifest.lock", ".run.lock", ".samples.lock", ".evaluation.lock", ".pairs.lock"),
    *("tokenizer.json", "accuracy.jsonl", "accuracy.png", "distances.jsonl", "distances.png", "clouds.png"),
)
"""Names of files that programs write."""
FOLDERS = ("samples", "generated", "exported", "checkpoints/step_00000001", "step_00000001", "pairs", "paths", ".git")


TEACHER = "--batch_size 2 --num_samples 0 --train_num_steps 1 --teacher {trained} --teacher_samples 2 --teacher_steps 1"
WRITERS = {
    "train_oxford.py": (TRAIN, "output_dir"),
    "train_oxford.py, store": (f"{TRAIN} --output_dir {{tmp}}/new", "cache_dir"),
    "train_mean_flow.py": (TEACHER, "output_dir"),
    "train_mean_flow.py, paths": (f"{TEACHER} --output_dir {{tmp}}/new", "teacher_dir"),
    "sample.py": ("--checkpoint {trained} --num_samples 2 --steps 1", "output_dir"),
    "sample.py, model": ("--checkpoint {trained} --num_samples 2 --steps 1 --output_dir {tmp}/new", "save_pretrained"),
    "evaluate.py": (
        "--checkpoint {trained} --num_samples 2 --steps 1 --feature_network efficientnet_lite0",
        "output_dir",
    ),
    "export.py": ("--checkpoint {trained}", "output_dir"),
}
"""Programs that write, each with its words and the flag of the folder that it writes into."""


def fill(folder: Path) -> dict[Path, bytes | None]:
    """Put files of a user's into ``folder`` and beside it; returns the content of each, None for a link."""
    folder.mkdir(parents=True)
    files = {folder / name: b"{}" if name.endswith("json") else name.encode() for name in OURS}
    files |= {folder / name / "HEAD": b"a user's" for name in (*FOLDERS, "features-of-my-thesis")}
    files |= {folder.with_name(f"{folder.name}{end}") / "mine.txt": b"mine" for end in (".building", ".removing")}
    files |= {folder / ".hidden": b"", folder / "notes.txt": b"notes"}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    outside = folder.with_name("outside.txt")
    outside.write_bytes(b"behind a link")
    links = (folder / "loss.png.link", folder / "model.onnx.link")
    for link in links:
        link.symlink_to(outside)
    return files | {outside: b"behind a link"} | dict.fromkeys(links)


def unchanged(files: dict[Path, bytes | None]) -> list[Path]:
    """Return the files that are no longer as they were."""
    return [
        path
        for path, content in files.items()
        if (not path.is_symlink() if content is None else not path.is_file() or path.read_bytes() != content)
    ]


def offender(text: str, files: dict[Path, bytes | None], folder: Path) -> Path:
    """Return the file or folder beside or in ``folder`` that the refusal ``text`` names."""
    places = {path for each in files for path in (each, *each.parents) if path.is_relative_to(folder.parent)}
    named = [path for path in places - {folder.parent, folder} if str(path) in text]
    named += [
        path
        for path in places
        if path.parent in (folder, *named) and (f"holds {path.name}" in text or f"contains {path.name}" in text)
    ]
    assert named, f"a refusal that names no file: {text}"
    return max(named, key=lambda path: len(path.parts))


def move_away(path: Path, files: dict[Path, bytes | None]) -> None:
    for each in [each for each in files if each.is_relative_to(path)]:
        each.unlink()
        del files[each]
    for each in sorted(path.rglob("*"), reverse=True) if path.is_dir() else ():
        each.rmdir()
    if path.is_dir():
        path.rmdir()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        Image.new("RGB", (8, 8), (number * 30, 255 - number * 30, 100)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = f"{TRAIN} --output_dir {folder}".format(pictures=pictures)
    assert run_on_ranks(1, program, "train_oxford.py", words.split())[0][0] == 0
    return folder


@pytest.mark.parametrize(
    ("script", "words"),
    [
        *(
            (writer.partition(",")[0], f"{words} --{flag} {{folder}}")
            for writer, (words, flag) in WRITERS.items()
            if writer != "train_mean_flow.py"  # whose own folder is that of any run
        ),
        ("train_oxford.py", f"{TEACHER} --method reflow --output_dir {{tmp}}/new --teacher_dir {{folder}}"),
        ("export.py", "--checkpoint {trained} --format page --output_dir {folder}"),
        ("train_masked_text.py", f"{TEXT} --output_dir {{folder}}"),
        pytest.param("train_point_clouds.py", f"{CLOUDS} --output_dir {{folder}}", marks=pytest.mark.slow),
    ],
)
def test_every_byte_of_the_users_stays(script: str, words: str, trained: Path, pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    files = fill(folder)
    (tmp_path / "lines.txt").write_text("the sun and a sea\n" * 80)
    places = {"trained": trained, "pictures": pictures, "text": tmp_path / "lines.txt"}
    call = words.format(folder=folder, tmp=tmp_path, **places).split()
    for refusals in range(len(files)):
        [(code, text)] = run_on_ranks(1, quick_program, script, call)
        assert unchanged(files) == []
        assert "Traceback" not in text
        if code == 0:
            return
        assert code == 2, text
        move_away(offender(text, files, folder), files)
        if refusals == 5 and "is in the way of" in text:  # it refuses the folder for each entry in turn
            for entry in folder.iterdir():
                move_away(entry, files)
    raise AssertionError(text)


def succeeds(script: str, words: str) -> None:
    [(code, text)] = run_on_ranks(1, quick_program, script, words.split())
    assert code == 0, text


DEFAULTS = {
    "sample.py": "--num_samples 1 --steps 1",
    "evaluate.py": "--num_samples 2 --steps 1 2 --feature_network efficientnet_lite0",
    "export.py": "--format onnx",
}
"""Programs that write beside a checkpoint by default, with their words."""


def test_beside_a_checkpoint_that_was_copied_everything_is_the_users(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "checkpoints/step_00000001", tmp_path / "step_00000001")
    names = ("neighbours.png", "generated/00000.png", "exported/model.onnx")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for script, words in DEFAULTS.items():
        assert_refused(script, 1, f"--checkpoint {tmp_path}/step_00000001 {words}", "this project did not write it")
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * len(names)


@pytest.mark.parametrize("place", ["run/checkpoints", "elsewhere"])
def test_a_run_that_was_copied_without_hidden_files_is_resumed(
    place: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / place
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns(".*"))
    (run / "neighbours.png").write_text("mine")
    words = f"{TRAIN} --output_dir {run} --train_num_steps 2".format(pictures=pictures)
    if place == "elsewhere":
        (run / "checkpoints").rename(checkpoints)
        (checkpoints / "run").write_text(f"{trained}\n")
        words += f" --checkpoint_dir {checkpoints}"
    succeeds("train_oxford.py", words)
    assert (checkpoints / "step_00000002").is_dir()
    listed = claimed_names(run)
    assert {"config.json", "metrics.jsonl", "loss.png", "samples"} <= listed
    assert "neighbours.png" not in listed, "nothing proves that a program wrote it"


@pytest.mark.parametrize("copied", [("config.json",), ("config.json", "status.json"), ("config.json", "checkpoints")])
def test_a_config_that_was_copied_proves_nothing_about_the_files_beside_it(
    copied: tuple[str, ...], trained: Path, pictures: Path, tmp_path: Path
) -> None:
    """A copied config.json makes no run, and it is the user's; nor do checkpoints whose config.json is another."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("loss.png", "metrics.jsonl", "status.json", "config.json"):
        (folder / name).write_text("mine")
    for name in copied:
        copy = shutil.copytree if (trained / name).is_dir() else shutil.copyfile
        copy(trained / name, folder / name)
    if "checkpoints" in copied:  # the user changed the copy
        (folder / "config.json").write_text(f"{(folder / 'config.json').read_text()}\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = f"{TRAIN} --output_dir {folder} --train_num_steps 2".format(pictures=pictures)
    assert_refused("train_oxford.py", 1, words, "config.json would be overwritten, and this project did not write it")
    assert {path: path.read_bytes() for path in before} == before


INSIDE = {
    "sample.py": ("generated", "00000.png", "--num_samples 1 --steps 1"),
    "sample.py, the grid": ("generated", "grid.png", "--num_samples 1 --steps 1"),
    "sample.py, a model": ("model/flow", "pipeline.py", "--num_samples 1 --steps 1 --save_pretrained {run}/model"),
    "export.py": ("exported", "model.json", ""),
    "export.py, a subfolder": ("exported/ort", "LICENSE", "--format page"),
    "evaluate.py": (".", "neighbours.png", DEFAULTS["evaluate.py"]),
}
"""A folder in that of a run, a file of the user's there that a program would write, and the words of the program."""


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("writer", INSIDE)
def test_in_a_run_no_byte_of_the_users_is_overwritten(writer: str, linked: bool, trained: Path, tmp_path: Path) -> None:
    """Put a file of the user there before the first call of a program, or behind a link after the call."""
    script, (place, name, words) = writer.partition(",")[0], INSIDE[writer]
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(trained, run)
    call, folder = f"--checkpoint {run} {words}".format(run=run), run / place
    if not linked:
        mine = folder
    elif place == ".":
        run.rename(mine)
        run.symlink_to(mine)
    else:
        succeeds(script, call)
        shutil.rmtree(folder)
        folder.symlink_to(mine)
    mine.mkdir(parents=True, exist_ok=True)
    (mine / name).write_text("mine")
    assert_refused(script, 1, call, "would be overwritten, and this project did not write it")
    assert (mine / name).read_text() == "mine"


@pytest.mark.parametrize("folder", ["samples", "checkpoints", "."])
def test_a_run_is_resumed_or_refused_beside_files_of_the_users_behind_links(
    folder: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    """The folder was moved to another disk, where the user has files of the names that the run writes."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(trained, run)
    (run / folder).mkdir(exist_ok=True)
    shutil.move(run / folder, elsewhere)
    (elsewhere / OUTPUTS_MANIFEST).unlink(missing_ok=True)
    (run / folder).symlink_to(elsewhere)
    mine = [elsewhere / name for name in ("step_00000002.png", "step_00000003/model.safetensors", "notes.txt")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    words = f"{TRAIN} --output_dir {run} --train_num_steps 2 --save_every 1".format(pictures=pictures)
    [(code, text)] = run_on_ranks(1, quick_program, "train_oxford.py", words.split())
    assert code == 0 or "step_00000003 is in the way of the checkpoint, and holds model.safetensors" in text
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)


def test_no_program_writes_into_a_checkpoint_or_mixes_a_model_with_a_run(
    trained: Path, pictures: Path, tmp_path: Path
) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(trained, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for script, words in DEFAULTS.items():
        place = f"--output_dir {run}/checkpoints/step_00000001"
        assert_refused(script, 1, f"--checkpoint {trained} {words} {place}", "step_00000001 is a checkpoint or another")
    words = f"--checkpoint {trained} --num_samples 1 --steps 1 --output_dir {tmp_path}/drawn --save_pretrained"
    assert_refused("sample.py", 1, f"{words} {run}", f"{run} belongs to a run")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    model.mkdir()
    (model / "README.md").symlink_to(tmp_path / "nowhere")
    succeeds("sample.py", f"{words} {model}")
    assert (model / "README.md").is_symlink()
    description = (model / "config.json").read_bytes()
    words = f"{TRAIN} --output_dir {model}".format(pictures=pictures)
    assert_refused("train_oxford.py", 1, words, "config.json is damaged or does not belong to a run")
    assert (model / "config.json").read_bytes() == description


@pytest.mark.parametrize("target", ["file", "folder", "nowhere", "itself"])
def test_links_of_the_users_stay_and_lead_nowhere_else(target: str, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "folder").mkdir()
    for name in (OUTPUTS_MANIFEST, "config.json", "loss.png", "samples", "metrics.jsonl", "checkpoints"):
        run = tmp_path / f"{name}-run"
        run.mkdir()
        link = run / name
        link.symlink_to(link if target == "itself" else tmp_path / target)
        words = f"{TRAIN} --output_dir {run}".format(pictures=pictures)
        if (name, target) == ("checkpoints", "folder"):
            succeeds("train_oxford.py", words)
        else:
            named = f"--output_dir {link}" if name == "checkpoints" else f"error: {link}"
            assert_refused("train_oxford.py", 1, words, named)
        assert link.is_symlink()
    assert (tmp_path / "file").read_text() == "{}"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "content",
    [*("folder", "pipe", "/dev/zero", "", "[", "[]"), '{"name": "an app"}', '{"kind": "", "files": {"\\ud800": null}}'],
)
def test_a_manifest_that_cannot_be_read_is_a_sentence(
    content: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    """All programs read the manifest with the same function, so most contents are tried with sample.py alone."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "grid.png").write_text("mine")
    record = folder / OUTPUTS_MANIFEST
    match content:
        case "folder":
            record.mkdir()
        case "pipe":
            os.mkfifo(record)
        case "/dev/zero":
            record.symlink_to(content)
        case _:
            record.write_text(content)
    (tmp_path / "lines.txt").write_text("the sun and a sea\n" * 80)
    before = (record.lstat().st_mode, record.lstat().st_ino, record.lstat().st_mtime_ns)
    calls = {
        "train_oxford.py": f"{TRAIN} --output_dir {folder}".format(pictures=pictures),
        "train_masked_text.py": f"{TEXT} --output_dir {folder}".format(text=tmp_path / "lines.txt"),
        "sample.py": f"--checkpoint {trained} {DEFAULTS['sample.py']} --output_dir {folder}",
        "export.py": f"--checkpoint {trained} {DEFAULTS['export.py']} --output_dir {folder}",
    }
    for script in calls if content in ("folder", "[") else ["sample.py"]:
        assert_refused(script, 1, calls[script], f"error: {record}")
    assert (record.lstat().st_mode, record.lstat().st_ino, record.lstat().st_mtime_ns) == before
    assert (folder / "grid.png").read_text() == "mine"
    assert {path.name for path in folder.iterdir()} == {OUTPUTS_MANIFEST, "grid.png"}


def test_a_screenshot_of_a_page_replaces_no_file_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("playwright.sync_api")
    picture = tmp_path / "page.png"
    picture.write_text("mine")
    monkeypatch.setattr(sys, "argv", ["try_page.py", str(tmp_path), "--screenshot", str(picture)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts/try_page.py"), run_name="__main__")
    assert f"error: {picture} would be overwritten" in capsys.readouterr().err
    assert picture.read_text() == "mine"


CLONE_NEWNS = 0x20000
"""Flag of Linux's ``unshare`` for mounts that end with the process."""


def without_rights(script: str, words: list[str]) -> tuple[int, str]:
    """Run a program for which the rights of files count, although root started it."""
    version, capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    assert ctypes.CDLL(None).capset(version, capabilities) == 0
    return quick_program(script, words)


def assert_in_a_sentence(result: tuple[int, str], script: str, place: Path) -> None:
    code, text = result
    assert code in (1, 2), text
    assert "Traceback" not in text
    assert text.count(f"{script}: ") == 1, text
    assert str(place) in text.splitlines()[-1]


@pytest.mark.parametrize("shape", ["a file", "read-only"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_cannot_be_written_is_a_sentence(
    writer: str, shape: str, trained: Path, pictures: Path, tmp_path: Path
) -> None:
    place, script = tmp_path / "place", writer.partition(",")[0]
    mine = place if shape == "a file" else place / "mine.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    mine.parent.chmod(0o755 if shape == "a file" else 0o555)
    words, flag = WRITERS[writer]
    folder = place / "deeper" if flag == "teacher_dir" else place  # which is made as a whole
    call = f"{words} --{flag} {folder}".format(trained=trained, pictures=pictures, tmp=tmp_path).split()
    assert_in_a_sentence(run_on_ranks(1, without_rights, script, call)[0], script, place)
    assert mine.read_text() == "mine"
    assert shape == "a file" or [*place.iterdir()] == [mine]


def on_a_full_disk(script: str, words: list[str], disk: Path, room: int) -> tuple[int, str] | None:
    """Run a program with a disk of 1 MiB that has ``room`` left, and that no other process sees; None without rights.

    A file of the user's, which fills the disk, must stay as it is.
    """
    libc, mine = ctypes.CDLL(None), disk / "mine"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if libc.unshare(CLONE_NEWNS) or subprocess.run(["mount", "--make-rprivate", "/"], check=False).returncode:
        return None
    if subprocess.run(mount, check=False).returncode:
        return None
    mine.write_bytes(b"m" * (shutil.disk_usage(disk).free - room))
    result = quick_program(script, words)
    assert {*mine.read_bytes()} == {ord("m")}
    assert {path.name.strip(".").partition(".")[0] for path in disk.iterdir()} <= {"folder", "mine"}
    assert not list(disk.rglob("*.tmp"))
    return result


@pytest.mark.parametrize("room", [0, 16384])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_a_sentence(writer: str, room: int, trained: Path, pictures: Path, tmp_path: Path) -> None:
    script, disk, (words, flag) = writer.partition(",")[0], tmp_path / "disk", WRITERS[writer]
    call = f"{words} --{flag} {disk}/folder".format(trained=trained, pictures=pictures, tmp=tmp_path).split()
    [result] = run_on_ranks(1, on_a_full_disk, script, call, disk, room)
    if result is None:
        pytest.skip("no disk can be mounted here")
    if result[0] or room == 0:  # else there was room for all
        assert_in_a_sentence(result, script, disk)
