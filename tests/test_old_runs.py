"""Runs of the oldest version whose checkpoints today's programs resume byte for byte, which is commit 2b575ae.

The folder ``old_runs`` holds three runs at step 4 of 8: ``rectified``, ``mean``, and ``taught``, whose teacher is
``rectified``. The file ``old_runs/expected.json`` holds what :func:`outcome` returned at that commit for each run after
that commit had resumed the run; a run that goes straight from step 0 to step 8 has the same outcome. The environment
in ``ANY_PROCESSOR`` restricts the programs to the instructions that all x86 processors share.

These commands made the folder. ``ROOT`` is a checkout of commit 2b575ae, and the commands run in an empty folder::

    export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
    export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= ACCELERATE_USE_CPU=true RECTIFIED_FLOW_CACHE=$PWD/cache
    PYTHONPATH=$ROOT python -c "from pathlib import Path; from tests.test_old_runs import draw_pictures
    draw_pictures(Path('pictures'))"
    RUN="--batch_size 6 --train_num_steps 8 --learning_rate 1e-3 --lr_warmup_steps 3 --ema_decay 0.99"
    RUN="$RUN --save_every 4 --log_every 1 --num_samples 0"
    DATA="--dataset_path pictures --image_size 8 --dim 4 --dim_mults 1 2 --use_cfg --augment 0 --holdout 0"
    TEACHER="--teacher rectified/checkpoints/step_00000004 --teacher_paths 16 --teacher_steps 4"
    python $ROOT/train_oxford.py $RUN --output_dir rectified $DATA --power_ema
    python $ROOT/train_mean_flow.py $RUN --output_dir mean $DATA
    python $ROOT/train_mean_flow.py $RUN --output_dir taught $TEACHER
    rm -r */checkpoints/step_00000008 */checkpoints/averages */loss.png */status.json
    sed -i '5,$d' */metrics.jsonl
    find rectified mean taught -name "*.lock" -delete
    cp -r rectified mean taught $ROOT/tests/old_runs

Commit 2b575ae itself holds an earlier module of this name, whose function ``draw_pictures`` draws the same pictures.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
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
    "rectified": f"train_oxford.py {RUN} --output_dir rectified {DATA} --power_ema",
    "mean": f"train_mean_flow.py {RUN} --output_dir mean {DATA}",
    "taught": f"train_mean_flow.py {RUN} --output_dir taught"
    f" --teacher rectified/{STEP_4} --teacher_paths 16 --teacher_steps 4",
}
"""The command of each run, which starts the run and resumes the run."""
each_run = pytest.mark.parametrize("name", COMMANDS)
same_numbers = pytest.mark.skipif(not SAME_NUMBERS, reason=f"the last bit is that of torch {EXPECTED['torch']} on x86")
pytestmark = pytest.mark.xdist_group("old runs")  # The tests share runs.


def draw_pictures(folder: Path) -> None:
    """Draw the pictures that the runs are trained on: a folder for each of two classes."""
    x, y, channel = np.meshgrid(np.arange(8), np.arange(8), np.arange(3), indexing="ij")
    for index in range(16):
        pixels = (37 * index + 29 * x * (channel + 1) + 53 * y * (index % 2 + 1)) % 256
        path = folder / "ab"[index % 2] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def start(command: str, folder: Path) -> str:
    """Run a program in a folder, and return what the program prints.

    Args:
        command: the program's name and its arguments, separated by spaces.
        folder: the working directory of the program.
    """
    program, *arguments = command.split()
    environment = os.environ | ANY_PROCESSOR | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *arguments],
        cwd=folder,
        env=environment,
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


def hash_pictures(folder: Path, name: str) -> str:
    """Draw three pictures of a run at step 4 with sample.py, and hash the pixels of the pictures."""
    drawn = f"{name}-drawn"
    start(f"sample.py --checkpoint {name}/{STEP_4} --num_samples 3 --steps 2 --output_dir {drawn}", folder)
    pictures = [Image.open(folder / drawn / f"{number:05}.png") for number in range(3)]
    assert [picture.size for picture in pictures] == [(8, 8)] * 3
    return hashlib.sha256(b"".join(picture.tobytes() for picture in pictures)).hexdigest()


def outcome(folder: Path, name: str) -> dict[str, Any]:
    """Collect what ``expected.json`` holds of a run that has reached step 8.

    Args:
        folder: the folder that holds all three runs.
        name: the run's name.

    Returns:
        The losses of steps 5 to 8, the hashes of the tensors at step 8, and the hash of the pictures at step 4.
    """
    return {
        "losses": {str(step): loss for step, loss in losses(folder / name).items() if step > 4},
        "tensors": hash_checkpoint(folder / name / STEP_8),
        "pictures": hash_pictures(folder, name),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the old runs into a new folder, beside the pictures that the runs are trained on.

    The copies have the current time, so that the copied paths of the run ``taught`` differ from their recorded times.
    """
    folder = tmp_path_factory.mktemp("old")
    draw_pictures(folder / "pictures")
    for name in COMMANDS:
        shutil.copytree(OLD_RUNS / name, folder / name, copy_function=shutil.copyfile)
    return folder


Resume = Callable[[str], Path]


@pytest.fixture(scope="module")
def resume(folder: Path) -> Resume:
    """Resume the copy of a run from step 4 to step 8, once, and return the run's folder."""

    def resume_once(name: str) -> Path:
        run = folder / name
        if not (run / STEP_8).exists():
            printed = start(COMMANDS[name], folder)
            assert "resume      step 4, from" in printed
            assert "warning" not in printed
        return run

    return resume_once


@each_run
def test_a_run_resumes_with_the_same_losses(resume: Resume, name: str) -> None:
    expected = {int(step): loss for step, loss in EXPECTED[name]["losses"].items()}
    assert list(expected) == [5, 6, 7, 8]
    run = resume(name)
    assert [*losses(run)] == [1, 2, 3, 4, *expected], "the resumed run keeps the lines of the first four steps"
    got = {step: loss for step, loss in losses(run).items() if step > 4}
    assert got == expected if SAME_NUMBERS else got == pytest.approx(expected, rel=1e-4)


@same_numbers
@each_run
def test_a_resumed_run_has_the_same_tensors(resume: Resume, name: str) -> None:
    assert hash_checkpoint(resume(name) / STEP_8) == EXPECTED[name]["tensors"]


def test_power_averages_get_snapshots_of_both_steps(resume: Resume) -> None:
    snapshots = resume("rectified") / "checkpoints/averages"
    assert sorted(path.name for path in snapshots.iterdir()) == ["step_00000004", "step_00000008"]


def test_drawn_paths_are_kept(resume: Resume) -> None:
    """Check that the run ``taught`` accepts the stored paths by their contents, whatever the files' times are."""
    kept, made = (run / "paths" for run in (resume("taught"), OLD_RUNS / "taught"))
    names = {path.name for path in made.iterdir()}
    assert names == {"images.uint8", "path.float16", "labels.npy", "info.json", "recipe.json"}
    assert names | {"manifest.json"} == {path.name for path in kept.iterdir()}
    for name in names:
        assert (kept / name).read_bytes() == (made / name).read_bytes(), name


@each_run
def test_sample_draws_the_same_pictures(folder: Path, name: str) -> None:
    drawn = hash_pictures(folder, name)
    assert not SAME_NUMBERS or drawn == EXPECTED[name]["pictures"]
