"""Pictures that are held out of the training, to see whether it learns pictures or learns these pictures by heart."""

from dataclasses import dataclass

import numpy as np
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.evaluation.features import average_colours
from rectified_flow.evaluation.reference import reference_features
from rectified_flow.evaluation.similarity import near_duplicates, perceptual_hashes
from rectified_flow.randomness import mix

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
