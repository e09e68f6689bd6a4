"""Measure the effect of each setting on image quality: short runs that differ in one flag, and their distances.

Every row is a run of train_oxford.py and of evaluate.py on one thread, all from the same seed. Rows that exist already
are not run again, so the table can be reprinted or extended at any time.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

PROJECT = Path(__file__).resolve().parent.parent
BASE = (
    "--image_size 32 --dim 16 --dim_mults 1 2 4 --dropout 0 --batch_size 32 --learning_rate 1e-3 --lr_warmup_steps 50 "
    "--ema_decay 0.99 --mixed_precision bf16 --num_samples 0 --save_every 0 --log_every 100"
)
VARIATIONS = {
    "base": "",
    "times uniform": "--time_distribution uniform",
    "times logit-normal(-1.2, 1.2)": "--time_mean -1.2",
    "times logit-normal(0, 1)": "--time_mean 0 --time_std 1",
    "clean prediction": "--prediction clean",
    "learning rate 3e-4": "--learning_rate 3e-4",
    "learning rate 3e-3": "--learning_rate 3e-3",
    "no warm-up": "--lr_warmup_steps 0",
    "no flips": "--no_horizontal_flip",
    "dropout 0.1": "--dropout 0.1",
    "coupling ot": "--coupling ot",
    "coupling immiscible": "--coupling immiscible",
}
DISTANCES = ("frechet_distance", "kernel_distance")
FEATURES = ("efficientnet_lite0", "colours_8x8")


@dataclass(frozen=True)
class Flags:
    data: tuple[str, ...] = ("synthetic-flowers",)
    """Datasets: values of --dataset, or folders."""
    variations: tuple[str, ...] = tuple(VARIATIONS)
    """Rows of the table."""
    base: str = BASE
    """Flags of train_oxford.py for all rows, written as --base="...". Another base needs another --output_dir."""
    train_num_steps: int = 600
    """Training steps per run."""
    num_samples: int = 1000
    """Generated images per distance."""
    steps: int = 4
    """Sampling steps, of two network calls each."""
    seed: int = 0
    """Seed of training and sampling."""
    workers: int = 1
    """Number of runs at once, with one thread each."""
    output_dir: Path = Path("runs/defaults")
    """Folder for the runs."""


def measure(data: str, variation: str, flags: Flags) -> dict[str, float]:
    """Train and evaluate one row, unless that was done before, and return its distances."""
    name = "".join(c if c.isalnum() else "-" for c in f"{Path(data).name} {variation} {flags.train_num_steps}")
    run = flags.output_dir / f"{name}-{flags.seed}"
    if not (run / "evaluation.json").exists():
        where = ["--dataset_path", data] if Path(data).exists() else ["--dataset", data]
        train = [*where, *flags.base.split(), *VARIATIONS[variation].split()]
        train += ["--train_num_steps", str(flags.train_num_steps), "--seed", str(flags.seed)]
        _run("train_oxford.py", [*train, "--output_dir", str(run)], run)
        evaluate = ["--checkpoint", str(run), "--num_samples", str(flags.num_samples), "--steps", str(flags.steps)]
        _run("evaluate.py", [*evaluate, "--feature_network", FEATURES[0], "--mixed_precision", "bf16"], run)
    result = json.loads((run / "evaluation.json").read_text())[0]
    if (result["num_samples"], result["steps"]) != (flags.num_samples, flags.steps):
        sys.exit(
            f"{run} was evaluated with different --num_samples or --steps: remove its evaluation.json, or pass the "
            "same values"
        )
    distances: dict[str, float] = result["distances"]
    return distances


def _run(program: str, arguments: list[str], run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / f"{program}.log").open("w") as log:
        command = [sys.executable, str(PROJECT / program), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def main(flags: Flags) -> None:
    rows = [(data, variation) for data in flags.data for variation in flags.variations]
    columns = [f"{feature}_{distance}" for feature in FEATURES for distance in DISTANCES]
    print("| data | setting | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    with ThreadPoolExecutor(flags.workers) as pool:
        results = pool.map(lambda row: measure(row[0], row[1], flags), rows)
        for (data, variation), distances in zip(rows, results, strict=True):
            numbers = " | ".join(f"{distances[column]:.4g}" for column in columns)
            print(f"| {Path(data).name} | {variation} | {numbers} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
