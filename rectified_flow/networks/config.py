"""The flags of the Unet."""

from dataclasses import dataclass
from pathlib import Path

from rectified_flow.errors import require, require_finite, require_fraction, require_positive
from rectified_flow.flags import check_paths
from rectified_flow.machine import require_memory

BYTES_PER_WEIGHT = 16
"""In training, at least: the weight, its gradient and two moments, in float32."""


@dataclass(frozen=True)
class UnetConfig:
    """A Unet for pictures."""

    dim: int = 64
    """Channels of the Unet at full resolution."""
    dim_mults: tuple[int, ...] = (1, 2, 3, 4)
    """Channels of each level as multiples of dim; each level halves the side."""
    dropout: float = 0.1
    """Dropout probability inside residual blocks."""
    use_cfg: bool = False
    """Train on labels, dropping 10% of them, so that sampling can be guided (classifier-free guidance)."""
    init_from: Path | None = None
    """Start from the weights of this checkpoint or run, as far as their shapes agree, on any data."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, more time."""

    def __post_init__(self) -> None:
        check_paths(self)
        require_finite(self)
        require_positive(self, "dim")
        require_fraction(self, "dropout")
        require(
            len(self.dim_mults) > 0 and min(self.dim_mults) > 0,
            f"--dim_mults is {self.dim_mults}; it needs at least one number, all above 0",
        )
        # A level has at least two blocks down and three up, each of two 3x3 convolutions.
        weights = sum(2 * (2 + 3) * 9 * (self.dim * mult) ** 2 for mult in self.dim_mults)
        what = f"a Unet of --dim {self.dim} and --dim_mults {' '.join(map(str, self.dim_mults))}"
        require_memory(BYTES_PER_WEIGHT * weights, what, "lower one of the two")

    def check_side(self, image_size: int, latent_side: int | None = None, ratio: tuple[int, int] = (1, 1)) -> None:
        """Raise a UsageError if the levels cannot halve the sides of pictures, or the side of their latents.

        Args:
            image_size: the short side [px].
            latent_side: of latents, if the network works on them.
            ratio: width and height of pictures, without common divisors.
        """
        divisor = 2 ** (len(self.dim_mults) - 1)
        needed = f"by {divisor}, as the {len(self.dim_mults)} levels of --dim_mults need"
        if latent_side is None:
            multiple = divisor * min(ratio)  # as one of the two is odd
            nearest = max(1, round(image_size / multiple)) * multiple
            given, sides = f"--image_size {image_size}", "is"
            if ratio != (1, 1):
                given, sides = f"{given} with --aspect_ratio {ratio[0]}:{ratio[1]}", "gives sides that are"
            require(image_size % multiple == 0, f"{given} {sides} not divisible {needed}; take {nearest}")
            return
        require(
            latent_side % divisor == 0,
            f"--image_size {image_size} has latents of side {latent_side}, which is not divisible {needed}: pass fewer "
            "levels, or a larger power of two as --image_size",
        )
