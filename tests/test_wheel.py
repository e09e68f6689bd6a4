"""Tests of the package as it is delivered: the wheel, its programs outside of the repository, and a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rectified_flow.cli.training_flags import STARTERS
from rectified_flow.system.artifact import find_damage

ROOT = Path(__file__).resolve().parent.parent
TINY = "--image_size 16 --dim 16 --dim_mults 1 2 --batch_size 4 --num_samples 4 --sample_steps 2 --save_every 2"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in this environment: an isolated one would download the builder."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE", "rectified_flow"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", build, folder], cwd=source, check=True, capture_output=True)
    [built] = folder.glob("*.whl")
    return built


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "rectified_flow"], cwd=ROOT, check=True, capture_output=True, text=True)
    kept = set(listed.stdout.split())
    if not kept:
        pytest.skip("not a checkout")
    assert kept == {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("rectified_flow/")}


@pytest.mark.slow
def test_it_trains_draws_and_exports_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """Unpacked into an environment that has the requirements, and not this checkout."""
    installed, work = tmp_path / "installed", tmp_path / "work"
    zipfile.ZipFile(wheel).extractall(installed)
    work.mkdir()

    def command(words: str) -> None:
        program = f"""
import rectified_flow
from rectified_flow.cli import programs

assert rectified_flow.__file__.startswith({str(installed)!r})
programs.main()
"""
        variables = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
        subprocess.run([sys.executable, "-c", program, *words.split()], cwd=work, env=variables, check=True)

    command(f"train --dataset synthetic-flowers {TINY} --train_num_steps 2 --output_dir run")
    command(f"one-step --teacher run --teacher_samples 8 {TINY} --train_num_steps 2 --output_dir map")
    command("sample --checkpoint run --num_samples 2 --steps 2")
    command("evaluate --checkpoint run --feature_network efficientnet_lite0 --num_samples 4 --steps 2")
    command("export --checkpoint map --format page")
    assert (work / "map" / "exported" / "index.html").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_with_line_ends_of_windows_has_the_committed_bytes(tmp_path: Path) -> None:
    """A changed byte of a starter would end every run that begins at it, and bash refuses a carriage return."""
    shutil.copytree(STARTERS, tmp_path / STARTERS.relative_to(ROOT))
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    for words in ("init", "add .", "checkout-index --all --prefix=checkout/"):
        subprocess.run(
            ["git", "-c", "core.autocrlf=true", *words.split()], cwd=tmp_path, check=True, capture_output=True
        )
    checkout = tmp_path / "checkout"
    steps = [*(checkout / STARTERS.relative_to(ROOT)).glob("*/step_*")]
    assert len(steps) > 1
    assert {step: find_damage(step) for step in steps} == dict.fromkeys(steps)
    for script in (checkout / "scripts").glob("*.sh"):
        assert b"\r" not in script.read_bytes()
