"""Cost and benefit of several processes: the communication of a step, and previews that the processes share.

Measures wall time of the real Trainer on one process and on several, launched by torchrun in turn. The machine must
have a core or a GPU per process, and must be idle otherwise.
"""

import contextlib
import io
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from step_parts import synchronized
from turns import Row, Times, describe_machine, is_over, print_rows, ratio

from rectified_flow.cli.build import build_flow
from rectified_flow.cli.config import NetworkConfig, TrainConfig
from rectified_flow.data.config import DataConfig
from rectified_flow.data.open import open_dataset
from rectified_flow.distributed.join import join_processes
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.training.trainer import Trainer

PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Flags:
    """The flags of the program."""

    image_size: int = 32
    """Side of the images [px]."""
    dim: int = 32
    """Channels of the Unet at full resolution."""
    batch_size: int = 16
    """Images per process."""
    processes: int = 2
    """Number of processes to compare with one process."""
    num_samples: int = 64
    """Images in the preview."""
    sample_steps: int = 16
    """Sampling steps of the preview."""
    rounds: int = 3
    """Number of launches per number of processes."""
    steps: int = 5
    """Timed steps per launch, of which the median counts."""
    minutes: float = math.inf
    """Start no further round once this time is over [minutes]."""
    write_to: Path | None = None
    """For internal use: measure in the launched processes, and write the results to this file."""


def measure_here(flags: Flags, write_to: Path) -> None:
    """Measure in every process, and write the results from the main process."""
    state = join_processes()
    torch.set_num_threads(1)
    run = TrainingConfig(
        batch_size=flags.batch_size,
        num_samples=flags.num_samples,
        sample_steps=flags.sample_steps,
        output_dir=write_to.parent / "run",
    )
    config = TrainConfig(DataConfig(image_size=flags.image_size), NetworkConfig(dim=flags.dim), run=run)
    pictures = open_dataset("synthetic-flowers", image_size=flags.image_size)
    trainer = Trainer(build_flow(config, {}), pictures, run)
    batches = trainer._warm_up_ddp(trainer._batches())

    def step() -> None:
        trainer.stepper.take(batches)
        trainer.stepper.finish_pending()

    def step_apart() -> None:
        with trainer.accelerator.no_sync(trainer.stepper.wrapped):
            step()

    step()
    trainer.preview()
    together, apart = zip(*((synchronized(step), synchronized(step_apart)) for _ in range(flags.steps)), strict=True)
    seconds = {
        "step": statistics.median(together),
        "step apart": statistics.median(apart),
        "preview": synchronized(trainer.preview),
        "gradient": 4 * sum(p.numel() for p in trainer.state.parameters.values()),
    }
    if state.is_main_process:
        write_to.write_text(json.dumps(seconds))


def measure_rows(flags: Flags) -> list[Row]:
    """Measure both numbers of processes in turns."""
    results: dict[int, list[dict[str, float]]] = {1: [], flags.processes: []}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        for round_ in range(flags.rounds):
            if is_over(began, flags.minutes) and round_ > 0:
                break
            for processes, found in results.items():
                answer = Path(folder) / "answer.json"
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += ["--nproc_per_node", str(processes), __file__, "--write_to", str(answer)]
                for name in ("image_size", "dim", "batch_size", "num_samples", "sample_steps", "steps"):
                    command += [f"--{name}", str(getattr(flags, name))]
                run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=PROJECT)
                if run.returncode != 0:
                    raise RuntimeError(f"{processes} processes failed:\n{run.stderr}")
                found.append(json.loads(answer.read_text()))
    times = {
        (processes, what): Times([each[what] for each in found], {})
        for processes, found in results.items()
        for what in ("step", "step apart", "preview")
    }
    many, megabytes = flags.processes, results[1][0]["gradient"] / 1e6

    def compare(what: str, processes: int = 1, other: str | None = None) -> str:
        return str(ratio(times[many, what], times[processes, other or what]))

    size = f"{flags.batch_size} images of {flags.image_size} px per process; {megabytes:.1f} MB of gradients per step"
    preview = f"{flags.num_samples} images, {flags.sample_steps} sampling steps"
    return [
        Row(
            f"a step on {many} processes",
            "a step on 1 process with the same batch per process",
            "<= 1.1",
            compare("step"),
            size,
        ),
        Row(
            f"a step on {many} processes",
            f"on {many} processes without gradient all-reduce",
            "",
            compare("step", many, "step apart"),
            size,
        ),
        Row(f"a preview on {many} processes", "on 1 process", "<= 0.6", compare("preview"), preview),
    ]


def main(flags: Flags) -> None:
    """Measure, and print the table."""
    if flags.write_to is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            measure_here(flags, flags.write_to)
        return
    print(describe_machine())
    print(print_rows(measure_rows(flags)))


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
