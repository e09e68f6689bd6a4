"""Tests of a copy of the package without the folders of the optional rooms."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rectified_flow.rooms import ROOMS
from tests.patience import PATIENCE

PACKAGE = Path(__file__).resolve().parent.parent / "rectified_flow"

OPTIONAL = (*ROOMS, "rectified_flow.studio")
PROGRAMS = """
import sys
from rectified_flow.__main__ import main

for words in {commands!r}:
    sys.argv = ["rectified-flow", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
assert not {rooms!r} & sys.modules.keys()
assert sys.modules["rectified_flow"].__file__.startswith({folder!r})
"""


@pytest.mark.parametrize("missing", [OPTIONAL, *(pytest.param((room,), marks=pytest.mark.slow) for room in OPTIONAL)])
def test_the_programs_work_without_rooms(missing: tuple[str, ...], tmp_path: Path) -> None:
    """No room imports another (tests/test_architecture.py), so that the copy without all of them stands for each."""
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for room in missing:
        shutil.rmtree(tmp_path / Path(*room.split(".")))
    train = "train --dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 --global_batch_size 8"
    train += (
        f" --train_num_steps 2 --num_samples 2 --sample_steps 1 --output_dir {tmp_path}/run --cache_dir {tmp_path}/c"
    )
    sample = f"sample --checkpoint {tmp_path}/run --num_samples 2 --steps 1"
    evaluate = f"evaluate --checkpoint {tmp_path}/run --num_samples 4 --steps 1 --metric likelihood"
    code = PROGRAMS.format(commands=[train, sample, evaluate], rooms=set(missing), folder=str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run/generated/grid.png").exists()
    assert (tmp_path / "run/evaluation.json").exists()
