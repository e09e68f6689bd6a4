"""Grids of samples during training: those that sample.py draws of the same seed, an equal share on each rank."""

from collections.abc import Callable
from contextlib import suppress

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rectified_flow.interruption import Interrupted
from rectified_flow.processes.collectives import any_rank, gather_interleaved
from rectified_flow.randomness import Items, rows_of
from rectified_flow.training.config import TrainingConfig


def draw_preview(accelerator: Accelerator, flow: nn.Module, config: TrainingConfig) -> Tensor | None:
    """Draw ``config.num_samples`` images, uint8 ``[n, c, h, w]``, the same on any number of processes.

    None on every rank if the flow cannot sample, none are wanted, or the end was requested meanwhile on any rank.
    """
    sample: Callable[..., Tensor] | None = getattr(flow, "sample", None)
    total, world = config.num_samples, accelerator.num_processes
    if total == 0 or sample is None:
        return None
    share = -(-total // world)
    mine = [(accelerator.process_index + world * i) % total for i in range(share)]
    steps = {"steps": config.sample_steps} if config.sample_steps else {}  # else the flow's own
    images = None
    with accelerator.autocast(), rows_of(Items(config.seed, mine), accelerator.device), suppress(Interrupted):
        images = sample(share, **steps)
    if any_rank(accelerator, images is None) or images is None:
        return None
    return gather_interleaved(images.mul(255).round().to(torch.uint8), total)
