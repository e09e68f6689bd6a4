"""Start the programs as a user does: the launchers' processes, their output, and what to do with those that hang."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "train_oxford.py")
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", TRAIN]
ACCELERATE = [str(BIN / "accelerate"), "launch", "--num_machines", "1"]
TINY_FLAGS = (
    "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 16 --learning_rate 1e-3"
    " --lr_warmup_steps 5 --log_every 5 --num_samples 6"
)
TINY = TINY_FLAGS.split()


def start(command: Sequence[str], cwd: Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    return subprocess.Popen(
        list(command),
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; a launcher that hangs is killed with all it started."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in family:
            each.kill()
        raise
    return process.returncode, output


def launch(command: Sequence[str], cwd: Path, **environment: str) -> tuple[int, str]:
    return finish(start(command, cwd, **environment))
