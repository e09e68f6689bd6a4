"""What becomes of the project's Slurm job."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.several_machines.cases import DEADLINE, SAVE_EVERY, Lab, status, step_is_saved
from tests.several_machines.rig import wait_until
from tests.several_machines.slurm import Slurm

IN_QUEUE = 300.0
"""Seconds within which a job that was put back into the queue has started again and ended; Slurm waits 120."""

Job = Callable[[Lab, Slurm, Path], str]
JOBS: dict[str, Job] = {}


def job(title: str) -> Callable[[Job], Job]:
    """Register a function that submits a job with a run's folder and returns what became of it."""

    def register(function: Job) -> Job:
        JOBS[title] = function
        return function

    return register


def submit(lab: Lab, slurm: Slurm, run: Path, *flags: object, options: tuple[object, ...] = ()) -> str:
    return slurm.submit(run, lab.train(run, *flags)[1:], *options)


@job("Slurm: a job that ends, and one that depends on it by `afterok`")
def completes(lab: Lab, slurm: Slurm, run: Path) -> str:
    first = submit(lab, slurm, run)
    second = slurm(
        "sbatch", "--parsable", "--output", "/dev/null", "--dependency", f"afterok:{first}", "--wrap", "true"
    )
    slurm.wait_for(first, "COMPLETED", DEADLINE)
    slurm.wait_for(second.strip(), "COMPLETED", 60)
    return f"both COMPLETED, {lab.is_like_undisturbed(run)}"


@job("Slurm: `scancel --signal=TERM`")
def asked_to_end(lab: Lab, slurm: Slurm, run: Path) -> str:
    number = submit(lab, slurm, run)
    wait_until(step_is_saved(run, 2 * SAVE_EVERY), DEADLINE, "saved")
    slurm("scancel", "--signal=TERM", number)
    slurm.wait_for(number, "PENDING", 60)
    assert status(run)["state"] == "interrupted"
    waited = slurm.wait_for(number, "RUNNING", IN_QUEUE)
    slurm.wait_for(number, "COMPLETED", DEADLINE)
    assert slurm.restarts(number) == 1
    return f"saved, back in the queue for {waited:.0f} s, resumed, COMPLETED, {lab.is_like_undisturbed(run)}"


@job("Slurm: pre-empted while it starts, before it wrote a file; 60 s of grace")
def preempted_at_start(lab: Lab, slurm: Slurm, run: Path) -> str:
    number = submit(lab, slurm, run, options=("--partition", "low"))
    slurm.wait_for(number, "RUNNING", 60)
    preempt(slurm)
    assert not (run / "status.json").exists()
    return back_in_the_queue(lab, slurm, run, number)


@job("Slurm: pre-empted in training, without grace")
def preempted(lab: Lab, slurm: Slurm, run: Path) -> str:
    number = submit(lab, slurm, run, options=("--partition", "graceless"))
    wait_until(step_is_saved(run, 2 * SAVE_EVERY), DEADLINE, "saved")
    preempt(slurm)
    state = status(run)["state"]
    return f"status.json says {state}; {back_in_the_queue(lab, slurm, run, number)}"


def preempt(slurm: Slurm) -> None:
    """Have a job of another partition take both machines for some seconds."""
    urgent = slurm(
        *("sbatch", "--parsable", "--output", "/dev/null", "--partition", "high", "--nodes", 2),
        *("--ntasks-per-node", 2, "--wrap", "sleep 20"),
    )
    slurm.wait_for(urgent.strip(), "RUNNING", 120)


def back_in_the_queue(lab: Lab, slurm: Slurm, run: Path, number: str) -> str:
    slurm.wait_for(number, "COMPLETED", IN_QUEUE + DEADLINE)
    assert slurm.restarts(number) >= 1
    return f"back in the queue, COMPLETED, {lab.is_like_undisturbed(run)}"


@job("Slurm: the signal of `--signal TERM@120` before the end of `--time 3`")
def out_of_time(lab: Lab, slurm: Slurm, run: Path) -> str:
    number = submit(lab, slurm, run, "--train_num_steps", 300, options=("--time", 3))
    slurm.wait_for(number, "COMPLETED", 4 * IN_QUEUE)
    times = slurm.restarts(number)
    assert times >= 1
    assert status(run)["state"] == "finished"
    return f"back in the queue {times} time{'s' * (times > 1)}, COMPLETED"


@job("Slurm: `scancel` alone")
def cancelled(lab: Lab, slurm: Slurm, run: Path) -> str:
    number = submit(lab, slurm, run, "--train_num_steps", 100_000)
    wait_until(step_is_saved(run, 2 * SAVE_EVERY), DEADLINE, "saved")
    slurm("scancel", number)
    slurm.wait_for(number, "CANCELLED", 120)
    wait_until(lambda: status(run)["state"] != "running", 60, "an end in status.json")
    assert slurm.restarts(number) == 0
    return f"CANCELLED for good; status.json says {status(run)['state']}"


@job("Slurm: a mistyped flag, in the folder of an interrupted run")
def mistyped(lab: Lab, slurm: Slurm, run: Path) -> str:
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"state": "interrupted"}))
    number = submit(lab, slurm, run, "--lerning_rate", "1")
    slurm.wait_for(number, "FAILED", DEADLINE)
    assert slurm.restarts(number) == 0
    assert "Perhaps you meant" in Path(f"{run}.out").read_text()
    return "FAILED, not back in the queue"
