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
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
import tyro
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.func import jvp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rectified_flow import randomness
from rectified_flow.data.catalog import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.joining import join_processes
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.flows.flow import Flow, expand
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import LEAST_DIVISOR, RectifiedFlow
from rectified_flow.flows.timesteps import LogitNormal, Uniform, UShaped
from rectified_flow.networks.conditions import Values
from rectified_flow.networks.unet import Unet
from rectified_flow.pictures import to_grid, write_picture
from rectified_flow.plots import draw_lines
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.training.callbacks import Callback
from rectified_flow.training.trainer import Trainer

IMAGE_SIZE = 32
RESULTS = Path(__file__).with_suffix(".jsonl")
CALLS = (1, 2, 4, 16)
CONTROL = "control"
DISTANCE = "efficientnet_lite0_{}_distance"


class StudyFlow(MeanFlow):
    """A mean flow with what the study tries beside the package's own settings.

    Args:
        share: earlier times are uniform shares of t.
        clean: the network predicts the clean picture, and ``u = (x - network) / t`` (arXiv:2601.22158).
        along: which equation the average velocity is learned from: the derivative by the later time (``eulerian``,
            mean flow's own), or by the earlier one (``lagrangian``; Boffi et al. 2025, arXiv:2505.18825).
        teacher: a trained network whose velocity takes the place of the data's.
        growing: intervals grow to their length over the first four fifths of the training.
        paths: a teacher's solutions from noise to data, ``[n, steps + 1, ...]``: intervals are between their points.
        whole: share of the intervals that are whole paths.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        share: bool = False,
        clean: bool = False,
        along: Literal["eulerian", "lagrangian"] = "eulerian",
        teacher: nn.Module | None = None,
        growing: bool = False,
        paths: Tensor | None = None,
        whole: float = 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(network, **settings)
        self.share, self.clean, self.along = share, clean, along
        self.teacher = None if teacher is None else (teacher,)  # in a tuple, its weights are nobody's to train
        self.growing, self.paths, self.whole = growing, paths, whole

    def forward(self, **batch: Any) -> Tensor:
        x_0, noise, conditions = self.draw_batch(batch)
        t = self.time_distribution.sample(len(x_0), x_0.device)
        if self.paths is not None:
            return self._follow(x_0, noise, t, self.paths)
        earlier = self.earlier_distribution.sample(len(x_0), x_0.device, "earlier time")
        if self.share:
            earlier = t * Uniform().sample(len(x_0), x_0.device, "earlier time")
        if self.growing:
            earlier = t - (t - earlier) * min(1.0, self.progress / 0.8)
        count = round(self.mean_fraction * len(x_0))
        r = torch.cat((torch.minimum(earlier[:count], t[:count]), t[count:]))
        step = self.variant.step(self.progress)
        loss, mean_square = self.loss(x_0, noise, t, r, conditions, count, step > 0, t.new_tensor(step))
        self.logged = {"unweighted_loss": mean_square}
        return loss

    def _follow(self, x_0: Tensor, noise: Tensor, t: Tensor, paths: Tensor) -> Tensor:
        """The loss on the average velocities of paths, and in the other rows on the velocity."""
        count, steps = round(self.mean_fraction * len(x_0)), paths.shape[1] - 1
        which = randomness.randint("path", len(paths), (len(x_0),), x_0.device)[:count]
        end = 1 + randomness.randint("end", steps, (len(x_0),), x_0.device)[:count]
        start = (randomness.rand("start", (len(x_0),), x_0.device)[:count] * end).long()
        whole = torch.arange(count) < round(self.whole * count)
        start, end = torch.where(whole, 0, start), torch.where(whole, steps, end)
        x_t, x_r = paths[which, steps - end].float(), paths[which, steps - start].float()
        time, earlier = end / steps, start / steps
        x = torch.cat((x_t, torch.lerp(x_0, noise, expand(t, x_0))[count:]))
        target = torch.cat(((x_t - x_r) / expand(time - earlier, x_t), (noise - x_0)[count:]))
        u = self.average_velocity(x, torch.cat((time, t[count:])), torch.cat((earlier, t[count:])))
        square = (u - target).square().flatten(1).sum(dim=1)
        self.logged = {"unweighted_loss": square.detach().mean() / u[0].numel()}
        return ((square.detach() + self.weight_epsilon) ** -self.weight_power * square).mean()

    def average_velocity(self, x: Tensor, t: Tensor, r: Tensor, **conditions: Tensor) -> Tensor:
        output = super().average_velocity(x, t, r, **conditions)
        return (x - output) / expand(t, x).clamp(min=LEAST_DIVISOR) if self.clean else output

    def velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        if self.teacher is None:
            return self.average_velocity(x, t, t, **conditions)
        output = self.teacher[0](x, t).float()
        return (x - output) / expand(t, x).clamp(min=LEAST_DIVISOR) if self.clean else output

    def _guide(self, v: Tensor, x: Tensor, t: Tensor, conditions: Values) -> Tensor:
        return v if self.teacher is None else self.velocity(x, t)

    def _blend(self, v: Tensor, x: Tensor, t: Tensor, conditions: Values) -> Tensor:
        return v if self.teacher is not None else super()._blend(v, x, t, conditions)

    def _correction(
        self,
        u: Tensor,
        x: Tensor,
        v: Tensor,
        t: Tensor,
        r: Tensor,
        conditions: Values,
        step: Tensor | None,
        kept: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        if self.along == "eulerian":
            return super()._correction(u, x, v, t, r, conditions, step, kept)
        gap = expand(t - r, x)
        _, slope, *_ = jvp(lambda r: self.average_velocity(x, t, r), (r,), (torch.ones_like(r),))
        return -gap * slope, self.velocity(x - gap * u, r)


class Reflow(RectifiedFlow):
    """A rectified flow between the ends of paths, see :class:`StudyFlow`."""

    def __init__(self, network: nn.Module, *, paths: Tensor, **settings: Any) -> None:
        super().__init__(network, **settings)
        self.paths = paths

    def draw_batch(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Values]:
        x_0, _, conditions = super().draw_batch(batch)
        which = randomness.randint("path", len(self.paths), (len(x_0),), x_0.device)
        return self.paths[which, -1].float(), self.paths[which, 0].float(), conditions


class AlongVelocity(RectifiedFlow):
    """The rectified flow of a mean flow's ``u(x, t, t)``."""

    def __init__(self, flow: MeanFlow) -> None:
        super().__init__(flow.network, space=flow.space)
        self.flow = (flow,)

    def exact_velocity(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        return self.flow[0].average_velocity(x, t, t, **conditions)


@dataclass(frozen=True)
class Factor:
    """One deviation from the default.

    Args:
        expected: what it was expected to do, written down before it ran.
        flow: settings of :class:`StudyFlow`; None trains a rectified flow.
        run: settings of the run.
        after: the factor whose trained weights it starts from; None starts from nothing.
        taught: whether the flow of these weights is its teacher, too.
        wakes: whether the interval's embedding starts at random instead of zero.
        rectified: settings of the rectified flow.
        length: of the training, as a multiple of the flag.
        paths: how many the flow of these weights draws to train on, as a share of the training images.
    """

    expected: str
    flow: Mapping[str, Any] | None = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    after: str | None = "rectified"
    taught: bool = False
    wakes: bool = False
    rectified: Mapping[str, Any] = field(default_factory=dict)
    length: float = 1
    paths: float = 0


ALIKE = {"weight_power": 0.0}
UNCLIPPED = {"max_grad_norm": 3.0 * IMAGE_SIZE**2}
"""With rows weighted alike, the loss is a sum over elements: the limit of a mean, as rectified flow has it."""
LAGRANGIAN = {"along": "lagrangian"}
SHARES = {"share": True}
LOWER = {"learning_rate": 1e-3, "lr_decay": "cosine"}
LOWERED = ", half the rate, falling to 0"
DRAWN: dict[str, Any] = {"run": LOWER, "paths": 1 / 8, "length": 1.08}
"""Drawing and training cost as much as the training of a mean flow on as many images as the flag says."""
FACTORS = {
    "rectified": Factor("the reference", None, after=None, length=4),
    "rectified, clean": Factor(
        "a little behind rectified", None, after=None, rectified={"prediction": "clean"}, length=4
    ),
    "default": Factor("better in one call, worse at 16"),
    "velocity rows only": Factor("better than rectified at 16 calls; if not, it is the restart", {"mean_fraction": 0}),
    "a quarter of the rate": Factor(
        "better at 16 calls, if the rate, and not the objective, spoils the velocity", run={"learning_rate": 5e-4}
    ),
    "the rate falls to 0": Factor(
        "better in every column: what is left is noise of the updates", run={"lr_decay": "cosine"}
    ),
    "a quarter of the rate, taught": Factor("better than without a teacher", run={"learning_rate": 5e-4}, taught=True),
    LOWERED.removeprefix(", "): Factor("the best of both", run=LOWER),
    "paths": Factor("better in one call: nothing but regression, and no noise in the target", **DRAWN),
    "whole paths": Factor("the best in one call: what this network can do there", {"whole": 1.0}, **DRAWN),
    "half whole paths": Factor("in one call as whole paths, at 2 to 16 as paths", {"whole": 0.5}, **DRAWN),
    "half whole paths, all of the rows": Factor(
        "no worse: paths have velocities, too", {"whole": 0.5, "mean_fraction": 1.0}, **DRAWN
    ),
    "half whole paths, all of the rows, a quarter as many": Factor(
        "the best: cheaper to draw, and trained for longer",
        {"whole": 0.5, "mean_fraction": 1.0},
        **(DRAWN | {"paths": 1 / 32, "length": 1.58}),
    ),
    "half whole paths, twice the rate": Factor(
        "better in one call", {"whole": 0.5}, **(DRAWN | {"run": {"lr_decay": "cosine"}})
    ),
    "whole paths, all of the rows, a quarter as many": Factor(
        "better in one call, worse at 2 and 4",
        {"whole": 1.0, "mean_fraction": 1.0},
        **(DRAWN | {"paths": 1 / 32, "length": 1.58}),
    ),
    "half whole paths, a quarter as many": Factor(
        "worse in one call: they are learned by heart", {"whole": 0.5}, **(DRAWN | {"paths": 1 / 32, "length": 1.58})
    ),
    "reflow": Factor(
        "the best in one call so far",
        None,
        rectified={"distance": "pseudo_huber", "time_distribution": UShaped()},
        **DRAWN,
    ),
    "reflow, a quarter as many": Factor(
        "better: cheaper to draw, and trained for longer",
        None,
        rectified={"distance": "pseudo_huber", "time_distribution": UShaped()},
        **(DRAWN | {"paths": 1 / 32, "length": 1.58}),
    ),
    "shares, power 0": Factor("better at 16 calls; the best on a toy", SHARES | ALIKE, UNCLIPPED),
    "lagrangian": Factor("better in one call: no derivative by x", LAGRANGIAN),
    "lagrangian, shares, power 0": Factor(
        "better than shares, power 0, in one call", LAGRANGIAN | SHARES | ALIKE, UNCLIPPED
    ),
    "lagrangian, shares, power 0, taught": Factor(
        "the best in one call", LAGRANGIAN | SHARES | ALIKE, UNCLIPPED, taught=True
    ),
    "clean": Factor("better in one call: nothing is left of the noise", {"clean": True}, after="rectified, clean"),
    "clean, taught": Factor("better than clean", {"clean": True}, after="rectified, clean", taught=True),
} | {
    name + LOWERED: replace(factor, run={**LOWER, **factor.run})
    for name, factor in {
        "mean_flow": Factor("as the default, or a little worse", {"objective": "mean_flow"}),
        "so_flow": Factor("as the default", {"objective": "so_flow"}),
        "alpha_flow": Factor("better at 16 calls: a curriculum", {"objective": "alpha_flow"}),
        "growing": Factor("better at 16 calls: short intervals first (arXiv:2511.19065)", {"growing": True}),
        "shares": Factor("better at 2 to 16 calls: intervals of all lengths are seen", SHARES),
        "a quarter of the rows": Factor("better at 16 calls, worse in one", {"mean_fraction": 0.25}),
        "three quarters of the rows": Factor("worse at 16 calls", {"mean_fraction": 0.75}),
        "rectified's times": Factor("little difference", {"time_distribution": LogitNormal()}),
        "late times": Factor(
            "better in one call: t = 1 is seen more often", {"time_distribution": LogitNormal(0.8, 1.6)}
        ),
        "no clipping": Factor("worse: norms of 2 to 6 are common", run={"max_grad_norm": 0.0}),
        "taught": Factor("better: no noise of the data in the target", taught=True),
        "bf16": Factor("no difference", run={"mixed_precision": "bf16"}),
        "awake embedding": Factor("no difference", wakes=True),
        "long memory": Factor("little difference", run={"adam_betas": (0.9, 0.999)}),
        "from nothing": Factor("behind: the velocity is learned late", after=None, length=5),
    }.items()
}


KNOWN_AS = {"half whole paths, all of the rows, a quarter as many": "from a teacher"}
"""Short names of factors in plots."""


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
            "dim": flags.dim,
            "num_samples": flags.num_samples,
        }

    @property
    def folder(self) -> Path:
        words = f"{Path(self.flags.data).name} {self.flags.dim} {self.flags.images} {self.name} {self.seed}"
        return self.flags.output_dir / "".join(c if c.isalnum() else "-" for c in words)

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
        side = IMAGE_SIZE
        network = Unet(self.flags.dim, (1, 2, 3), image_size=side, attention_sides=(8,), blocks_per_level=1, dropout=0)
        space = Pixels((3, side, side), horizontal_flip=True)
        if self.factor.wakes:
            nn.init.normal_(network.time_embedding.interval.weight, std=0.05)
        if self.before is not None:
            checkpoint.load_averaged(network, checkpoint.resolve(self.before.config().checkpoints))
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
    return open_dataset(flags.data, path, image_size=IMAGE_SIZE)


def measure(case: Case) -> None:
    """Train and evaluate one case, unless that was done before, and append its result."""
    if find(case) is not None:
        return
    torch.set_num_threads(1)
    state = join_processes()
    flow, seconds = train(case)
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
            grids.append(to_grid(flow.space.draw(each.sample(36, **how))))
    write_picture(case.folder.with_suffix(".png"), torch.cat([torch.as_tensor(grid) for grid in grids], dim=1).numpy())
    line = {**case.key, "seconds_a_step": seconds and round(seconds, 4), "distances": result}
    with flags.results.open("a") as file:
        file.write(json.dumps(line) + "\n")


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
        for needed in (True, False):  # those that others start from come first
            firsts = {case.factor.after for case in cases}
            with ProcessPoolExecutor(flags.workers, mp_context=spawn, max_tasks_per_child=1) as pool:
                some = [case for case in cases if (case.name in firsts) == needed]
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
    rows = [row for row in rows if row["data"] == Path(flags.data).name and row["seed"] in flags.seeds]
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
