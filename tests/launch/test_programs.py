"""Tests of the programs as a user starts them, of the Slurm job, and a short form of the soak test."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

from rectified_flow.cli.settings import read_settings
from rectified_flow.cli.train import train
from rectified_flow.cli.training_flags import TrainConfig
from scripts import validate_setup
from tests.launch.launching import ACCELERATE, ROOT, TINY, TORCHRUN, TRAIN, finish, launch, start
from tests.launch.soak import FLAGS, differences, leaks, two_runs
from tests.patience import PATIENCE, wait_for
from tests.programs import printed, without
from tests.ranks import run_on_ranks
from tests.training.runs import assert_same_bytes, losses


def test_the_launch_script_on_two_processes(tmp_path: Path) -> None:
    flags = "--train_num_steps 10 --sample_every 5 --save_every 5 --log_with wandb --output_dir run"
    command = [str(ROOT / "scripts/run_multi_gpu_simple.sh"), "2", *TINY, *flags.split()]
    code, output = launch(command, tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    assert code == 0, output
    assert "2 x cpu" in output
    assert "8 per process x 2 processes = 16" in output
    run = tmp_path / "run"
    assert list(losses(run)) == [5, 10]
    assert (run / "samples/step_00000005.png").exists()
    assert (run / "checkpoints/step_00000010/manifest.json").exists()
    assert list(tmp_path.rglob("*.wandb")), "wandb logged nothing"
    assert str(Path("run/checkpoints/step_00000010")) in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "given", "threads"), [("3", "", "5"), ("40", "", "1"), ("0 --max_restarts 1", "", "16"), ("2", "6", "6")]
)
def test_the_launch_script_divides_the_cores(words: str, given: str, threads: str, tmp_path: Path) -> None:
    """The interpreter is a stand-in on a machine of 16 cores."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 16 || echo "$OMP_NUM_THREADS threads"\n')
    python.chmod(0o755)
    command = [str(ROOT / "scripts/run_multi_gpu_simple.sh"), *words.split()]
    code, output = launch(command, tmp_path, PYTHON=str(python), OMP_NUM_THREADS=given)
    assert (code, output) == (0, f"{threads} threads\n")


@pytest.mark.slow
def test_the_launch_script_without_gpus_runs_plain_python(tmp_path: Path) -> None:
    """Train in the precision of the flag, whatever precision the launcher requests."""
    command = [str(ROOT / "scripts/run_multi_gpu_simple.sh"), *TINY, "--mixed_precision", "no", "--dry_run"]
    code, output = launch(command, tmp_path, ACCELERATE_MIXED_PRECISION="bf16")
    assert code == 0, output
    assert "1 x cpu, float32" in output
    assert " x 1 process = 16\n" in output
    speed = r"speed +.* images/s \(.* to .*\) in about .* GB of memory for each process\n"
    assert re.search(rf"{speed}time +.* a step, .* in all\n", output)
    assert not list(tmp_path.iterdir()), "a dry run left something behind"


@pytest.mark.slow
def test_precision_is_the_launchers(tmp_path: Path) -> None:
    config = ["--config_file", str(ROOT / "accelerate_config.yaml"), "--num_processes", "2"]
    code, output = launch([*ACCELERATE, *config, TRAIN, *TINY, "--train_num_steps", "5"], tmp_path)
    assert code == 0, output
    assert "2 x cpu, bf16" in output
    run = tmp_path / "runs/rectified-flow"
    assert 0.5 < losses(run)[5] < 2
    assert json.loads((run / "config.json").read_text())["training"]["mixed_precision"] is None


@pytest.mark.slow
def test_a_missing_folder_under_torchrun_is_explained_once(tmp_path: Path) -> None:
    code, output = launch([*TORCHRUN, "--dataset_path", "nowhere"], tmp_path)
    assert code != 0
    assert output.count("is not a folder") == 1, output
    assert "exitcode  : 2" in output


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_says_why_once(tmp_path: Path) -> None:
    command = [*TORCHRUN[:-1], str(ROOT / "tests/launch/faulty_program.py"), *TINY]
    flags = ["--train_num_steps", "20", "--output_dir", "run", "--rank_timeout", str(10 * PATIENCE)]  # not waited for
    code, output = launch([*command, *flags], tmp_path, PYTHONPATH=str(ROOT))
    assert code == 1
    assert output.count("rank 1: Traceback") == 1, output
    assert output.count("ValueError: this picture is too sad") == 1, output
    assert output.count("Traceback (most recent call last)") - output.count("torch.distributed.elastic") <= 1, output
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "this picture is too sad")


