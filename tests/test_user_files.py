"""No program removes or changes a file that the project did not write, in whichever folder a flag names."""

from pathlib import Path

import pytest
from PIL import Image

from tests.programs import program
from tests.ranks import run_on_ranks

TINY = "--image_size 8 --dim 8 --dim_mults 1 --batch_size 2 --sample_steps 1 --num_samples 1"
TRAIN = f"--dataset_path {{pictures}} {TINY} --train_num_steps 1 --holdout 0"
OURS = (
    *("config.json", "status.json", "metrics.jsonl", "metrics.old.jsonl", "bad_steps.jsonl", "loss.png", "look.png"),
    *("evaluations.jsonl", "evaluations.png", "evaluation.json", "evaluation.png", "neighbours.png", "best"),
    *("index.html", "style.css", "model.json", "model.onnx", "model.pt2", "model.safetensors", "README.md"),
    *("0.png", "00000.png", "000000.png", "grid.png", "path.png", "path.gif", "manifest.json", "building.json"),
    *("info.json", "labels.npy", "recipe.json", "images.uint8", "starts.uint64", ".lock", "pairs.lock", "text.lock"),
)
"""Names of files that programs write."""
FOLDERS = ("samples", "generated", "exported", "checkpoints/step_00000001", "step_00000001", "pairs", "paths", ".git")
FOLDERS_OF_USERS = ("features-of-my-thesis", "F.building", "F.removing")


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
    named += [path for path in places if path.parent in (folder, *named) and f"holds {path.name}" in text]
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
        ("train_oxford.py", f"{TRAIN} --output_dir {{folder}}"),
        ("train_oxford.py", f"{TRAIN} --output_dir {{folder}} --look"),
        ("train_oxford.py", f"{TRAIN} --output_dir {{new}} --checkpoint_dir {{folder}}"),
        ("train_oxford.py", f"{TRAIN} --output_dir {{new}} --cache_dir {{folder}}"),
        (
            "train_oxford.py",
            "--batch_size 2 --num_samples 0 --train_num_steps 1 --reflow_from {trained} --reflow_pairs 2 "
            "--reflow_steps 1 --output_dir {new} --pairs_dir {folder}",
        ),
        (
            "train_mean_flow.py",
            "--batch_size 2 --num_samples 0 --train_num_steps 1 --teacher {trained} --teacher_paths 2 "
            "--teacher_steps 1 --output_dir {new} --paths_dir {folder}",
        ),
        ("sample.py", "--checkpoint {trained} --num_samples 2 --steps 1 --path gif --output_dir {folder}"),
        ("sample.py", "--checkpoint {trained} --num_samples 2 --steps 1 --output_dir {new} --save_pretrained {folder}"),
        (
            "evaluate.py",
            "--checkpoint {trained} --num_samples 2 --steps 1 --feature_network efficientnet_lite0 "
            "--output_dir {folder}",
        ),
        ("export.py", "--checkpoint {trained} --format torch --output_dir {folder}"),
        ("export.py", "--checkpoint {trained} --format page --output_dir {folder}"),
    ],
)
def test_every_byte_of_the_users_stays(script: str, words: str, trained: Path, pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    files = fill(folder)
    call = words.format(folder=folder, new=tmp_path / "new", trained=trained, pictures=pictures).split()
    for _ in range(len(files)):
        [(code, text)] = run_on_ranks(1, program, script, call)
        assert unchanged(files) == []
        assert "Traceback" not in text
        if code == 0:
            return
        assert code == 2, text
        move_away(offender(text, files, folder), files)
    raise AssertionError(text)
