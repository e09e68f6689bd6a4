"""Folders that the program does without: a copy without one trains and samples pictures, labels and numbers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.patience import PATIENCE
from tests.test_architecture import PACKAGE, ROOMS

RUN = "--cache_dir cache --holdout 0 --image_size 8 --dim 8 --dim_mults 1 --batch_size 2"
SHORT = "--train_num_steps 2 --num_samples 2 --sample_steps 1"
PROGRAMS = {
    "train_oxford.py": f"--dataset_path pictures --output_dir run {RUN} {SHORT} --use_cfg --condition_on all",
    "sample.py": "--checkpoint run --num_samples 1 --set size=2 --classes cat",
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_copy_without_the_room_trains_and_samples(room: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "rectified_flow", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "rectified_flow" / room)
    for number in range(8):
        file = tmp_path / "pictures" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(file)
        with (file.parent / "metadata.csv").open("a") as table:
            table.write("file_name,size,kind\n" * (number < 2) + f"{file.name},{number},{'ab'[number // 4]}\n")
    for program, flags in PROGRAMS.items():
        shutil.copy(PACKAGE.parent / program, tmp_path)
        command = [sys.executable, program, *flags.split()]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            check=False,
            capture_output=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr.decode()
    assert len(list((tmp_path / "run/generated").glob("*.png"))) > 0
