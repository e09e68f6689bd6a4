"""Pictures that are held out of the training: the loss on them shows whether the network memorises the others.

The loss on training pictures always falls. As long as the network learns what pictures of this kind have in common, the
loss on held-out pictures falls with it. When it memorises the training pictures, the held-out loss rises while the
training loss falls further. :func:`judge` decides whether that has happened.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import ConcatDataset

from rectified_flow import randomness
from rectified_flow.condition import Values
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.data.stream import permuted
from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.evaluation.distances import near_duplicates, perceptual_hashes
from rectified_flow.evaluation.features import average_colours, in_batches, reference_features, stored_batch
from rectified_flow.flows.flow import Flow, expand
from rectified_flow.system.terminal import shown

D = TypeVar("D", bound=StoreDataset)
MIN_HELD_OUT = 8  # smallest number of held-out pictures: the mean loss of fewer is too noisy


@dataclass(frozen=True)
class Split:
    """The rows of a dataset on either side of a split.

    Args:
        training: rows to train on.
        held_out: rows to measure on only.
        left_out: rows that would be held out, but have a near-duplicate among the training pictures.
        sources: the split of unpaired sources, if there are any; paired sources follow their partners.
    """

    training: list[int]
    held_out: list[int]
    left_out: list[int]
    sources: "Split | None" = None

    def __str__(self) -> str:
        near = f", {len(self.left_out)} left out for resembling training pictures" * bool(self.left_out)
        return f"{len(self.training)} pictures to train on, {len(self.held_out)} held out{near}"

    @property
    def problem(self) -> str | None:
        """A sentence if a side has too few pictures, or else None."""
        if len(self.held_out) >= MIN_HELD_OUT and len(self.training) > 1:
            return None
        return f"{self}; {MIN_HELD_OUT} held-out pictures and 2 others are needed"

    def divide(self, dataset: D) -> tuple[D, D]:
        """Return the training items and the held-out items of a dataset."""
        training, held_out = dataset.subset(self.training), dataset.subset(self.held_out)
        if self.sources is not None and dataset.source is not None:
            seen, unseen = self.sources.divide(dataset.source)
            training, held_out = training.changed(source=seen), held_out.changed(source=unseen)
        return training, held_out


def hold_out(pictures: ImageDataset, share: float, seed: int) -> Split:
    """Split pictures into training pictures and held-out pictures, which may be too few. Collective.

    The side of a picture is a function of the seed and of a hash of its content. So a picture that is added to the
    folder moves no other to the other side, and a copy of a picture, mirrored or not, is on the same side. If
    recompression changed the hash, a held-out picture that resembles a training picture is left out of both sides.
    """
    state, colours = PartialState(), reference_features(pictures, average_colours())
    split = on_main(state, lambda: split_rows(colours, share, seed))
    if split.problem is not None or not pictures.is_unpaired:
        return split
    sources = hold_out(cast(ImageDataset, pictures.source), share, seed)
    if sources.problem is not None:
        state.print(f"note: source pictures are not held out, since that would leave {sources.problem}")
        return split
    return replace(split, sources=sources)


def divided(pictures: ImageDataset, share: float, seed: int) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the pictures that a run is trained on, and those that it holds out, if there are any. Collective."""
    if not share:
        return pictures, None
    split = hold_out(pictures, share, seed)
    if split.problem is None:
        return split.divide(pictures)
    PartialState().print(shown(f"warning: no pictures are held out, as `holdout` leaves {split.problem}"))
    return pictures, None


def split_rows(colours: Tensor, share: float, seed: int) -> Split:
    """Split pictures with these colours ``[n, 3 * 8 * 8]``; see :func:`hold_out`."""
    draws = np.array([randomness.mix(seed, "held out", value) for value in perceptual_hashes(colours)])
    chosen = draws < share * 2.0**63
    training, candidates = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    near = near_duplicates(colours[candidates], colours[training]).numpy()
    return Split(training.tolist(), candidates[~near].tolist(), candidates[near].tolist())


TIMES = 8
MAX_PICTURES = 256  # largest number of pictures of either kind: more make a measurement less noisy, and longer
AT_ONCE = 8  # number of pictures that are measured at once, each at all times
PATIENCE = 3  # number of measurements in a row that must be above the least one
STANDARD_ERRORS = 2.0  # number of standard errors by which each of them must be above it


