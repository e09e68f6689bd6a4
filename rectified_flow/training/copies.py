"""The copies among the samples of previews, for runs on too few pictures to hold some out."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from rectified_flow.distributed import on_main
from rectified_flow.evaluation.distances import COPY, mirrored, nearness
from rectified_flow.evaluation.evaluator import SHOWN, beside_nearest
from rectified_flow.evaluation.features import RealData, average_colours, reference_features
from rectified_flow.runs.folder import SAMPLES
from rectified_flow.spaces.medium import Medium
from rectified_flow.system.pictures import encode_picture, to_grid
from rectified_flow.system.terminal import line
from rectified_flow.training.evaluations import MORE_HELP, Callback

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer

FEW_COPIES = 0.05
"""Share of copies in a preview up to which a run does not warn: by chance, samples are near a picture, too."""
NEIGHBOURS = f"{SAMPLES}/neighbours.png"
"""File of the likeliest copies in the newest preview, each followed by its nearest training pictures."""


class CopiesHook(Callback):
    """Warns at each preview whose samples are copies of training pictures, and writes :data:`NEIGHBOURS`.

    The measure is that of ``rectified-flow evaluate`` on colours alone, which need no feature network: samples and
    reconstructions of the pictures are compared by the mean colours of 8x8 fields, mirror images included.

    Args:
        pictures: the training pictures.
        medium: the medium of the flow, whose autoencoder, if any, reconstructs them.
    """

    def __init__(self, pictures: RealData, medium: Medium) -> None:
        self.pictures, self.medium, self.colours = pictures, medium, average_colours()

    @override
    def on_setup(self, trainer: "Trainer") -> None:
        medium = self.medium if self.medium.codec else None
        self.real = reference_features(self.pictures, self.colours, medium=medium)
        if trainer.config.num_samples:
            trainer.run.print(line("copies", f"previews are compared with the {len(self.pictures)} training pictures"))

    @override
    def on_preview(self, trainer: "Trainer", samples: Tensor) -> None:
        copies = on_main(trainer.accelerator, lambda: self._compare(trainer, samples.cpu()))
        if copies > FEW_COPIES * len(samples):
            found = f"{copies} of the {len(samples)} samples of the preview are copies of training pictures"
            trainer.run.print(f"warning: {found} at step {trainer.state.step}; {MORE_HELP}")

    def _compare(self, trainer: "Trainer", samples: Tensor) -> int:
        """Write :data:`NEIGHBOURS`, and return the number of samples that are copies. Main process only."""
        features = self.colours.of(samples)
        distances = nearness([features], [self.real])
        worst = distances.argsort()[:SHOWN]
        own, other = features[worst], mirrored(features)[worst]
        gaps = [torch.cdist(each, self.real).amin(dim=1, keepdim=True) for each in (own, other)]
        rows = beside_nearest(samples[worst], own.where(gaps[0] < gaps[1], other), self.real, self.pictures)
        log = trainer.run.log
        with log.tolerant("the nearest training pictures"):
            grid = encode_picture(to_grid(rows.flatten(0, 1), columns=rows.shape[1]))
            log.picture("neighbours", log.folder / NEIGHBOURS, grid, trainer.state.step)
        return int((distances < COPY).sum())
