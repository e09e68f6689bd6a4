"""Launches and failures of a run on two machines, each with its expected outcome."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from tests.several_machines.rig import HOSTS, Process, Rig, wait_until
from tests.training.runs import assert_same_bytes

STEPS, SAVE_EVERY = 150, 10
TINY = (
    f"--image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 8 --train_num_steps {STEPS} --save_every {SAVE_EVERY}"
    " --log_every 1 --num_samples 0 --learning_rate 1e-3 --lr_warmup_steps 5 --rank_timeout 20"
)
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
DEADLINE = 240.0
PORT = 29400


@dataclass
class Lab:
    """The machines, and the runs made on them so far."""

    rig: Rig
    undisturbed: Path = field(init=False)

    def __post_init__(self) -> None:
        pictures = self.rig.lab / "pictures"
        pictures.mkdir()
        for index in range(40):
            colour = (index * 6, 255 - index * 3, index % 7 * 30)
            Image.new("RGB", (8, 8), colour).save(pictures / f"{index:02}.png")
        self.undisturbed = self.rig.lab / "undisturbed"
        both = self.torchrun(self.undisturbed)
        assert_finished(*both)
        assert "2 x cpu" in both[0].output

    def train(self, output_dir: Path, *flags: object) -> list[object]:
        """A training program and its flags."""
        data = ["--dataset_path", self.rig.lab / "pictures"]
        return ["train_oxford.py", *data, *TINY.split(), "--output_dir", output_dir, *flags]

    def torchrun(self, output_dir: Path) -> list[Process]:
        """The documented torchrun command on the machines."""
        documented = [
            *("torchrun", "--nnodes", 2, "--nproc_per_node", "1", "--max_restarts", "3"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", f"{HOSTS[0]}:{PORT}", "--rdzv_id", "flowers"),
        ]
        return [self.rig.start(machine, [*documented, *self.train(output_dir)], NEW_STORE) for machine in (0, 1)]

    def alone(self, machine: int, output_dir: Path, *flags: object) -> Process:
        """A process whose place is in its environment, as operators set it, without LOCAL_RANK."""
        place = {"RANK": str(machine), "WORLD_SIZE": "2", "MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(PORT)}
        return self.rig.start(machine, ["python", *self.train(output_dir, *flags)], place)

    def is_like_undisturbed(self, run: Path) -> str:
        """Check that a run ended with the bytes of an undisturbed one."""
        assert_same_bytes(self.undisturbed, run, STEPS)
        assert losses(run) == losses(self.undisturbed)
        return "byte-equal"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def status(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "status.json").read_text()))


def step_is_saved(run: Path, step: int) -> Callable[[], bool]:
    return (run / f"checkpoints/step_{step:08}").exists


def assert_finished(*processes: Process) -> None:
    for process in processes:
        assert process.wait(DEADLINE) == 0, process.output[-3000:]


Case = Callable[[Lab, Path], str]
CASES: dict[str, Case] = {}


def case(title: str) -> Callable[[Case], Case]:
    """Register a function that makes a run in a folder and returns what came of it."""

    def register(function: Case) -> Case:
        CASES[title] = function
        return function

    return register


# Ways to start


@case("`torchrun` on each")
def torchrun_equals_one_process(lab: Lab, run: Path) -> str:
    assert_finished(lab.rig.start(0, ["python", *lab.train(run)]))
    gap = max(abs(one - two) for one, two in zip(losses(run), losses(lab.undisturbed), strict=True))
    assert gap < 1e-4, f"losses differ by {gap}"
    return f"finished; losses differ from those of one process by at most {gap:.0e}"


@case("`accelerate launch --num_machines 2`")
def accelerate_launch(lab: Lab, run: Path) -> str:
    documented = ["accelerate", "launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2"]
    place = ["--main_process_ip", HOSTS[0], "--main_process_port", PORT]
    both = [
        lab.rig.start(machine, [*documented, "--machine_rank", machine, *place, *lab.train(run)]) for machine in (0, 1)
    ]
    assert_finished(*both)
    return f"finished, {lab.is_like_undisturbed(run)} to torchrun"


@case("`python` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and no LOCAL_RANK")
def operator(lab: Lab, run: Path) -> str:
    assert_finished(*(lab.alone(machine, run) for machine in (0, 1)))
    return f"finished, {lab.is_like_undisturbed(run)} to torchrun"


# Failures


@case("SIGKILL to the worker of machine 1")
def worker_killed(lab: Lab, run: Path) -> str:
    both = lab.torchrun(run)
    wait_until(step_is_saved(run, 2 * SAVE_EVERY), DEADLINE, "saved")
    [worker] = psutil.Process(both[1].popen.pid).children()
    worker.kill()
    assert_finished(*both)
    assert "resume      step" in both[0].output
    return f"restarted by torchrun on both, resumed, {lab.is_like_undisturbed(run)}"


@case("the link is down for 8 s")
def short_cut(lab: Lab, run: Path) -> str:
    both = cut(lab, run, 8)
    assert_finished(*both)
    assert "resume      step" not in both[0].output
    return f"finished without a restart, {lab.is_like_undisturbed(run)}"


@case("the link is down for 50 s, longer than `--rank_timeout 20`")
def long_cut(lab: Lab, run: Path) -> str:
    both = cut(lab, run, 50)
    assert_finished(*both)
    assert "resume      step" in both[0].output
    return f"both workers fail, torchrun restarts them, {lab.is_like_undisturbed(run)}"


def cut(lab: Lab, run: Path, seconds: float) -> list[Process]:
    both = lab.torchrun(run)
    wait_until(step_is_saved(run, 2 * SAVE_EVERY), DEADLINE, "saved")
    lab.rig.cut_cable()
    time.sleep(seconds)
    lab.rig.plug_in()
    return both


@case("SIGTERM to one of the processes")
def interrupted(lab: Lab, run: Path) -> str:
    both = [lab.alone(machine, run) for machine in (0, 1)]
    wait_until(step_is_saved(run, 2 * SAVE_EVERY), DEADLINE, "saved")
    both[1].kill(signal.SIGTERM)
    assert [process.wait(DEADLINE) for process in both] == [0, 0]
    assert status(run)["state"] == "interrupted"
    assert_finished(*(lab.alone(machine, run) for machine in (0, 1)))
    return f"both end with 0; the same command resumes, {lab.is_like_undisturbed(run)}"