class HeldOutPictures:
    """Held-out pictures and as many training pictures, and the velocity's mean squared error on them.

    The error is measured at eight times from data to noise, and every measurement uses the same noise. So two
    measurements differ only by what the network learned between them.

    Args:
        training: the training pictures, or their latents.
        held_out: the held-out pictures of the same kind.
        seed: seed of the noise and of the choice of pictures.
        most: largest number of the held-out pictures that are measured.

    Attributes:
        count: number of the held-out pictures that are measured.
    """

    def __init__(self, training: StoreDataset, held_out: StoreDataset, seed: int, most: int = MAX_PICTURES) -> None:
        self.count = min(len(training), len(held_out), most)
        self.seed = seed
        places, keys = np.arange(self.count), [randomness.mix(seed, "held-out pictures")]
        chosen = [each.subset(permuted(places, len(each), keys)) for each in (held_out, training)]
        self._pictures: ConcatDataset[Values] = ConcatDataset(chosen)

    @property
    def passes(self) -> int:
        """Number of images that a measurement passes through the network."""
        return 2 * self.count * TIMES

    @torch.no_grad()
    def losses(self, flow: Flow, numbers: Sequence[int]) -> Tensor:
        """Measure the loss of some of the ``2 * count`` pictures, of which the held-out ones come first.

        Returns:
            The loss of each picture, float32 ``[n]``.
        """
        with flow.evaluating():
            batches = in_batches(numbers, AT_ONCE, "held-out loss")
            return torch.cat([self._losses(flow, some) for some in batches])

    def _losses(self, flow: Flow, numbers: Sequence[int]) -> Tensor:
        batch = stored_batch(self._pictures, numbers, flow)
        x_0 = flow.space.encode(batch[flow.space.key])
        with randomness.deterministic(randomness.Samples(self.seed, [number % self.count for number in numbers])):
            noise = randomness.randn("held-out noise", (len(x_0), TIMES, *x_0.shape[1:]), x_0.device).flatten(0, 1)
            conditions = flow.conditions_of(batch)
        x_0, weights = flow.masked(x_0.repeat_interleave(TIMES, dim=0))
        t = ((torch.arange(TIMES, device=x_0.device) + 0.5) / TIMES).repeat(len(numbers))
        conditions = {name: values.repeat_interleave(TIMES, dim=0) for name, values in conditions.items()}
        start, conditions = flow.start_from(noise, conditions)
        error = flow.velocity(torch.lerp(x_0, start, expand(t, x_0)), t, **conditions) - (start - x_0)
        error = error if weights is None else error * weights
        return error.square().flatten(1).mean(dim=1).unflatten(0, (-1, TIMES)).mean(dim=1)

    def measure(self, flow: Flow) -> dict[str, float]:
        """Measure the losses of all pictures, a share on every process, and return their :meth:`means`. Collective."""
        return self.means(map_over_ranks(PartialState(), 2 * self.count, lambda numbers: self.losses(flow, numbers)))

    def means(self, losses: Tensor) -> dict[str, float]:
        """Return the mean losses of both kinds and their gap, from the losses of all pictures ``[2 * count]``."""
        held_out, seen = (each.mean().item() for each in losses.double().chunk(2))
        return {"heldout_loss": held_out, "seen_loss": seen, "gap": held_out - seen}


@dataclass(frozen=True)
class HeldOutLoss:
    """One measurement of a run."""

    step: int
    heldout_loss: float
    seen_loss: float
    gap: float
    losses: list[float]
    """The loss of each held-out picture."""
    seed: int
    """The seed that chose the pictures and their noise."""


class Verdict(NamedTuple):
    """The outcome of the measurements of a run."""

    best: HeldOutLoss
    """The measurement with the least held-out loss."""
    memorises: bool
    """Whether the held-out loss has risen since, beyond its own noise, while the loss on training pictures fell."""


def judge(measured: Sequence[HeldOutLoss]) -> Verdict:
    """Decide whether the network memorises its training pictures.

    It does if each of the last :data:`PATIENCE` measurements has a held-out loss above the least one by more than
    :data:`STANDARD_ERRORS` standard errors, and a training loss below the one at that time. As the pictures and their
    noise are the same in all measurements, the test is paired: the losses of pictures differ much more from each other
    than the loss of one picture changes, and only the change of each picture's loss counts. Several measurements in a
    row are asked for, because the averaged weights lag behind and a single rise may be a fluctuation.
    """
    best = min(range(len(measured)), key=lambda index: measured[index].heldout_loss)
    last = measured[max(best + 1, len(measured) - PATIENCE) :]
    return Verdict(measured[best], len(last) == PATIENCE and all(_has_risen(measured[best], each) for each in last))


def _has_risen(before: HeldOutLoss, now: HeldOutLoss) -> bool:
    rises = np.subtract(now.losses, before.losses)
    beyond = rises.mean() > STANDARD_ERRORS * rises.std(ddof=1) / len(rises) ** 0.5
    return bool(beyond and now.seen_loss < before.seen_loss)
