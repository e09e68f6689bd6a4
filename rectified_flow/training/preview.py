"""Samples of the averaged flow during training, to look at."""

from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from rectified_flow.distributed import map_over_ranks
from rectified_flow.evaluation.evaluator import conditions_of, render_sources
from rectified_flow.flows.flow import SOURCE, sample_batches
from rectified_flow.flows.solvers import Guidance
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.system.pictures import Legend
from rectified_flow.system.signals import Interrupted, raise_if_stop_requested

MAX_BATCH = 64  # samples that a process generates at once; fewer where it trains on fewer
PAIRS = 4  # pairs of a source and a sample in a row of a preview
Preview = tuple[Tensor, int | None, list[str] | None, Legend | None]
"""Samples, the columns of their grid, the text below each, and the meaning of their colours."""


def draw_preview(
    flow: Any, data: Any, config: TrainingConfig, accelerator: Accelerator, per_process: int
) -> Preview | None:
    """Generate the samples that sample.py generates with the same seed, on any number of processes. Collective.

    A flow from pictures to pictures starts from the first items of ``data``, which are shown beside the samples. A flow
    that takes columns gets those of the first items, which are written below the samples. None is returned if the flow
    cannot sample, no samples are asked for, or a stop was requested meanwhile on any rank.
    """
    if config.num_samples == 0 or not hasattr(flow, "sample"):
        return None
    how: dict[str, Any] = {"seed": config.seed, "batch_size": min(MAX_BATCH, per_process)}
    how |= {"steps": config.sample_steps} if config.sample_steps else {}  # otherwise the flow uses its default number
    how |= default_guidance(flow)
    count, columns, conditions, texts = config.num_samples, None, dict[str, Tensor](), None
    if getattr(flow, "takes_source", False) or getattr(data, "columns", None):
        count = min(count, len(data))
        conditions = how["conditions"] = conditions_of(flow, data, range(count), config.seed)
        columns = PAIRS * 2 if SOURCE in conditions else None
        written = data.condition_texts(range(count)).values() if getattr(data, "columns", None) else ()
        if SOURCE not in conditions:
            texts = [", ".join(filter(None, row)) for row in zip(*written, strict=True)]

    def sample(numbers: list[int]) -> Tensor:
        parts = []
        for _, images in sample_batches(flow, numbers, **how):
            parts.append(images)
            raise_if_stop_requested()
        return torch.cat(parts)

    space = getattr(flow, "space", None)  # other modules than flows can be sampled, too
    with torch.no_grad(), accelerator.autocast(), suppress(Interrupted):
        images = map_over_ranks(accelerator, count, sample)
        if SOURCE in conditions:
            images = torch.stack((render_sources(flow, conditions[SOURCE]), images), dim=1).flatten(0, 1)
        return images, columns, texts, getattr(space, "legend", None)
    return None


def default_guidance(flow: Any) -> dict[str, Guidance]:
    """Return the guidance with which sample.py samples a flow, as an argument of ``flow.sample``; none for scale 1."""
    scale = getattr(flow, "default_guidance", 1.0)
    return {} if scale == 1 else {"guidance": Guidance(scale)}
