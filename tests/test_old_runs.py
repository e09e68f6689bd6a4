"""Runs of version 0.1, whose checkpoints are in ``old_runs``: the programs resume them as that version would have.

``old_runs/expected.json`` has what that version itself made of steps 5 to 8, on any processor with x86's common
instructions alone. Mean flow's derivative has been rounded otherwise since, so its numbers are equal up to that.
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
"""Whether this installation computes as the one that made the checkpoints."""
ANY_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
PROGRAMS = {"rectified": ["train_oxford.py", "--power_ema"], "mean": ["train_mean_flow.py", "--lr_decay", "none"]}
FLAGS = (
    "--dataset_path pictures --image_size 8 --dim 4 --dim_mults 1 2 --use_cfg --batch_size 8 --learning_rate 1e-3"
    " --lr_warmup_steps 3 --ema_decay 0.99 --save_every 4 --log_every 1 --num_samples 0"
)
STEP_4 = "checkpoints/step_00000004"
PICTURES = {
    "rectified": "09efb77a89cdc24cad84cc55f14d2d8230cd20e3884a4fb4962deac96754a277",
    "mean": "5ccdb21292b44f79b1c8b36b61ff29741a16ce7ad54441638f73e6b5a815ec54",
}
"""sha256 of the pixels of the first three pictures that version 0.1 drew of the checkpoints, in two steps."""
either_flow = pytest.mark.parametrize("flow", ["rectified", "mean"])
pytestmark = pytest.mark.xdist_group("old runs")  # whose tests share runs


def draw_pictures(folder: Path) -> None:
    """The pictures that the runs were trained on: a folder for each of two classes."""
    x, y, channel = np.meshgrid(np.arange(8), np.arange(8), np.arange(3), indexing="ij")
    for index in range(16):
        pixels = (37 * index + 29 * x * (channel + 1) + 53 * y * (index % 2 + 1)) % 256
        path = folder / "ab"[index % 2] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def start(program: str, *arguments: str, folder: Path) -> str:
    """Run a script in ``folder``; returns what it printed."""
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


def digest(path: Path) -> str:
    """Hash of the tensors in a file, without the frequencies, which the averages no longer hold."""
    result = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        if name != "time_embedding.frequencies":
            result.update(name.encode())
            result.update(value.numpy().tobytes())
    return result.hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    draw_pictures(folder / "pictures")
    return folder


Resume = Callable[[str], Path]


@pytest.fixture(scope="module")
def resume(folder: Path) -> Resume:
    """Resumes a copy of an old run, once, from step 4 to step 8; returns its folder."""

    def resume_once(flow: str) -> Path:
        run = folder / flow
        if not run.exists():
            shutil.copytree(OLD_RUNS / flow, run)
            words = [*PROGRAMS[flow], *FLAGS.split(), "--train_num_steps", "8", "--output_dir", flow]
            assert "resume      step 4, from" in start(*words, folder=folder)
        return run

    return resume_once


@either_flow
def test_it_resumes_with_the_same_losses(resume: Resume, flow: str) -> None:
    expected = {int(step): loss for step, loss in EXPECTED[flow]["losses"].items()}
    assert list(expected) == [5, 6, 7, 8]
    got = losses(resume(flow))
    exact = SAME_NUMBERS and flow == "rectified"
    assert got == expected if exact else got == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(not SAME_NUMBERS, reason=f"the last bit is that of torch {EXPECTED['torch']} on x86")
def test_it_comes_to_the_same_weights_and_averages(resume: Resume) -> None:
    files = (resume("rectified") / "checkpoints/step_00000008").glob("*.safetensors")
    got = {path.name: digest(path) for path in files if path.name != "optimizer.safetensors"}
    assert got == EXPECTED["rectified"]["weights"]


@either_flow
def test_sample_draws_from_it(folder: Path, flow: str) -> None:
    words = [
        "--checkpoint",
        str(OLD_RUNS / flow),
        "--num_samples",
        "3",
        "--steps",
        "2",
        "--output_dir",
        f"{flow}-drawn",
    ]
    start("sample.py", *words, folder=folder)
    pictures = [Image.open(folder / f"{flow}-drawn" / f"{number:05}.png") for number in range(3)]
    assert [picture.size for picture in pictures] == [(8, 8)] * 3
    if SAME_NUMBERS:
        pixels = b"".join(picture.tobytes() for picture in pictures)
        assert hashlib.sha256(pixels).hexdigest() == PICTURES[flow]


@either_flow
def test_its_config_starts_the_same_run(folder: Path, flow: str) -> None:
    """Its flags, in a list without groups as that version wrote them, are those of today."""
    config, output_dir = OLD_RUNS / flow / STEP_4 / "config.json", f"{flow}-again"
    start(PROGRAMS[flow][0], "--config", str(config), "--output_dir", output_dir, folder=folder)
    again, before = folder / output_dir, json.loads(config.read_text())
    flags = json.loads((again / "config.json").read_text())["flags"]
    assert before.pop("dry_run") is False  # which is not a matter of the run
    assert {name: flags[name] for name in before} == before | {"output_dir": output_dir}
    assert list(losses(again)) == [1, 2, 3, 4]
    for name in ("model.safetensors", "ema.safetensors"):
        one, two = (load_file(run / STEP_4 / name) for run in (OLD_RUNS / flow, again))
        for key, value in two.items():  # four steps of Adam, each of a thousandth
            exact = SAME_NUMBERS and flow == "rectified"
            assert torch.equal(value, one[key]) if exact else (value - one[key]).abs().max() < 4e-3, key
