"""Tests of the Slurm job with stand-ins for Slurm's commands and torchrun."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE

JOB = Path(__file__).resolve().parents[2] / "scripts/slurm_job.sbatch"
STAND_INS = {
    "srun": 'exec "$@"',
    "scontrol": 'if [[ $1 == show ]]; then printf "node-0\\nnode-1\\n"; else echo "$@" >> calls; fi',
    # The shell that started it is asked to end, too, as Slurm signals all processes of a step.
    "python": 'printf "%s\\n" "$@" > words; if [[ $ASKED ]]; then kill -TERM $PPID; fi; exit "$CODE"',
}


def submit(folder: Path, code: int, *flags: str, asked: bool = False) -> tuple[int, list[str]]:
    """Run the job where torchrun ends with ``code``; returns the job's exit code and what it asked of Slurm."""
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    given = {
        **{"SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_GPUS_ON_NODE": "8"},
        **{"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": "python", "CODE": str(code), "ASKED": "yes" * asked},
    }
    ended = subprocess.run(["bash", JOB, *flags], cwd=folder, env=os.environ | given, check=False, timeout=PATIENCE)
    calls = folder / "calls"
    return ended.returncode, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(
    ("code", "asked", "expected"),
    [
        (0, False, (0, [])),
        (1, False, (1, [])),  # failed, or a mistyped flag
        (1, True, (143, ["requeue 12345"])),  # torchrun, asked to end
        (0, True, (143, ["requeue 12345"])),  # the run finished just then: the next start sees it
    ],
)
def test_a_job_that_was_asked_to_end_goes_back_into_the_queue(
    tmp_path: Path, code: int, asked: bool, expected: tuple[int, list[str]]
) -> None:
    assert submit(tmp_path, code, asked=asked) == expected


def test_torchrun_gets_the_nodes_a_port_of_the_job_and_all_flags(tmp_path: Path) -> None:
    submit(tmp_path, 0, "--output_dir", "/shared/my runs")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[-3:] == ["train_oxford.py", "--output_dir", "/shared/my runs"]
    given = dict(zip(words[2:-3:2], words[3:-3:2], strict=True))
    assert (given["--nnodes"], given["--nproc_per_node"]) == ("2", "8")
    assert (given["--rdzv_endpoint"], given["--rdzv_id"]) == ("node-0:22345", "12345")
