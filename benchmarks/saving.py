"""What a checkpoint costs the training: a step that saves beside one that does not, and beside saving on the spot.

Rounds are interleaved and medians printed, as ratios to a plain step. On a machine with a GPU it measures there.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import RectifiedFlow, Trainer, TrainingConfig, Unet, open_dataset


@dataclass(frozen=True)
class Flags:
    image_size: int = 32
    """Side of the images [px]."""
    dim: int = 64
    """Channels of the Unet."""
    batch_size: int = 16
    """Images a step."""
    rounds: int = 7
    """How often each is measured."""


def main(flags: Flags) -> None:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config = TrainingConfig(
            image_size=flags.image_size, batch_size=flags.batch_size, dim=flags.dim, output_dir=Path(folder)
        )
        dataset = open_dataset("synthetic-flowers", image_size=flags.image_size)
        trainer = Trainer(RectifiedFlow(Unet(flags.dim, image_size=flags.image_size)), dataset, config)
        trainer.record.folder.claim(print)
        trainer.record.open()
        assert trainer.record.saver is not None
        saver = trainer.record.saver
        batches = trainer._batches()

        def step() -> None:
            trainer.stepper.take(batches)
            trainer.stepper.settle()

        def step_and_save() -> None:
            step()
            trainer._save()

        def step_and_wait() -> None:
            step_and_save()
            saver.wait()

        step()
        times: dict[str, list[float]] = {}
        for _ in range(flags.rounds):
            for name, action in (("plain step", step), ("step that saves", step_and_save), ("step beside", step)):
                times.setdefault(name, []).append(seconds(action))
            saver.wait()
            times.setdefault("step that waits for the disk", []).append(seconds(step_and_wait))
        size = sum(file.stat().st_size for file in (saver.wait() or Path()).iterdir())
    plain = statistics.median(times["plain step"])
    parameters = sum(parameter.numel() for parameter in trainer.flow.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {size / 2**20:.0f} MiB a checkpoint, {trainer.device.type}")
    for name, values in times.items():
        print(f"{name:<30} {statistics.median(values):6.2f} s {statistics.median(values) / plain:6.2f}")


def seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
