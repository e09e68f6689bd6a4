"""The copies among the samples of previews, for runs on too few pictures to hold some out."""

from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from rectified_flow.distributed import on_main
from rectified_flow.evaluation.distances import COPY, nearness
from rectified_flow.evaluation.features import RealData, average_colours, reference_features
from rectified_flow.spaces.medium import Medium
from rectified_flow.system.terminal import line
from rectified_flow.training.evaluations import MORE_HELP, Callback

if TYPE_CHECKING:
    from rectified_flow.training.trainer import Trainer

FEW_COPIES = 0.05
"""Share of copies in a preview up to which a run does not warn: by chance, samples are near a picture, too."""


class CopiesHook(Callback):
    """A warning at each preview whose samples are copies of training pictures.

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
        copies = on_main(trainer.accelerator, lambda: self._copies_of(samples))
        if copies > FEW_COPIES * len(samples):
            found = f"{copies} of the {len(samples)} samples of the preview are copies of training pictures"
            trainer.run.print(f"warning: {found} at step {trainer.state.step}; {MORE_HELP}")

    def _copies_of(self, samples: Tensor) -> int:
        """Return the number of samples that are copies. Main process only."""
        return int((nearness([self.colours.of(samples)], [self.real]) < COPY).sum())
