"""Why does mean flow fall behind? Short trainings that differ from the default in one factor, and their distances.

A rectified flow is trained first, four times as long as the others. Each factor then goes on from its weights, or from
nothing, with the same pictures and the same seed, in float32 on one thread. Pictures of 1, 2, 4 and 16 calls are
compared with the training pictures, and so are those of 16 Euler steps along the mean flow's own velocity `u(x, t, t)`:
where this control is bad, the network has unlearned the velocity, and where it is good, intervals are to blame.

Results are appended to one_step_study.jsonl as they come, and `--table` prints them. A study that was stopped goes on
where it was. Needs `pip install -e ".[evaluation]"`.
"""

import copy
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from threading import Thread
from typing import Any

import torch
import tyro
from accelerate.utils import set_seed
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from one_step_factors import FACTORS, KNOWN_AS, Factor
from one_step_flows import AlongVelocity, Reflow, StudyFlow

from rectified_flow import randomness
from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.join import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import draw_lines, to_grid, write_picture
from rectified_flow.training.callbacks import Callback
from rectified_flow.training.trainer import Trainer

IMAGE_SIZE = 32
RESULTS = Path(__file__).parent.parent / "studies/results" / "one_step_factors.jsonl"
CALLS = (1, 2, 4, 16)
CONTROL = "control"
DISTANCE = "efficientnet_lite0_{}_distance"


@dataclass(frozen=True)
class Flags:
    factors: tuple[str, ...] = tuple(FACTORS)
    """Rows of the table, in this order."""
    data: str = "synthetic-flowers"
    """A value of --dataset, or a folder."""
    seeds: tuple[int, ...] = (0, 1)
    """Training seeds."""
    images: int = 8192
    """Training images."""
    image_size: int = IMAGE_SIZE
    """Side of the pictures [px]."""
    dim: int = 24
    """Channels of the Unet at full resolution."""
    num_samples: int = 256
    """Generated images per distance."""
    workers: int = 1
    """Number of trainings at once, with one thread each."""
    output_dir: Path = Path("runs/one-step-study")
    """Folder for runs."""
    results: Path = RESULTS
    """File to which results are appended."""
    table: bool = False
    """Print the table of what is there, and train nothing."""
    curve: Path | None = None
    """Plot the distances of what is there over the number of images into this PNG file, and train nothing."""


