"""The flags that say which pictures a run is trained on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rectified_flow.data.framing import Crop, Framing, parse_ratio
from rectified_flow.errors import require, require_finite, require_positive
from rectified_flow.flags import check_paths, default_is

OXFORD_FLOWERS = "nelorth/oxford-flowers"


@dataclass(frozen=True)
class DataConfig:
    """The training pictures."""

    dataset: str = OXFORD_FLOWERS
    """Hub id of a dataset with an image column, or synthetic-flowers, which needs no download."""
    dataset_path: Path | None = None
    """Folder of your own pictures (with a subfolder per class, or none), or a local datasets folder."""
    image_size: int = 64
    """Short side of the images [px]; pictures are resized by their short side and cropped to --aspect_ratio."""
    aspect_ratio: str = "1:1"
    """Width to height of the images, such as 3:2."""
    crop: Crop = "center"
    """What is kept of other pictures: the centre, a random part at each step, or (none) all of it, padded."""
    alpha: bool = False
    """Keep transparency, as a fourth channel; else transparent parts become white."""
    autoencoder: str | None = None
    """Train on latents: haar, an exact wavelet, or the folder or hub id of an image autoencoder of diffusers."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    augment: float = 0.0
    """Probability of each kind of change to an image, such as rotation, of which the network is told; 0.15 for few."""
    holdout: float = 0.0
    """Share of the images to hold out and measure, at --evaluate_every or else ten times: are others memorised?"""
    skip_broken_images: bool = False
    """Skip pictures that cannot be decoded, instead of stopping."""
    cache_dir: Annotated[Path | None, default_is("$RECTIFIED_FLOW_CACHE, else ~/.cache/rectified-flow")] = None
    """Where decoded images are kept."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        require_positive(self, "image_size")
        require(0 <= self.augment <= 1, f"--augment is {self.augment:g}; it is a probability, from 0 to 1")
        require(0 <= self.holdout < 1, f"--holdout is {self.holdout:g}; it is a share, at least 0 and below 1")
        ratio = parse_ratio(self.aspect_ratio)
        refused = {
            f"--aspect_ratio {self.aspect_ratio}": ratio != (1, 1),
            "--crop random": self.crop == "random",
            "--alpha": self.alpha,
            "--augment": self.augment > 0,
        }
        for flag, given in refused.items():
            require(
                self.autoencoder is None or not given,
                f"--autoencoder and {flag} exclude each other: latents are of whole, opaque squares, encoded once",
            )

    @property
    def framing(self) -> Framing:
        """The form in which pictures are stored and trained on."""
        return Framing.of(self.image_size, self.aspect_ratio, alpha=self.alpha, crop=self.crop)
