"""Measurements while a flow trains: distances of generated to held-out clouds, and recognised digits."""

from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from digits import DIGITS, Digits
from geometry import Geometry
from rectified_flow import Measurement, Trainer, randomness
from rectified_flow.errors import RunError
from rectified_flow.flows.couplings import optimal_pairs
from rectified_flow.flows.solvers import Guidance
from rectified_flow.system.outputs import write_output
from rectified_flow.system.pictures import Panel, draw_panels
from rectified_flow.system.signals import raise_if_stop_requested
from riemannian import RiemannianFlow, shares
from transport import cloud_costs

AT_ONCE = 4
"""Clouds whose distances are computed between two polls for a stop request."""
TRANSPORT: dict[str, Any] = {"regularisation": 0.02, "tolerance": 1e-2, "max_iterations": 500}


class Distances(Measurement):
    """Distances between generated and held-out clouds, their plot, and a picture of the clouds.

    The distance between two sets of clouds is the mean over their best matching. The distance between two clouds is
    the mean squared distance that points travel (Wasserstein), or the mean squared distance of each point to the
    nearest point of the other cloud, summed over both directions (Chamfer).

    Args:
        digits: all clouds. Generated clouds have the numbers of points and the labels of the held-out ones. As many
            other real clouds are measured alike, for the smallest distance to be expected.
        count: number of clouds.
        every: steps between measurements.
        guidance_scale: guidance scale of the generated clouds.
    """

    kinds = ("wasserstein", "chamfer")

    def __init__(self, digits: Digits, count: int, every: int, guidance_scale: float = 1.0) -> None:
        super().__init__("distances", count, every)
        self.digits, self.guidance = digits, Guidance(guidance_scale)
        self.training, held_out, others = digits.split(count)
        self.held_out, self.others = held_out.entries, others.entries
        self.costs_of_others: list[Tensor] = []

    def measure(self, trainer: Trainer, numbers: Sequence[int]) -> Tensor:
        """Return each cloud's points, its distances to the held-out clouds, and the distances of another real cloud."""
        flow = trainer.averaged_flow
        assert isinstance(flow, RiemannianFlow)
        weights, labels = (self.held_out[name][numbers] for name in ("weights", "labels"))
        with randomness.deterministic(randomness.Samples(trainer.config.seed, numbers)):
            drawn = flow.sample(
                weights=weights.to(trainer.device), labels=labels.to(trainer.device), guidance=self.guidance
            ).cpu()
        if not self.costs_of_others:  # a rank measures the same clouds each time
            self.costs_of_others = self.costs(self.others["clouds"][numbers], self.others["weights"][numbers])
        return torch.cat([drawn.flatten(1), *self.costs(drawn, weights), *self.costs_of_others], dim=1)

    def costs(self, x: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the distances ``[b, k]`` of clouds to each held-out cloud, of each kind."""
        geometry, y = self.digits.geometry, self.held_out["clouds"]
        b, rows = shares(self.held_out["weights"]), []
        for clouds, a in zip(x.split(AT_ONCE), shares(weights).split(AT_ONCE), strict=True):
            raise_if_stop_requested()  # all pairs of hundreds of clouds take minutes
            rows.append((cloud_costs(clouds, a, y, b, geometry, **TRANSPORT), chamfer_costs(clouds, a, y, b, geometry)))
        return [torch.cat(each) for each in zip(*rows, strict=True)]

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, float]:
        """Print and return the distances, and draw the clouds.

        Raises:
            RunError: if a generated point is not finite.
        """
        real = self.held_out["clouds"]
        if not rows.isfinite().all():
            raise RunError("generated points are not finite: lower --guidance_scale or --learning_rate")
        clouds, *costs = rows.split([real[0].numel(), *[self.total] * 2 * len(self.kinds)], dim=1)
        clouds, distances = clouds.reshape(real.shape), [matched(each) for each in costs]
        as_asked, of_real = self.share_as_asked(clouds), self.share_as_asked(real)
        ours, others = (dict(zip(self.kinds, each, strict=True)) for each in (distances[:2], distances[2:]))
        words = ", ".join(f"{kind} {ours[kind]:.4f} (others {others[kind]:.4f})" for kind in self.kinds)
        trainer.run.print(
            f"distances   step {trainer.state.step}: {words}, {as_asked:.0%} as asked (real {of_real:.0%})"
        )
        draw_clouds(trainer.config.output_dir / "clouds.png", self.digits, self.held_out, clouds)
        return ours | {"as_asked": as_asked} | {f"{kind}_of_others": value for kind, value in others.items()}

    def share_as_asked(self, clouds: Tensor) -> float:
        """Return the share of clouds in which the classifier recognises the requested digit."""
        found = self.classifier.predict(self.digits.rasterise(clouds, self.held_out["weights"]).numpy())
        return float((torch.as_tensor(found) == self.held_out["labels"]).float().mean())

    @cached_property
    def classifier(self) -> Any:
        """A support-vector classifier of rasterised training clouds."""
        from sklearn.svm import SVC

        entries = self.training.entries
        return SVC(C=10).fit(
            self.digits.rasterise(entries["clouds"], entries["weights"]).numpy(), entries["labels"].numpy()
        )

    def plot(self, trainer: Trainer) -> None:
        """Plot the distances over the steps."""
        names = {kind: kind for kind in self.kinds} | {
            f"{kind}, other real clouds": f"{kind}_of_others" for kind in self.kinds
        }
        lines = {name: self.file.numbers(key) for name, key in names.items()}
        title = f"{self.total} clouds, {self.digits.geometry}"
        draw_panels(trainer.config.output_dir / "distances.png", [Panel(lines, title, "step", "distance")])


def matched(costs: Tensor) -> float:
    """Return the mean over the best matching of rows with columns."""
    return float(costs.gather(1, optimal_pairs(costs)[:, None]).mean())


def chamfer_costs(x: Tensor, a: Tensor, y: Tensor, b: Tensor, geometry: Geometry) -> Tensor:
    """Return the Chamfer distances ``[k, l]`` of clouds ``[k, n, d]`` and ``[l, m, d]`` with weights of sum 1."""
    rows = []
    for cloud, weights in zip(x, a, strict=True):
        costs = geometry.squared_distance(cloud[None, :, None], y[:, None])
        there = costs.masked_fill(b[:, None] == 0, torch.inf).amin(dim=2) @ weights
        back = costs.masked_fill(weights[None, :, None] == 0, torch.inf).amin(dim=1)
        rows.append(there + (back * b).sum(dim=1))
    return torch.stack(rows)


def draw_clouds(path: Path, digits: Digits, real: dict[str, Tensor], clouds: Tensor) -> None:
    """Draw two real clouds of each digit above two generated ones, unwrapped from the geometry."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(4, DIGITS, squeeze=False, subplot_kw={"aspect": "equal"})
    for column in range(DIGITS):
        rows = (real["labels"] == column).nonzero().flatten()[:2].tolist()
        for line, (colour, points) in enumerate((("tab:blue", real["clouds"]), ("tab:orange", clouds))):
            for number, row in enumerate(rows):
                flat = digits.unwrap(points[row][real["weights"][row] > 0])
                axes[line * len(rows) + number, column].scatter(flat[:, 0], flat[:, 1], s=3, c=colour)
    for each in axes.flat:
        each.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), xticks=[], yticks=[])
    figure.suptitle("held-out clouds (blue) and generated ones (orange)")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    write_output(path, content.getvalue())
