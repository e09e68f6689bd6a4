"""Measurements while a flow trains: distances of generated to held-out clouds, and recognised digits."""

from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from digits import DIGITS, Digits
from point_clouds import shares
from rectified_flow import Measurement, RunError, Trainer, randomness
from rectified_flow.flows.couplings import optimal_pairs
from rectified_flow.flows.solvers import Guidance
from rectified_flow.system.outputs import write_output
from rectified_flow.system.pictures import Panel, draw_panels
from rectified_flow.system.signals import raise_if_stop_requested
from riemannian import RiemannianFlow

KINDS = ("wasserstein", "chamfer")


class Distances(Measurement):
    """Distances between generated and held-out clouds, their plot, and a picture of the clouds.

    The distance between two sets of clouds is the mean over their best matching. The distance between two clouds is
    the mean squared distance that points travel (Wasserstein), or the mean squared distance of each point to the
    nearest point of the other cloud, summed over both directions (Chamfer).

    Args:
        digits: all clouds. Generated clouds have the numbers of points and the conditions of the held-out ones. As many
            other real clouds are measured alike, for the smallest distance to be expected.
        count: number of clouds.
        every: steps between measurements.
        guidance_scale: guidance scale of the generated clouds.
    """

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
        drawn = self.sample(flow, trainer.config.seed, numbers, guidance=self.guidance)
        if not self.costs_of_others:  # a rank measures the same clouds each time
            self.costs_of_others = self.costs(self.others["clouds"][numbers], self.others["weights"][numbers])
        costs = self.costs(drawn, self.held_out["weights"][numbers])
        return torch.cat([drawn.flatten(1), *costs, *self.costs_of_others], dim=1)

    def sample(self, flow: RiemannianFlow, seed: int, numbers: Sequence[int], **options: Any) -> Tensor:
        """Generate clouds ``[b, n, d]`` with the sizes and conditions of some of the held-out ones."""
        names = ("weights", *flow.conditions)
        options |= {name: self.held_out[name][numbers].to(flow.device) for name in names}
        with randomness.deterministic(randomness.Samples(seed, numbers)):
            return flow.sample(watch=lambda *_: raise_if_stop_requested(), **options).cpu()

    def costs(self, x: Tensor, weights: Tensor) -> list[Tensor]:
        """Return the distances ``[b, k]`` of clouds to each held-out cloud, of each kind."""
        geometry, y = self.digits.geometry, self.held_out["clouds"]
        a, b = shares(weights), shares(self.held_out["weights"])
        rows = []
        for cloud, masses in zip(x, a, strict=True):
            raise_if_stop_requested()  # all pairs of hundreds of clouds take a minute
            costs = geometry.squared_distance(cloud[None, :, None], y[:, None])
            rows.append((wasserstein(costs, masses, b), chamfer(costs, masses, b)))
        return [torch.stack(each) for each in zip(*rows, strict=True)]

    def summarize(self, trainer: Trainer, rows: Tensor) -> dict[str, float]:
        """Print and return the distances, and draw the clouds.

        Raises:
            RunError: if a generated point is not finite.
        """
        real = self.held_out["clouds"]
        if not rows.isfinite().all():
            raise RunError("generated points are not finite: lower --guidance_scale or --learning_rate")
        clouds, *costs = rows.cpu().split([real[0].numel(), *[self.total] * 2 * len(KINDS)], dim=1)
        numbers = self.numbers(clouds.reshape(real.shape), costs[: len(KINDS)])
        others = {f"{kind}_of_others": matched(each) for kind, each in zip(KINDS, costs[len(KINDS) :], strict=True)}
        of_real = self.share_as_asked(real, self.held_out)
        words = ", ".join(f"{kind} {numbers[kind]:.4f} (others {others[f'{kind}_of_others']:.4f})" for kind in KINDS)
        step = f"step {trainer.state.step}"
        trainer.run.print(f"distances   {step}: {words}, {numbers['as_asked']:.0%} as asked (real {of_real:.0%})")
        draw_clouds(trainer.config.output_dir / "clouds.png", self.digits, self.held_out, clouds.reshape(real.shape))
        return numbers | others

    def numbers(self, clouds: Tensor, costs: Sequence[Tensor]) -> dict[str, float]:
        """Return the measurements of generated clouds by name, whose costs are those of :meth:`costs`."""
        change = self.digits.moments_of(clouds, self.held_out["weights"]) - self.held_out["moments"]
        error = (change / self.digits.moments.std(dim=0)).square().mean().sqrt()
        distances = {kind: matched(each) for kind, each in zip(KINDS, costs, strict=True)}
        return distances | {"as_asked": self.share_as_asked(clouds, self.held_out), "moments_error": float(error)}

    def share_as_asked(self, clouds: Tensor, asked: dict[str, Tensor]) -> float:
        """Return the share of clouds in which the classifier recognises the requested digit."""
        found = self.classifier.predict(self.digits.rasterise(clouds, asked["weights"]).numpy())
        return float((torch.as_tensor(found) == asked["labels"]).float().mean())

    @cached_property
    def classifier(self) -> Any:
        """A support-vector classifier of rasterised training clouds."""
        from sklearn.svm import SVC

        entries = self.training.entries
        known = entries["labels"] < DIGITS
        pictures = self.digits.rasterise(entries["clouds"][known], entries["weights"][known])
        return SVC(C=10).fit(pictures.numpy(), entries["labels"][known].numpy())

    def plot(self, trainer: Trainer) -> None:
        """Plot the distances over the steps."""
        names = {kind: kind for kind in KINDS} | {f"{kind}, other real clouds": f"{kind}_of_others" for kind in KINDS}
        lines = {name: self.file.numbers(key) for name, key in names.items()}
        title = f"{self.total} clouds, {self.digits.geometry}"
        draw_panels(trainer.config.output_dir / "distances.png", [Panel(lines, title, "step", "distance")])


def matched(costs: Tensor) -> float:
    """Return the mean over the best matching of rows with columns."""
    return float(costs.gather(1, optimal_pairs(costs)[:, None]).mean())


def wasserstein(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the costs ``[k]`` of the exact optimal transport of one cloud to others.

    Args:
        costs: squared distances ``[k, n, m]``.
        a: weights of the points of the cloud ``[n]``, with sum 1.
        b: weights of the points of the others ``[k, m]``, with sum 1 in each row.
    """
    import ot

    here, distances = a > 0, []
    masses = normalised(a[here])
    for cost, weights in zip(costs, b, strict=True):
        there = weights > 0
        distances.append(ot.emd2(masses, normalised(weights[there]), cost[here][:, there].double().numpy()))
    return torch.tensor(distances, dtype=torch.float32)


def normalised(weights: Tensor) -> Any:
    """Return weights of sum 1 in float64, whose sum POT checks."""
    exact = weights.double().numpy()
    return exact / exact.sum()


def chamfer(costs: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the Chamfer distances ``[k]`` of one cloud to others, with the arguments of :func:`wasserstein`."""
    there = costs.masked_fill(b[:, None] == 0, torch.inf).amin(dim=2) @ a
    back = costs.masked_fill(a[None, :, None] == 0, torch.inf).amin(dim=1)
    return there + (back * b).sum(dim=1)


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
