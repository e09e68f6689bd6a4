"""Runs of the oldest version whose checkpoints today's programs resume byte for byte, which is commit c5b7768.

The folder ``old_runs`` holds three runs at step 4 of 8: ``rectified``, ``mean``, and ``taught``, whose teacher is
``rectified``. The file ``old_runs/expected.json`` holds what :func:`outcome` returned at that commit for each run after
that commit had resumed the run; a run that goes straight from step 0 to step 8 has the same outcome. The environment
in ``ANY_PROCESSOR`` restricts the programs to the instructions that all x86 processors share.

These commands made the folder. ``ROOT`` is a checkout of commit c5b7768, and the commands run in an empty folder::

    export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
    export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= ACCELERATE_USE_CPU=true RECTIFIED_FLOW_CACHE=$PWD/cache
    PYTHONPATH=$ROOT python -c "from pathlib import Path; from tests.test_old_runs import draw_pictures
    draw_pictures(Path('pictures'))"
    RUN="--batch_size 6 --train_num_steps 8 --learning_rate 1e-3 --lr_warmup_steps 3 --ema_decay 0.99"
    RUN="$RUN --save_every 4 --log_every 1 --num_samples 0"
    DATA="--dataset_path pictures --image_size 8 --dim 4 --dim_mults 1 2 --use_cfg --augment 0 --holdout 0"
    TEACHER="--teacher rectified/checkpoints/step_00000004 --teacher_samples 16 --teacher_steps 4"
    python $ROOT/train_oxford.py $RUN --output_dir rectified $DATA
    python $ROOT/train_mean_flow.py $RUN --output_dir mean $DATA
    python $ROOT/train_mean_flow.py $RUN --output_dir taught $TEACHER
    rm -r */checkpoints/step_00000008 */loss.png */status.json
    sed -i '5,$d' */metrics.jsonl
    find rectified mean taught -name "*.lock" -delete
    cp -r rectified mean taught $ROOT/tests/old_runs
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.patience import PATIENCE
from tests.training.runs import losses

ROOT = Path(__file__).resolve().parents[1]
OLD_RUNS = ROOT / "tests/old_runs"
EXPECTED: dict[str, Any] = json.loads((OLD_RUNS / "expected.json").read_text())
SAME_NUMBERS = torch.__version__ == EXPECTED["torch"] and platform.machine() in ("x86_64", "AMD64")
"""Whether this installation computes the same bits as the installation that made the runs."""
ANY_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
RUN = (
    "--batch_size 6 --train_num_steps 8 --learning_rate 1e-3 --lr_warmup_steps 3 --ema_decay 0.99"
    " --save_every 4 --log_every 1 --num_samples 0"
)
DATA = "--dataset_path pictures --image_size 8 --dim 4 --dim_mults 1 2 --use_cfg --augment 0 --holdout 0"
STEP_4, STEP_8 = "checkpoints/step_00000004", "checkpoints/step_00000008"
COMMANDS = {
    "rectified": f"train_oxford.py {RUN} --output_dir rectified {DATA}",
    "mean": f"train_mean_flow.py {RUN} --output_dir mean {DATA}",
    "taught": f"train_mean_flow.py {RUN} --output_dir taught"
    f" --teacher rectified/{STEP_4} --teacher_samples 16 --teacher_steps 4",
}
"""The command of each run, which starts the run and resumes the run."""
SAMPLE = f"sample.py --checkpoint {{0}}/{STEP_4} --num_samples 3 --steps 2 --output_dir {{0}}-drawn"
"""The command that draws three pictures of the run with this name at step 4."""
each_run = pytest.mark.parametrize("name", COMMANDS)


def draw_pictures(folder: Path) -> None:
    """Draw the pictures that the runs are trained on: a folder for each of two classes."""
    x, y, channel = np.meshgrid(np.arange(8), np.arange(8), np.arange(3), indexing="ij")
    for index in range(16):
        pixels = (37 * index + 29 * x * (channel + 1) + 53 * y * (index % 2 + 1)) % 256
        path = folder / "ab"[index % 2] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)


FORKED = """
import os, runpy, sys
import torch._dynamo, rectified_flow.cli.sample, rectified_flow.cli.train, rectified_flow.training.trainer
for command in sys.argv[1:]:
    if not os.fork():
        sys.argv = command.split()
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    if os.wait()[1]:
        sys.exit(f"{command} failed")
