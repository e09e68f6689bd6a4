"""Train on two processes under every kind of failure, and compare the result with that of an undisturbed run.

    python -m tests.launch.soak --minutes 10

Every disturbance is real: signals to real processes under torchrun, a limit on file sizes set from outside, flipped
bits in real checkpoints. The moments are random; the kinds take turns, so that each kind occurs. While it is disturbed,
the run has no last step. Afterwards, both runs train to the same last step.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from tests.patience import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "train_oxford.py"
FLAGS = (
    "--dataset synthetic-flowers --image_size 8 --dim 8 --dim_mults 1 2 --global_batch_size 16 --learning_rate 1e-3"
    " --lr_warmup_steps 5 --log_every 5 --save_every 10 --sample_every 50 --num_samples 4 --sample_steps 2"
)
LAUNCHER = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", "2"]


class Soak:
    """A run in its own folder, restarted whenever it ends before its last step.

    Args:
        folder: folder for the run, its cache and its temporary files.
        rank_timeout: seconds after which a rank gives up one that hangs.
        seed: seed of the disturbances.
    """

    def __init__(self, folder: Path, rank_timeout: float, seed: int = 0) -> None:
        self.run, self.cache, self.temporary = folder / "run", folder / "cache", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.command = [*LAUNCHER, "--max_restarts", "3", str(PROGRAM), *FLAGS.split(), "--resume", "auto"]
        self.command += ["--rank_timeout", str(rank_timeout), "--output_dir", str(self.run), "--train_num_steps"]
        self.lines: list[str] = []
        self.launcher: psutil.Popen | None = None

    # What goes on

    def start(self, steps: int = 10**6) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(self.temporary),
            "RECTIFIED_FLOW_CACHE": str(self.cache),
        }
        environment = {key: value for key, value in environment.items() if not key.startswith("ACCELERATE")}
        self.launcher = psutil.Popen(
            [*self.command, str(steps)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, args=(self.launcher.stdout,), daemon=True).start()
        self.counts["commands started"] += 1

    def _read(self, pipe: Iterator[str]) -> None:
        self.lines.extend(pipe)

    def processes(self) -> list[psutil.Process]:
        """The live processes of this run, the launcher first."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self.run) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def workers(self) -> list[psutil.Process]:
        """The ranks, in order."""
        return [process for process in self.processes() if "torchrun" not in " ".join(process.cmdline()[:2])]

    def checkpoints(self) -> list[Path]:
        folder = self.run / "checkpoints"
        return sorted(path for path in folder.glob("step_*") if not path.suffix and (path / "manifest.json").exists())

    def ended(self) -> bool:
        return self.launcher is not None and self.launcher.poll() is not None

    def status(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads((self.run / "status.json").read_text()))
        return {"state": "absent"}

    def is_training(self) -> bool:
        """Whether the run is that of two living ranks: ranks that torchrun has just restarted handle no signal yet."""
        workers = [worker.pid for worker in self.workers()]
        return len(workers) == 2 and self.status().get("pid") in workers

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            wait_for(what, condition)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n" + "".join(self.lines[-60:])) from error

    def wait_for_progress(self) -> None:
        """Wait until the run has saved another checkpoint, or has ended."""
        newest = [path.name for path in self.checkpoints()][-1:]
        self.wait(
            "a new checkpoint",
            lambda: self.ended() or [path.name for path in self.checkpoints()][-1:] > newest,
        )

    def wait_for_end(self) -> None:
        self.wait("the end of all processes", lambda: self.ended() and not self.processes())

    @staticmethod
    def kill(processes: Sequence[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    # What goes wrong

    def kill_worker(self) -> None:
        self.kill([self.random.choice(self.workers())])

    def kill_launcher(self) -> None:
        self.kill(self.processes()[:1])
        self.wait_for_end()

    def power_cut(self) -> None:
        self.kill(self.processes())
        self.wait_for_end()

    def terminate(self) -> None:
        self.kill(self.processes()[:1], signal.SIGTERM)
        self._expect_clean_end()

    def ctrl_c(self) -> None:
        self.kill(self.processes()[:1], signal.SIGINT)
        self._expect_clean_end()

    def preempt(self) -> None:
        """Send the signal to every process of the job, like Slurm."""
        self.kill(self.processes(), signal.SIGTERM)
        self._expect_clean_end()

    def warn_one_rank(self) -> None:
        self.kill([self.random.choice(self.workers())], signal.SIGUSR1)
        self._expect_clean_end()

    def pause_worker(self) -> None:
        worker = [self.random.choice(self.workers())]
        self.kill(worker, signal.SIGSTOP)
        time.sleep(3)
        self.kill(worker, signal.SIGCONT)

    def hang_worker(self) -> None:
        """Stop a rank for good. The other rank fails after --rank_timeout; the launcher kills and restarts both."""
        worker = self.random.choice(self.workers())
        self.kill([worker], signal.SIGSTOP)
        self.wait("the end of a rank that hangs", lambda: not worker.is_running())

    def fill_disk(self) -> None:
        """Limit the file size of the main process, so that its writes fail partway."""
        main = self.workers()[0]
        failures = self._count("could not")
        largest = int(10 ** self.random.uniform(2, 5.3))
        main.rlimit(psutil.RLIMIT_FSIZE, (largest, psutil.RLIM_INFINITY))
        self.wait("a write that fails", lambda: self._count("could not") > failures)
        time.sleep(self.random.uniform(0, 3))
        main.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))

    def corrupt_checkpoint(self) -> None:
        self.terminate()
        newest = self.checkpoints()[-1]
        file = newest / self.random.choice(
            ["model.safetensors", "ema.safetensors", "optimizer.safetensors", "trainer.json"]
        )
        content = bytearray(file.read_bytes())
        if self.random.random() < 0.5:
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        else:
            del content[self.random.randrange(len(content)) :]
        file.write_bytes(content)

    def corrupt_store(self) -> None:
        self.terminate()
        [images] = self.cache.glob("*/images.uint8")
        os.truncate(images, images.stat().st_size // 2)

    def second_run(self) -> None:
        """Start the same command during the run: it is refused, and the run continues."""
        other = subprocess.run(
            [sys.executable, *self.command[self.command.index(str(PROGRAM)) :], "1000000"],
            env=os.environ | {"RECTIFIED_FLOW_CACHE": str(self.cache), "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert other.returncode == 2, other.stderr
        assert "is training in" in other.stderr
        self.counts["second runs refused"] += 1

    def _expect_clean_end(self) -> None:
        self.wait_for_end()
        assert self.status()["state"] == "interrupted", "".join(self.lines[-60:])

    def _count(self, text: str) -> int:
        return sum(text in line for line in list(self.lines))

    # The whole

    DISTURBANCES = (
        *("kill_worker", "terminate", "fill_disk", "corrupt_checkpoint", "kill_launcher", "warn_one_rank"),
        *("pause_worker", "preempt", "corrupt_store", "ctrl_c", "power_cut", "second_run", "hang_worker"),
    )

    def disturb(self, names: Iterable[str], seconds: float = float("inf")) -> None:
        """Start the run, apply the disturbances ``names`` for at most ``seconds``, and stop the run."""
        until = time.monotonic() + seconds
        for name in names:
            if time.monotonic() > until:
                break
            if self.launcher is None or self.ended():
                self.start()
            self.wait_for_progress()
            time.sleep(self.random.uniform(0, 1))
            self.wait("two ranks in training", lambda: self.ended() or self.is_training())
            if self.ended():  # torchrun has no restart left
                continue
            self.counts[name.replace("_", " ")] += 1
            print(f"{self.last_step():>6} {name.replace('_', ' ')}", flush=True)
            getattr(self, name)()
        # While torchrun restarts the ranks, it ends at once, and no rank notes that it was interrupted.
        self.wait("two ranks in training", lambda: self.ended() or self.is_training())
        if not self.ended():
            self.terminate()

    def finish(self, steps: int) -> None:
        """Train to step ``steps`` without disturbances."""
        self.start(steps)
        assert self.launcher is not None
        self.launcher.wait(4 * PATIENCE)
        self.wait_for_end()
        assert self.status()["state"] == "finished", "".join(self.lines[-60:])
        self.counts["times resumed"] = self._count("resume      step")
        self.counts["checkpoints refused"] = self._count("ignoring checkpoint")
        self.counts["writes that failed"] = self._count("could not")
        self.counts["stores built again"] = self._count("was changed")

    def last_step(self) -> int:
        return max((int(path.name.removeprefix("step_")) for path in self.checkpoints()), default=0)


def differences(one: Path, other: Path) -> list[str]:
    """The differences between the final states of two runs, step times excepted."""
    found = []
    newest = [sorted((run / "checkpoints").glob("step_*"))[-1] for run in (one, other)]
    if newest[0].name != newest[1].name:
        return [f"the last checkpoints are {newest[0].name} and {newest[1].name}"]
    for name in ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "trainer.json"):
        if (newest[0] / name).read_bytes() != (newest[1] / name).read_bytes():
            found.append(f"{name} differs")
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    for row in [*lines[0], *lines[1]]:
        del row["images_per_second"]
    if [row["step"] for row in lines[0]] != [row["step"] for row in lines[1]]:
        found.append(f"metrics.jsonl has the steps {[row['step'] for row in lines[1]]}")
    found += [f"metrics.jsonl has {b} for {a}" for a, b in zip(*lines, strict=False) if a != b]
    grids = [sorted((run / "samples").glob("*.png"))[-1] for run in (one, other)]
    if grids[0].read_bytes() != grids[1].read_bytes():
        found.append("the last samples differ")
    return found


def leaks(soak: Soak) -> list[str]:
    """Processes and files that should not outlive the run; torch's own log and cache folders do not count."""
    processes = [f"process {process.pid}" for process in soak.processes()]
    half = [*soak.run.rglob("*.building"), *soak.run.rglob("*.tmp"), *soak.cache.rglob("*.building")]
    temporary = [path for path in soak.temporary.iterdir() if not path.name.startswith("torch")]
    return processes + [str(path) for path in [*half, *temporary]]


@contextmanager
def two_runs(rank_timeout: float) -> Iterator[tuple[Soak, Soak]]:
    """An undisturbed and a disturbed run; both are removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    runs = Soak(folder / "calm", rank_timeout), Soak(folder / "soak", rank_timeout)
    try:
        yield runs
    finally:
        for each in runs:
            each.kill(each.processes())
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long to disturb the run")
    arguments = parser.parse_args()
    with two_runs(rank_timeout=15) as (calm, soak):
        soak.disturb(cycle(Soak.DISTURBANCES), arguments.minutes * 60)
        steps = soak.last_step() + 20
        soak.finish(steps)
        calm.finish(steps)
        print(f"\n{steps} steps, disturbed for {arguments.minutes:g} minutes\n")
        print("\n".join(f"| {name} | {count} |" for name, count in soak.counts.items()))
        problems = differences(calm.run, soak.run) + leaks(soak)
    print("\n".join(problems) or "\nsame weights, average, moments, counters, lines and samples; nothing left behind")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
