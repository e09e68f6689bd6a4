"""Sample grids during training: the samples that sample.py draws of the same seed, an equal share on each rank."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rectified_flow.distributed.collectives import any_rank, gather_interleaved, interleaved_share
from rectified_flow.interruption import Interrupted
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space

MOST_AT_ONCE = 64
"""Pictures that a process draws at once; fewer where it trains on fewer."""


def draw_preview(accelerator: Accelerator, flow: nn.Module, config: TrainingConfig) -> Tensor | None:
    """Draw ``config.num_samples`` pictures, uint8 ``[n, 3, h, w]``, the same on any number of processes.

    None on every rank if the flow cannot sample, none are asked for, or a stop was requested meanwhile on any rank.
    """
    sample: Callable[..., Tensor] | None = getattr(flow, "sample", None)
    space: Space = getattr(flow, "space", None) or Pixels()
    total, world_size = config.num_samples, accelerator.num_processes
    if total == 0 or sample is None:
        return None
    mine = interleaved_share(total, accelerator.process_index, world_size)
    steps = {"steps": config.sample_steps} if config.sample_steps else {}  # else the flow's own
    pictures = None
    at_once = min(MOST_AT_ONCE, config.split_batch(world_size).per_process)
    parts = [mine[start : start + at_once] for start in range(0, max(1, len(mine)), at_once)]

    def drawn(part: Sequence[int]) -> Tensor:
        with deterministic(Samples(config.seed, part), accelerator.device):
            return space.draw(sample(len(part), **steps)).to(accelerator.device)

    with torch.no_grad(), accelerator.autocast(), suppress(Interrupted):
        pictures = torch.cat([drawn(part) for part in parts])
    if any_rank(accelerator, pictures is None) or pictures is None:
        return None
    return gather_interleaved(pictures, total)
