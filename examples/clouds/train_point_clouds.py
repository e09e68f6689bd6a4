"""Train a flow between sets of points: digits as clouds, in the plane, on the sphere or on the flat torus.

The clouds are drawn from scikit-learn's handwritten digits, which need no download. Points of the noise are paired with
points of the digits by optimal transport. While it trains, the distance between generated and held-out clouds is
measured, and so is the share of clouds that a classifier takes for the digit asked for. Needs
`pip install -e ".[points]"`.
"""

from rectified_flow.cli.programs import run

if __name__ == "__main__":  # before the rest, which is imported by its name
    run("train_point_clouds:train", "train_point_clouds:CloudFlags", __doc__)

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import Tensor

from geometry import Euclidean, FlatTorus, Geometry, Sphere
from point_clouds import PointClouds
from points import Points
from rectified_flow import Labels, Measurement, Trainer, TrainingConfig, randomness
from rectified_flow.cli.parts import join
from rectified_flow.cli.train_flags import ProgramConfig
from rectified_flow.errors import require
from rectified_flow.flags import AtLeastTwo, Flags, Fraction, Positive, recorded
from rectified_flow.flows.couplings import optimal_pairs
from rectified_flow.flows.solvers import Guidance
from rectified_flow.system.files import replace_file
from rectified_flow.system.pictures import draw_lines
from riemannian import PointCoupling, RiemannianFlow, shares
from set_transformer import SetTransformer
from transport import cloud_costs

DIGITS, SIDE = 10, 8
GEOMETRIES: dict[str, Geometry] = {"plane": Euclidean(2), "sphere": Sphere(3), "torus": FlatTorus(2)}
EXTENT = {"plane": 2.0, "sphere": 1.2, "torus": 0.4}
"""Half of the side of a digit: in the plane, in radians, and as a share of the way around."""
TRANSPORT: dict[str, Any] = {"regularisation": 0.02, "tolerance": 1e-2, "max_iterations": 500}


