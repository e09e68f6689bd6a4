"""evaluate.py on measurements: spectra, values and correlations of samples beside those of real fields."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.cli.flags.sampling import EvaluateConfig
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import permuted
from rectified_flow.distributed.collectives import map_over_ranks
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import conditions_of
from rectified_flow.evaluation.features import in_batches
from rectified_flow.evaluation.fields import field_panels, field_scores
from rectified_flow.flags import refuse
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.load import Trained, autocast
from rectified_flow.randomness import mix
from rectified_flow.system.files import writing
from rectified_flow.system.pictures import draw_panels

FIELDS_FILE = "fields.png"
UNUSED = ("feature_network", "metric")
"""Flags that have no effect on measurements."""


def check_field_flags(config: EvaluateConfig) -> None:
    """Raise a UsageError if a flag has no effect on measurements."""
    given = config.program.given or ()
    refuse({name: name in given for name in UNUSED}, "has no effect on measurements: leave it out")


def measure_fields(
    config: EvaluateConfig,
    trained: Trained,
    fields: ImageDataset,
    held_out: ImageDataset | None,
    folder: Path,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Compare samples with real fields for each number of steps, and plot the last comparison. Collective.

    Args:
        config: all flags.
        trained: a trained flow of fields.
        fields: the training fields.
        held_out: held-out fields, if there are any. Without them, half of the training fields takes their place.
        folder: where the plot is written.
        options: options of ``flow.sample``.

    Returns:
        On the main process, the settings and scores of each comparison.
    """
    flags, flow, state = config.samples, trained.flow, PartialState()
    count = min(flags.num_samples, len(fields) if held_out is not None else len(fields) // 2)
    if count < 1:
        raise UsageError(f"{fields.info.source} has a single field: add files, as a comparison needs at least 2")
    order = permuted(np.arange(len(fields)), len(fields), mix(flags.seed, "fields")).tolist()
    others = held_out.subset(range(min(count, len(held_out)))) if held_out else fields.subset(order[count : 2 * count])
    compared, results = fields.subset(order[:count]), []
    for steps in dict.fromkeys(flags.steps) or (flow.default_steps,):
        how = options | {"steps": steps, "seed": flags.seed, "batch_size": config.model.batch_size}
        with autocast(config.model.mixed_precision, state.device):
            samples = _generate(flow, compared, flags.num_samples, how)
        if not state.is_main_process:
            continue
        real, other = (_physical(flow, each) for each in (compared, others))
        settings: dict[str, Any] = {
            "num_samples": len(samples),
            "num_real": len(real),
            "seed": flags.seed,
            "steps": steps,
        }
        settings |= {"dataset": fields.info.source, "image_size": fields.info.image_size, "split": "train"}
        results.append(settings | {"distances": field_scores(samples, real, other)})
        names = [f"channel {number}" for number in range(1, real.shape[1] + 1)]
        with writing(folder / FIELDS_FILE):
            draw_panels(folder / FIELDS_FILE, field_panels(samples, real, other, names))
    return results


def _generate(flow: Flow, fields: ImageDataset, count: int, how: dict[str, Any]) -> Tensor:
    """Generate samples in physical units, a share on every process. Collective."""
    conditions = conditions_of(flow, fields, range(len(fields)), how["seed"]) if flow.conditions else {}

    def sample(numbers: list[int]) -> Tensor:
        parts = []
        for some in in_batches(numbers, how["batch_size"], f"evaluating {how['steps']} steps"):
            [(_, data)] = sample_batches(flow, some, render=False, conditions=conditions, **how)
            parts.append(data.cpu())
        return torch.cat(parts)

    return map_over_ranks(PartialState(), count, sample)


def _physical(flow: Flow, fields: ImageDataset) -> Tensor:
    """Return fields as the flow generates them, float32 ``[n, c, h, w]`` in physical units."""
    return flow.space.decode(flow.space.encode(fields.read_entries(range(len(fields)))["images"]))
