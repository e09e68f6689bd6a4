"""Pictures that are held out of the training, to see whether it learns pictures or learns these pictures by heart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.data.stream import permuted
from rectified_flow.distributed.collectives import gather_interleaved, interleaved_share, on_main
from rectified_flow.evaluation.distances import near_duplicates, perceptual_hashes
from rectified_flow.evaluation.features import average_colours, reference_features
from rectified_flow.flows.flow import Flow, expand
from rectified_flow.randomness import mix
from rectified_flow.system.signals import interruptible

FEWEST = 8
"""Of held-out pictures: the loss of fewer says nothing."""


@dataclass(frozen=True)
class Split:
    """Rows of a dataset by what they are for.

    Args:
        training: trained on.
        held_out: measured only.
        left_out: would be held out, but have a near-duplicate among those trained on.
    """

    training: list[int]
    held_out: list[int]
    left_out: list[int]

    def __str__(self) -> str:
        near = f", {len(self.left_out)} left out for resembling training pictures" * bool(self.left_out)
        return f"{len(self.training)} pictures to train on, {len(self.held_out)} held out{near}"

    @property
    def problem(self) -> str | None:
        """Why these are too few on a side, if they are."""
        if len(self.held_out) >= FEWEST and len(self.training) > 1:
            return None
        return f"{self}; {FEWEST} held-out pictures and 2 others are needed"


def hold_out(pictures: ImageDataset, share: float, seed: int, state: PartialState) -> Split:
    """Split pictures into those that are trained on and those that are held out, perhaps too few. Collective.

    The side of a picture is a function of the seed and of what it shows. So more pictures in the folder move none from
    one side to the other, and a copy of a picture, mirrored or not, is on the picture's side. Where recompression
    changed what decides, a held-out picture that resembles a training picture is left out of both.

    Args:
        pictures: all of them.
        share: expected share of the held-out ones.
        seed: of the run.
        state: of the processes.
    """
    colours = reference_features(pictures, average_colours(), state)
    return on_main(state, lambda: split_rows(colours, share, seed))


def split_rows(colours: Tensor, share: float, seed: int) -> Split:
    """The sides of pictures with these colours ``[n, 3 * 8 * 8]``; see :func:`hold_out`."""
    draws = np.array([mix(seed, "held out", value) for value in perceptual_hashes(colours)])
    chosen = draws < share * 2.0**63
    training, candidates = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    near = near_duplicates(colours[candidates], colours[training]).numpy()
    return Split(training.tolist(), candidates[~near].tolist(), candidates[near].tolist())


TIMES = 8
MOST_PICTURES = 256
"""Of either kind: more make a measurement less noisy, and longer."""
AT_ONCE = 8
"""Pictures that are measured at once, each at all times."""
PATIENCE = 3
"""Measurements in a row that must be above the least one."""
STANDARD_ERRORS = 2.0
"""By how many each of them must be above it."""


class HeldOutPictures:
    """Held-out pictures and as many training pictures, and the velocity's mean squared error on them.

    It is measured at eight times from data to noise, with the same noise each time. So two measurements differ by what
    was learned between them, and by nothing else.

    Args:
        training: pictures, or their latents, that are trained on.
        held_out: others of the same kind.
        seed: of the noise and of the choice of pictures.
    """

    def __init__(self, training: StoreDataset, held_out: StoreDataset, seed: int) -> None:
        self.count = min(len(training), len(held_out), MOST_PICTURES)
        self.seed = seed
        self._sides = [_some(each, self.count, seed) for each in (held_out, training)]

    @torch.no_grad()
    def losses(
        self, flow: Flow, numbers: Sequence[int], *, progress: Callable[[int], object] = lambda _count: None
    ) -> Tensor:
        """The loss of some of the ``2 * count`` pictures, of which the held-out ones come first, float32 ``[n]``.

        Args:
            flow: has a method ``velocity(x, t, **conditions)``.
            numbers: of the pictures.
            progress: called with the number of pictures of each part.

        Raises:
            Interrupted: if a stop was requested meanwhile.
        """
        parts = []
        with flow.evaluating(), interruptible(flow):
            for start in range(0, len(numbers), AT_ONCE):
                parts.append(self._losses(flow, numbers[start : start + AT_ONCE]))
                progress(len(parts[-1]))
        return torch.cat(parts)

    def _losses(self, flow: Flow, numbers: Sequence[int]) -> Tensor:
        items = [self._sides[number // self.count][number % self.count] for number in numbers]
        batch = {name: torch.stack([item[name] for item in items]).to(flow.device) for name in items[0]}
        data = batch[flow.space.key] if flow.space.key in batch else flow.space.from_pictures(batch["images"])
        x_0 = flow.space.encode(data)
        with randomness.deterministic(randomness.Samples(self.seed, [number % self.count for number in numbers])):
            noise = randomness.randn("held-out noise", (len(x_0), TIMES, *x_0.shape[1:]), x_0.device)
        x_0, noise = x_0.repeat_interleave(TIMES, dim=0), noise.flatten(0, 1)
        t = ((torch.arange(TIMES, device=x_0.device) + 0.5) / TIMES).repeat(len(numbers))
        conditions = {name: batch[name].repeat_interleave(TIMES, dim=0) for name in flow.conditions if name in batch}
        error = flow.velocity(torch.lerp(x_0, noise, expand(t, x_0)), t, **conditions) - (noise - x_0)
        return error.square().flatten(1).mean(dim=1).unflatten(0, (-1, TIMES)).mean(dim=1)

    def measure(self, flow: Flow, state: PartialState) -> dict[str, float]:
        """The means of the losses, as :meth:`means`; every process measures its share. Collective."""
        mine = interleaved_share(2 * self.count, state.process_index, state.num_processes)
        return self.means(gather_interleaved(self.losses(flow, mine), 2 * self.count))

    def means(self, losses: Tensor) -> dict[str, float]:
        """What the losses of all pictures ``[2 * count]`` come to."""
        held_out, seen = (each.mean().item() for each in losses.double().chunk(2))
        return {"heldout_loss": held_out, "seen_loss": seen, "gap": held_out - seen}


@dataclass(frozen=True)
class Measured:
    """One measurement of a run."""

    step: int
    heldout_loss: float
    seen_loss: float
    gap: float
    losses: list[float]
    """Of each held-out picture."""


class Verdict(NamedTuple):
    """What the measurements of a run say."""

    best: Measured
    """The one with the least held-out loss."""
    memorises: bool
    """Whether the held-out loss has risen since, beyond its own noise, while that on training pictures fell."""


def judge(measured: Sequence[Measured]) -> Verdict:
    """Judge the measurements of a run.

    The pictures and their noise are the same in all of them, so the noise of a rise is that of the pictures'
    differences.
    """
    best = min(range(len(measured)), key=lambda index: measured[index].heldout_loss)
    last = measured[max(best + 1, len(measured) - PATIENCE) :]
    return Verdict(measured[best], len(last) == PATIENCE and all(_has_risen(measured[best], each) for each in last))


def _has_risen(before: Measured, now: Measured) -> bool:
    rises = np.subtract(now.losses, before.losses)
    beyond = rises.mean() > STANDARD_ERRORS * rises.std(ddof=1) / len(rises) ** 0.5
    return bool(beyond and now.seen_loss < before.seen_loss)


def _some(dataset: StoreDataset, count: int, seed: int) -> StoreDataset:
    """``count`` items of a dataset, chosen by the seed."""
    chosen = permuted(np.arange(count), len(dataset), randomness.mix(seed, "held-out pictures"))
    rows = np.arange(dataset.info.length) if dataset.rows is None else dataset.rows
    return dataset.subset(rows[chosen])