@dataclass(frozen=True)
class CloudConfig(Flags):
    """The clouds and the network."""

    geometry: Literal["plane", "sphere", "torus"] = "plane"
    """Where the points are."""
    points: AtLeastTwo = 48
    """Points of a cloud, at most; the least is half of that."""
    point_coupling: PointCoupling = "drawn"
    """Which point of the noise each point comes from."""
    coupling: Literal["independent", "ot"] = "independent"
    """Which noise each cloud is trained with: any, or the best match over the global batch."""
    condition_dropout: Fraction = 0.1
    """Share of clouds that are trained without their digit, for guidance."""
    width: Positive = 96
    """Channels of a point."""
    layers: Positive = 3
    """Layers of attention."""
    guidance_scale: float = 1.0
    """Guidance of the clouds that are measured."""
    measure_every: Positive = 500
    """Steps between measurements."""
    measured_clouds: Positive = 100
    """Clouds that are measured, a multiple of 10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % 32 == 0, f"--width is {self.width}; it must be a multiple of 32")
        require(
            self.measured_clouds % DIGITS == 0 and self.measured_clouds <= 500,
            f"--measured_clouds is {self.measured_clouds}; it must be a multiple of {DIGITS}, at most 500",
        )


@dataclass(frozen=True)
class CloudFlags:
    clouds: CloudConfig = field(default_factory=CloudConfig)
    run: TrainingConfig = field(
        default_factory=partial(
            TrainingConfig,
            batch_size=64,
            train_num_steps=4000,
            learning_rate=1e-3,
            lr_warmup_steps=100,
            lr_decay="cosine",
            ema_decay=0.995,
            num_samples=0,
            output_dir=Path("runs/point-clouds"),
        )
    )
    program: ProgramConfig = field(default_factory=ProgramConfig)


class Digits:
    """Handwritten digits as points of the unit square ``[-1, 1]^2``, and on a geometry.

    Args:
        name: of the geometry.
        points: of a cloud, at most.
    """

    def __init__(self, name: str, points: int) -> None:
        from sklearn.datasets import load_digits

        self.geometry, self.extent = GEOMETRIES[name], EXTENT[name]
        pictures, labels = load_digits(return_X_y=True)
        self.pictures, self.labels = torch.tensor(pictures), torch.tensor(labels)
        flat = [self._scatter(number, points) for number in range(len(self.labels))]
        self.clouds = [self.wrap(cloud) for cloud in flat]

    def _scatter(self, number: int, points: int) -> Tensor:
        """Points in a picture's pixels, as many in each as its ink asks for."""
        draw = randomness.generator("cpu", "digit", number)
        count = int(torch.randint(points // 2, points + 1, (), generator=draw))
        pixels = self.pictures[number].multinomial(count, replacement=True, generator=draw)
        places = torch.stack((pixels % SIDE, pixels // SIDE), dim=1) + torch.rand(count, 2, generator=draw)
        return (places * (2 / SIDE) - 1) * torch.tensor([1.0, -1.0])

    def wrap(self, flat: Tensor) -> Tensor:
        """Onto the geometry: around the sphere's pole, or across the torus's edges."""
        return self.geometry.exp(self._centre.expand(*flat.shape[:-1], -1), self.extent * self._padded(flat))

    def unwrap(self, x: Tensor) -> Tensor:
        """Back to the unit square, or beside it."""
        return self.geometry.log(self._centre.to(x).expand_as(x), x)[..., :2] / self.extent

    def _padded(self, flat: Tensor) -> Tensor:
        return F.pad(flat, (0, self.geometry.dim - 2))

    @property
    def _centre(self) -> Tensor:
        """The pole of the sphere, else the origin."""
        return torch.tensor([0.0] * (self.geometry.dim - 1) + [float(isinstance(self.geometry, Sphere))])

    def rasterise(self, x: Tensor, weights: Tensor) -> Tensor:
        """Pictures ``[b, 64]`` of clouds ``[b, n, d]``, with as much ink as the originals."""
        flat = self.unwrap(x) * torch.tensor([1.0, -1.0])
        pixels = ((flat + 1) * (SIDE / 2)).floor()
        inside = ((pixels >= 0) & (pixels < SIDE)).all(dim=2)
        numbers = (pixels[..., 1] * SIDE + pixels[..., 0]).long() * inside
        pictures = torch.zeros(len(x), SIDE * SIDE).scatter_add_(1, numbers, weights * inside)
        return pictures / pictures.sum(dim=1, keepdim=True).clamp(min=1e-6)

    def split(self, held_out: int) -> tuple[PointClouds, PointClouds, PointClouds]:
        """Clouds to train on, and twice ``held_out`` others with equally many of each digit."""
        ranks = torch.stack([(self.labels[:number] == label).sum() for number, label in enumerate(self.labels)])
        each = held_out // DIGITS
        one, two, rest = ranks < each, (ranks >= each) & (ranks < 2 * each), ranks >= 2 * each
        return self._some(rest), self._some(one), self._some(two)

    def _some(self, chosen: Tensor) -> PointClouds:
        rows = chosen.nonzero().flatten()
        rows = rows[self.labels[rows].argsort(stable=True)]
        clouds = [self.clouds[int(row)] for row in rows]
        return PointClouds(clouds, self.geometry, conditions={"labels": (Labels(DIGITS), self.labels[rows])})


class Distances(Measurement):
    """Compares generated with held-out clouds, and plots the distances and the clouds.

    The distance between two sets of clouds is the mean over their best matching. That of two clouds is the mean squared
    distance that points travel (Wasserstein), or that of each point to the nearest of the other cloud (Chamfer).

    Args:
        digits: all clouds. Generated ones have the numbers of points and the labels of those that are held out; as many
            others are those whose distance is the least to be hoped for.
        flags: see :class:`CloudConfig`.
    """

    kinds = ("wasserstein", "chamfer")

    def __init__(self, digits: Digits, flags: CloudConfig) -> None:
        super().__init__("distances", flags.measured_clouds, flags.measure_every)
        self.digits, self.flags = digits, flags
        self.training, held_out, others = digits.split(flags.measured_clouds)
        self.held_out, self.others = (each.read_batch(range(len(each))) for each in (held_out, others))
        self.costs_of_others: list[Tensor] = []

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        """For each cloud: its points, and its distances and those of another real one to all that are held out."""
        flow = trainer.averaged_flow
        assert isinstance(flow, RiemannianFlow)
        asked: dict[str, Any] = {
            name: self.held_out[name][numbers].to(trainer.device) for name in ("weights", "labels")
        }
        with randomness.deterministic(randomness.Samples(trainer.config.seed, numbers)):
            drawn = flow.sample(**asked, guidance=Guidance(self.flags.guidance_scale)).cpu()
        self.costs_of_others = self.costs_of_others or self.costs(
            *(self.others[k][numbers] for k in ("clouds", "weights"))
        )
        costs = self.costs(drawn, self.held_out["weights"][numbers]) + self.costs_of_others
        return torch.cat([drawn.flatten(1), *costs], dim=1)

    def costs(self, x: Tensor, weights: Tensor) -> list[Tensor]:
        """Distances ``[b, k]`` of clouds to each that is held out, of each kind."""
        geometry, y = self.digits.geometry, self.held_out["clouds"]
        a, b = shares(weights), shares(self.held_out["weights"])
        return [cloud_costs(x, a, y, b, geometry, **TRANSPORT), chamfer_costs(x, a, y, b, geometry)]

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, float]:
        shape = self.held_out["clouds"].shape
        clouds, *costs = rows.split([shape[1] * shape[2], *[self.total] * 2 * len(self.kinds)], dim=1)
        clouds, distances = clouds.unflatten(1, shape[1:]), [matched(each) for each in costs]
        as_asked, real = (self.share_as_asked(each) for each in (clouds, self.held_out["clouds"]))
        ours, others = (dict(zip(self.kinds, each, strict=True)) for each in (distances[:2], distances[2:]))
        words = ", ".join(f"{kind} {ours[kind]:.4f} (others {others[kind]:.4f})" for kind in self.kinds)
        trainer.run.print(f"distances   step {trainer.state.step}: {words}, {as_asked:.0%} as asked (real {real:.0%})")
        draw_clouds(trainer.config.output_dir / "clouds.png", self.digits, self.held_out, clouds)
        return ours | {"as_asked": as_asked} | {f"{kind}_of_others": value for kind, value in others.items()}

    def share_as_asked(self, clouds: Tensor) -> float:
        """The share of clouds that the classifier takes for the digit that was asked for."""
        found = self.classifier.predict(self.digits.rasterise(clouds, self.held_out["weights"]).numpy())
        return float((torch.as_tensor(found) == self.held_out["labels"]).float().mean())

    @cached_property
    def classifier(self) -> Any:
        """A support-vector classifier of rasterised training clouds."""
        from sklearn.svm import SVC

        clouds = self.training.read_batch(range(len(self.training)))
        rasters = self.digits.rasterise(clouds["clouds"], clouds["weights"])
        return SVC(C=10).fit(rasters.numpy(), clouds["labels"].numpy())

    def plot(self, trainer: Trainer) -> None:
        rows = {kind: self.file.numbers(kind) for kind in self.kinds}
        rows |= {f"{kind}, other real clouds": self.file.numbers(f"{kind}_of_others") for kind in self.kinds}
        lines = {name: (list(row), list(row.values())) for name, row in rows.items()}
        title = f"{self.total} clouds, {self.flags.geometry}"
        draw_lines(trainer.config.output_dir / "distances.png", lines, title, "step", "distance")


def matched(costs: Tensor) -> float:
    """The mean over the best matching of rows with columns."""
    return float(costs.gather(1, optimal_pairs(costs)[:, None]).mean())


def chamfer_costs(x: Tensor, a: Tensor, y: Tensor, b: Tensor, geometry: Geometry) -> Tensor:
    """Chamfer distances ``[k, l]`` of clouds ``[k, n, d]`` and ``[l, m, d]`` with weights of sum 1."""
    rows = []
    for cloud, weights in zip(x, a, strict=True):
        costs = geometry.squared_distance(cloud[None, :, None], y[:, None])
        there = costs.masked_fill(b[:, None] == 0, torch.inf).amin(dim=2) @ weights
        back = costs.masked_fill(weights[None, :, None] == 0, torch.inf).amin(dim=1)
        rows.append(there + (back * b).sum(dim=1))
    return torch.stack(rows)


def draw_clouds(path: Path, digits: Digits, real: dict[str, Tensor], clouds: Tensor) -> None:
    """Real clouds of each digit above generated ones, seen from the middle of the digits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for column in range(DIGITS):
        rows = (real["labels"] == column).nonzero().flatten()[:2].tolist()
        for line, (points, row) in enumerate((each, row) for each in (real["clouds"], clouds) for row in rows):
            axes = figure.add_subplot(4, DIGITS, 1 + line * DIGITS + column, aspect="equal")
            flat = digits.unwrap(points[row][real["weights"][row] > 0])
            axes.scatter(flat[:, 0], flat[:, 1], s=3, c="tab:blue" if line < len(rows) else "tab:orange")
            axes.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), xticks=[], yticks=[])
    figure.suptitle("held-out clouds (blue) and generated ones (orange)")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    replace_file(path, content.getvalue())


def train(flags: CloudFlags) -> bool:
    """Train; returns whether it finished."""
    join(flags)
    set_seed(flags.run.seed)
    clouds = flags.clouds
    digits = Digits(clouds.geometry, clouds.points)
    distances = Distances(digits, clouds)
    training = distances.training
    flow = RiemannianFlow(
        SetTransformer(digits.geometry, training.conditions, clouds.width, clouds.layers),
        space=Points(digits.geometry),
        point_coupling=clouds.point_coupling,
        coupling=clouds.coupling,
        condition_dropout=clouds.condition_dropout,
    )
    return Trainer(flow, training, flags.run, callbacks=[distances], flags=recorded(flags)).train()