"""
"""A program that imports torch once, and then runs each of the given commands in a process that has it."""


def run_all(commands: Iterable[str], folder: Path) -> str:
    """Run programs in a folder, one after the other, and return what they print."""
    restricted = ANY_PROCESSOR | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, *(f"{ROOT}/{command}" for command in commands)],
        cwd=folder,
        env=os.environ | restricted,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def hash_tensors(path: Path) -> str:
    """Hash the names, types, shapes and values of the tensors in a file."""
    result = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        result.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        result.update(value.numpy().tobytes())
    return result.hexdigest()


def hash_checkpoint(checkpoint: Path) -> dict[str, str]:
    """Hash the tensors in each file of a checkpoint: weights, averages, and the state of the optimizer."""
    return {path.name: hash_tensors(path) for path in sorted(checkpoint.glob("*.safetensors"))}


def hash_pictures(drawn: Path) -> str:
    """Hash the pixels of the three pictures that sample.py drew."""
    pictures = [Image.open(drawn / f"{number:05}.png") for number in range(3)]
    assert [picture.size for picture in pictures] == [(8, 8)] * 3
    return hashlib.sha256(b"".join(picture.tobytes() for picture in pictures)).hexdigest()


def outcome(folder: Path, name: str) -> dict[str, Any]:
    """Collect what ``expected.json`` holds of a run that has reached step 8.

    Args:
        folder: the folder that holds all three runs, and the pictures drawn from step 4 of each.
        name: the run's name.

    Returns:
        The losses of steps 5 to 8, the hashes of the tensors at step 8, and the hash of the pictures at step 4.
    """
    return {
        "losses": {str(step): loss for step, loss in losses(folder / name).items() if step > 4},
        "tensors": hash_checkpoint(folder / name / STEP_8),
        "pictures": hash_pictures(folder / f"{name}-drawn"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Resume copies of the old runs from step 4 to step 8, and draw pictures from step 4 of each.

    The copies have the current time, so that the copied paths of the run ``taught`` differ from their recorded times.
    """
    folder = tmp_path_factory.mktemp("old")
    draw_pictures(folder / "pictures")
    for name in COMMANDS:
        shutil.copytree(OLD_RUNS / name, folder / name, copy_function=shutil.copyfile)
    printed = run_all([*COMMANDS.values(), *map(SAMPLE.format, COMMANDS)], folder)
    assert printed.count("resume      step 4, from") == len(COMMANDS)
    assert "warning" not in printed
    return folder


@each_run
def test_a_run_resumes_with_the_same_losses(folder: Path, name: str) -> None:
    expected = {int(step): loss for step, loss in EXPECTED[name]["losses"].items()}
    assert list(expected) == [5, 6, 7, 8]
    assert [*losses(folder / name)] == [1, 2, 3, 4, *expected], "the run keeps the lines of the first four steps"
    got = {step: loss for step, loss in losses(folder / name).items() if step > 4}
    assert got == expected if SAME_NUMBERS else got == pytest.approx(expected, rel=1e-4)


@each_run
def test_a_resumed_run_has_the_same_tensors_and_pictures(folder: Path, name: str) -> None:
    found = outcome(folder, name)
    assert not SAME_NUMBERS or found == EXPECTED[name]


def test_drawn_paths_are_kept(folder: Path) -> None:
    """Check that the run ``taught`` accepts the stored paths by their contents, whatever the files' times are."""
    kept, made = (run / "paths" for run in (folder / "taught", OLD_RUNS / "taught"))
    names = {path.name for path in made.iterdir()}
    assert names == {"images.uint8", "path.float16", "labels.npy", "info.json", "recipe.json", "manifest.json"}
    for name in names:
        assert (kept / name).read_bytes() == (made / name).read_bytes(), name