@dataclass(frozen=True)
class Case:
    """One training: a factor, a seed and the flags."""

    name: str
    seed: int
    flags: Flags

    @property
    def factor(self) -> Factor:
        return FACTORS[self.name]

    @property
    def key(self) -> dict[str, Any]:
        """What identifies its result."""
        flags = self.flags
        return {
            "factor": self.name,
            "seed": self.seed,
            "data": Path(flags.data).name,
            "images": flags.images,
            "image_size": flags.image_size,
            "dim": flags.dim,
            "num_samples": flags.num_samples,
        }

    @property
    def folder(self) -> Path:
        flags = self.flags
        words = f"{Path(flags.data).name} {flags.image_size} {flags.dim} {flags.images} {self.name} {self.seed}"
        return flags.output_dir / "".join(c if c.isalnum() else "-" for c in words)

    @property
    def before(self) -> "Case | None":
        return None if self.factor.after is None else Case(self.factor.after, self.seed, self.flags)

    def config(self) -> TrainingConfig:
        settings: dict[str, Any] = {
            "batch_size": 8,
            "learning_rate": 2e-3,
            "lr_warmup_steps": 100,
            "ema_decay": 0.995,
            "mixed_precision": "no",
        }
        settings |= self.factor.run
        steps = round(self.factor.length * self.flags.images / 8)  # as many updates, whatever the batch
        return TrainingConfig(
            **settings,
            seed=self.seed,
            train_num_steps=steps,
            num_samples=0,
            save_every=128,
            keep_checkpoints=1,
            log_every=32,
            output_dir=self.folder,
        )

    def build(self) -> Flow:
        """The flow to train, with the weights that it starts from."""
        side = self.flags.image_size
        network = Unet(
            self.flags.dim, (1, 2, 3), image_size=side, attention_sides=(side // 4,), blocks_per_level=1, dropout=0
        )
        space = Pixels((3, side, side), horizontal_flip=True)
        if self.before is not None:
            checkpoint.load_averaged(network, checkpoint.resolve(self.before.config().checkpoints))
        if self.factor.wakes:  # after the weights, which are those of a network that knew no intervals
            nn.init.normal_(network.time_embedding.interval.weight, std=0.05)
        paths = self.draw_paths(RectifiedFlow(network, space=space)) if self.factor.paths else None
        if self.factor.flow is None:
            settings = {"space": space, **self.factor.rectified}
            return RectifiedFlow(network, **settings) if paths is None else Reflow(network, paths=paths, **settings)
        teacher = copy.deepcopy(network).requires_grad_(False).eval() if self.factor.taught else None
        return StudyFlow(network, space=space, teacher=teacher, paths=paths, **self.factor.flow)

    def draw_paths(self, flow: RectifiedFlow) -> Tensor:
        """Paths of the flow from noise to data, float16 ``[n, 17, 3, s, s]``."""
        points: list[Tensor] = []
        for first in range(0, round(self.factor.paths * self.flags.images), 32):
            with randomness.deterministic(randomness.Samples(self.seed + 1, range(first, first + 32))):
                flow.sample(32, steps=16, solver="euler", watch=lambda _t, x: points.append(x.half()))
        return torch.cat([torch.stack(points[i : i + 17], dim=1) for i in range(0, len(points), 17)])


class Clock(Callback):
    """Processor time of the steps of this process; a resumed run has others before."""

    began: float = 0.0
    first: int = 0
    seconds: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        self.began, self.first = time.process_time(), trainer.state.step

    def on_end(self, trainer: Trainer) -> None:
        self.seconds = (time.process_time() - self.began) / max(1, trainer.state.step - self.first)


def train(case: Case) -> tuple[Flow, float | None]:
    """Train one case, from its newest checkpoint if there is one; returns its averaged flow and its seconds a step."""
    set_seed(case.seed)
    clock = Clock()
    trainer = Trainer(case.build(), pictures(case.flags), case.config(), callbacks=[clock])
    trainer.train()
    flow = trainer.averaged_flow
    assert isinstance(flow, Flow)
    return flow, clock.seconds


def pictures(flags: Flags) -> ImageDataset:
    path = Path(flags.data) if Path(flags.data).exists() else None
    return open_dataset(flags.data, path, image_size=flags.image_size)


def measure(case: Case) -> None:
    """Train one case, which others may start from, and append its result unless there is one."""
    torch.set_num_threads(1)
    state = join_processes()
    flow, seconds = train(case)
    if find(case) is not None:
        return
    flags = case.flags
    evaluator = Evaluator(
        pictures(flags), "efficientnet_lite0", state, num_samples=flags.num_samples, seed=case.seed, batch_size=32
    )
    result: dict[str, Any] = {}
    runs: dict[str, tuple[Flow, dict[str, Any]]] = {
        str(calls): (flow, {"steps": calls, **({"solver": "euler"} if isinstance(flow, RectifiedFlow) else {})})
        for calls in CALLS
    }
    if isinstance(flow, MeanFlow):
        runs[CONTROL] = AlongVelocity(flow), {"steps": CALLS[-1], "solver": "euler"}
    grids = []
    for name, (each, how) in runs.items():
        result[name] = evaluator.distances(evaluator.generate(each, **how))
        with randomness.deterministic(randomness.Samples(0, range(36))):
            grids.append(to_grid(flow.space.render(each.sample(36, **how))))
    write_picture(case.folder.with_suffix(".png"), torch.cat([torch.as_tensor(grid) for grid in grids], dim=1).numpy())
    line = {**case.key, "seconds_a_step": seconds and round(seconds, 4), "distances": result}
    with flags.results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def end_with_launcher() -> None:
    """Have this worker end when the study is killed; its training continues from its newest checkpoint."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def find(case: Case) -> dict[str, Any] | None:
    """The result of a case, if there is one."""
    file = case.flags.results
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((row for row in rows if case.key.items() <= row.items()), None)


def main(flags: Flags) -> None:
    if flags.curve is not None:
        draw_curve(flags, flags.curve)
        return
    cases = [Case(name, seed, flags) for seed in flags.seeds for name in flags.factors]
    if not flags.table:
        flags.output_dir.mkdir(parents=True, exist_ok=True)
        pictures(flags)
        spawn = multiprocessing.get_context("spawn")
        missing = [case for case in cases if find(case) is None]
        firsts = list(dict.fromkeys(case.before for case in missing if case.before is not None))
        for some in (firsts, [case for case in missing if case not in firsts]):
            with ProcessPoolExecutor(
                flags.workers, mp_context=spawn, max_tasks_per_child=1, initializer=end_with_launcher
            ) as pool:
                for done in [pool.submit(measure, case) for case in some]:
                    done.result()
    print_table(flags)


def print_table(flags: Flags) -> None:
    """Means over seeds of Fréchet and kernel distances."""
    columns = [*map(str, CALLS), CONTROL]
    print("| factor | seeds | " + " | ".join(columns) + " | kernel: " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * 2 * len(columns))
    for name in flags.factors:
        found = [row for seed in flags.seeds if (row := find(Case(name, seed, flags))) is not None]
        if not found:
            continue
        cells = []
        for kind, digits in (("frechet", 4), ("kernel", 3)):
            for column in columns:
                values = [
                    row["distances"][column][DISTANCE.format(kind)] for row in found if column in row["distances"]
                ]
                cells.append(f"{mean(values):.{digits}g}" if values else "")
        print(f"| {name} | {len(found)} | " + " | ".join(cells) + " |")


def draw_curve(flags: Flags, path: Path) -> None:
    """Distances over lengths of training on doubly logarithmic axes, and the powers that fit them."""
    rows = [json.loads(line) for line in flags.results.read_text().splitlines()]
    wanted = {"data": Path(flags.data).name, "image_size": flags.image_size, "dim": flags.dim}
    rows = [row for row in rows if wanted.items() <= row.items() and row["seed"] in flags.seeds]
    lines = {}
    for name in flags.factors:
        of_factor = sorted((row for row in rows if row["factor"] == name), key=lambda row: row["images"])
        for calls in (1, 4, 16):
            line = {row["images"]: row["distances"][str(calls)][DISTANCE.format("frechet")] for row in of_factor}
            logs = torch.tensor([*line.items()], dtype=torch.float64).log()
            slope = float(torch.linalg.lstsq(torch.stack((logs[:, 0], logs[:, 0] ** 0), dim=1), logs[:, 1]).solution[0])
            label = f"{KNOWN_AS.get(name, name)}, {calls} call{'s' * (calls > 1)}: power {slope:.2f}"
            lines[label] = list(line), list(line.values())
            print(label)
    draw_lines(path, lines, Path(flags.data).name, "images", "Fréchet distance", log_x=True, log_y=True)


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__, use_underscores=True))
