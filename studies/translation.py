"""How good are flows from pictures to pictures, as starts and as conditions, beside regression and copying?

The data are a folder with two folders of pictures in which the same name is the same thing: ``google`` and ``fluent``
of emoji, or the two that --data names after colons, ``FOLDER:FROM:TO``. A degradation starts from pictures of the
second folder. A tenth of the names is held out, and judged. The budget is a number of images, and all cases have the
settings ``CHOSEN`` of studies/training.py. Each source has two results, in one call and in eight.
"""

import sys
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.utils import save_image

from rectified_flow import Evaluator, Pixels, RectifiedFlow, register
from rectified_flow.condition import Picture
from rectified_flow.data.degraded import Degraded
from rectified_flow.evaluation.evaluator import Comparison, render_sources
from rectified_flow.flows.flow import SOURCE, Flow, sample_batches
from rectified_flow.flows.times import LogitNormal
from rectified_flow.spaces.degradations import Degradation, Downsample, Grey, Mask
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import CHOSEN, FEATURES, build_unet, grouped, load_trained, open_pictures, train_images

HELD_OUT = 10
"""One of this many names is held out."""
VARIANTS, SHOWN, STEPS = 2, 8, 4
"""Results for each source, number of sources in the picture beside a run, and midpoint steps of a result."""


@register
class Regression(Flow):
    """Regression of the target from the source by its mean squared error, with the network of a flow."""

    def forward(self, **batch: Any) -> Tensor:
        """Return the loss; the network gets the source as ``x`` at time 1."""
        x_0, start, _ = self.draw_batch(batch)
        return self.loss(x_0, start)

    def loss(self, x_0: Tensor, start: Tensor) -> Tensor:
        """Return the mean squared error of the prediction."""
        return (self._predict(start) - x_0).square().mean()

    def _predict(self, start: Tensor) -> Tensor:
        predicted: Tensor = self.network(start, torch.ones(len(start), device=start.device)).float()
        return start - predicted

    @torch.no_grad()
    def sample(self, count: int = 1, *, steps: int = 1, source: Tensor, **_: Any) -> Tensor:
        """Return predictions."""
        start, _values = self.draw_start(count, {SOURCE: source})
        with self.evaluating():
            return self.space.decode(self._predict(start))


def open_sides(row: Row, *, paired: bool, degradation: Degradation | None) -> tuple[Any, Any]:
    """Return the training pictures with their sources, and the held-out pictures with the sources of their names."""
    folder, *names = row.data.split(":")
    begin, end = names or ("google", "fluent")
    target = open_pictures(f"{folder}/{end}", row.image_size)
    held_out = np.arange(len(target)) % HELD_OUT == 0
    seen, unseen = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    if degradation is not None:
        whole = Degraded(target, degradation, Pixels((3, row.image_size, row.image_size)))
        return whole.subset(seen), whole.subset(unseen)
    source = open_pictures(f"{folder}/{begin}", row.image_size)
    known = target.changed(source=source, partners=np.arange(len(source)))
    training = known.subset(seen) if paired else target.subset(seen).changed(source=source.subset(seen))
    return training, known.subset(unseen)


def train(row: Row, paired: bool, kind: type[Flow], as_condition: bool, settings: dict[str, Any]) -> None:
    """Train a case."""
    parts = grouped({name: value for name, value in settings.items() if name != "degradation"})
    training, _ = open_sides(row, paired=paired, degradation=settings.get("degradation"))
    shape = (3, row.image_size, row.image_size)
    conditions = {SOURCE: Picture(shape)} if as_condition else {}
    unet = build_unet(row.image_size, conditions=conditions, **parts["network"])
    own: dict[str, Any] = {"time_distribution": LogitNormal(stratified=True)} if kind is RectifiedFlow else {}
    own |= {"condition_dropout": 0.1} if as_condition else {"from_source": True}
    flow = kind(unet, space=Pixels(shape, horizontal_flip=True), **own, **parts["flow"])
    train_images(row, flow, training, parts["run"])


def measure(row: Row, paired: bool, kind: type[Flow], as_condition: bool, settings: dict[str, Any]) -> Figures:
    """Measure the results of held-out sources, and write a sheet of sources, results and targets."""
    del as_condition
    training, held_out = open_sides(row, paired=paired, degradation=settings.get("degradation"))
    flow = load_trained(row)
    how: dict[str, Any] = {"num_samples": VARIANTS * len(held_out), "seed": row.seed, "held_out": held_out}
    evaluator, figures = Evaluator(training, FEATURES, metrics=("frechet", "kernel", "translation"), **how), {}
    for steps in (1,) if kind is Regression else (1, STEPS):
        solver: dict[str, Any] = {"solver": "euler" if steps == 1 else "midpoint"} if kind is not Regression else {}
        numbers = evaluator.measure(Comparison(evaluator, flow, {"steps": steps, **solver}))
        short = {name.replace(f"{FEATURES}_", ""): float(value) for name, value in numbers.items()}
        figures["1 call" if steps == 1 else f"{2 * STEPS} calls"] = short
        data, rows, conditions = evaluator.given(flow)
        sources = conditions[SOURCE][:SHOWN]
        [(_, made)] = sample_batches(
            flow, range(2 * SHOWN), conditions={SOURCE: sources}, seed=row.seed, steps=steps, **solver
        )
        cells = (render_sources(flow, sources), *made.cpu().split(SHOWN), data.read_pictures(rows[:SHOWN]))
        sheet = torch.stack(cells, dim=1).flatten(0, 1) / 255
        save_image(sheet, row.folder / f"{steps} steps.png", nrow=2 * len(cells), pad_value=1)
    return figures


def case(
    about: str, *, paired: bool = True, kind: type[Flow] = RectifiedFlow, as_condition: bool = False, **settings: Any
) -> Case:
    """Return a case of settings, see :func:`studies.training.grouped`."""
    every: dict[str, Any] = {"paired": paired, "kind": kind, "as_condition": as_condition}
    every["settings"] = {**CHOSEN, **settings}
    return Case(about, partial(train, **every), partial(measure, **every))


def degraded(name: str, degradation: Degradation) -> dict[str, Case]:
    """Return the cases of a degradation: as a condition, as a start, and by regression."""
    how: dict[str, Any] = {"degradation": degradation}
    return {
        f"{name}, condition": case("the lowest distance to the training pictures", as_condition=True, **how),
        f"{name}, start": case("a higher distance, as the start leaves less open", **how),
        f"{name}, regression": case("the lowest distance to the partner, but blurred", kind=Regression, **how),
    }


STUDY = Study(
    __doc__ or "",
    {
        "paired, start": case("a higher distance than start with noise"),
        "paired, start with noise": case("a lower distance than regression", flow_source_noise=0.1),
        "paired, condition": case("similar to start; more varied", as_condition=True),
        "paired, regression": case("the lowest distance to the partner, but blurred", kind=Regression),
        "unpaired": case("half of the distance of copies; keeps some structure", paired=False),
        "unpaired, ot": case("keeps more structure", paired=False, flow_coupling="ot", batch_size=32),
        **degraded("grey", Grey()),
        **degraded("downsample", Downsample(4)),
        **degraded("mask", Mask("box")),
    },
    Flags(data=("emoji-pairs",), budget=(16_000,), num_samples=560, figures=("frechet_distance", "partner_distance")),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.translation"))