@pytest.mark.slow
def test_the_launch_script_starts_again_what_died(tmp_path: Path) -> None:
    script = [str(ROOT / "scripts/run_multi_gpu_simple.sh"), "1", *TINY, "--max_restarts=1"]
    flags = ["--train_num_steps", "30", "--save_every", "5", "--num_samples", "0", "--output_dir"]
    process = start([*script, *flags, "killed"], tmp_path)
    saved = tmp_path / "killed/checkpoints/step_00000010"
    wait_for("step 10", lambda: saved.exists() or process.poll() is not None)
    [worker] = psutil.Process(process.pid).children()
    worker.kill()
    code, output = finish(process)
    assert code == 0, output
    assert "1 x cpu, float32" in output
    assert "resume      step" in output
    assert json.loads((tmp_path / "killed/status.json").read_text())["state"] == "finished"
    config = read_settings(TrainConfig, "", [*TINY, *flags, str(tmp_path / "straight")])
    run_on_ranks(1, train, config)
    assert_same_bytes(tmp_path / "straight", tmp_path / "killed", 30)
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    [said] = run_on_ranks(1, printed, " ".join([*TINY, *flags, str(tmp_path / "killed")]))
    assert "already trained 30 of 30 steps" in said


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train_oxford.py", "train_mean_flow.py"])
def test_compiled_training_has_the_losses_of_eager(tmp_path: Path, program: str) -> None:
    flags = [*without("--dim_mults", TINY), "--train_num_steps", "6", "--log_every", "1", "--num_samples", "0"]
    flags += ["--dim_mults", "1"]
    processes = [
        start([sys.executable, str(ROOT / program), *flags, *extra, "--output_dir", name], tmp_path)
        for name, extra in (("eager", []), ("compiled", ["--compile"]))
    ]
    for process in processes:
        code, output = finish(process)
        assert code == 0, output
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)


def test_a_check_of_the_setup_names_a_fix_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise OSError("no such device\nmore")

    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures/1.png")
    (tmp_path / "pictures/2.heic").touch()
    (tmp_path / "file").touch()
    monkeypatch.setattr(validate_setup, "check_devices", fail)
    monkeypatch.setattr(validate_setup, "check_two_processes", lambda: "of another test")
    flags = validate_setup.Flags(
        dataset_path=tmp_path / "pictures", image_size=8, output_dir=tmp_path / "file", cache_dir=tmp_path / "cache"
    )
    assert validate_setup.main(flags) == 2
    said = capsys.readouterr().out
    assert "FIX   devices        OSError: no such device\n" in said
    assert f"FIX   disk           --output_dir {tmp_path}/file cannot be written (Not a directory): " in said
    assert re.search(r"ok    data           1 images, .*; .*heic", said)


def test_validate_setup(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/validate_setup.py"), "--image_size", "8", "--dataset"]
    code, output = launch([*command, "synthetic-flowers"], tmp_path)
    assert code == 0, output
    assert output.count("ok  ") == 6
    assert "(8, 3, 8, 8) torch.uint8" in output
    assert "all-reduce over two processes works" in output


SHORT = ("fill_disk", "kill_launcher", "corrupt_checkpoint")


@pytest.mark.slow
@pytest.mark.timeout(8 * PATIENCE)
def test_a_run_that_is_killed_stopped_and_damaged_ends_like_one_left_alone() -> None:
    with two_runs(rank_timeout=PATIENCE) as (calm, soak):  # none hangs
        soak.disturb(SHORT)
        steps = soak.last_step() + 20
        soak.finish(steps)
        flags = f"{FLAGS} --output_dir {calm.run} --train_num_steps {steps}"
        run_on_ranks(2, train, read_settings(TrainConfig, "", flags.split()))
        assert differences(calm.run, soak.run) == []
        assert leaks(soak) == []
        assert soak.counts["times resumed"] >= len(SHORT) - 1, soak.counts  # a full disk ends nothing
        assert soak.counts["checkpoints refused"] == 1, soak.counts
        assert soak.counts["writes that failed"] >= 1, soak.counts


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
