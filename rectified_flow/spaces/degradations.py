"""Degradations: what is taken away from pictures, so that a flow learns to put it back.

A degradation makes the source of a training pair from its target, so that super-resolution, colourising, deblurring,
inpainting and drawings-to-pictures need no second set of pictures.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.registry import register
from rectified_flow.spaces.augmentation import COLOURS, over_known

LUMINANCE = (0.299, 0.587, 0.114)  # weights of red, green and blue in the brightness of a pixel (ITU-R BT.601)
BOX_SIDES = (0.25, 0.6)  # least and largest side of a box, as shares of the side of the picture
STROKES, BRUSH_WIDTHS = 4, (0.06, 0.12)
"""Number of straight strokes of a brush, and its least and largest half-width as shares of the side of the picture."""
EDGE_GAIN = 1.5  # brightness by which a line is darker than the background, for a gradient of 1 per pixel


class Degradation(ABC):
    """A map from pictures to what is left of them.

    Register a subclass and keep its constructor's arguments as attributes, and ``degrade`` and checkpoints can name it.
    Random draws come from :mod:`rectified_flow.randomness`.
    """

    is_projection: ClassVar[bool] = False
    """Whether a second application changes nothing. If so, pictures to start from are degraded, too."""
    leaves_holes: ClassVar[bool] = False
    """Whether results have unknown pixels at random places. If so, users may choose the places in sampling."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Degrade pictures ``[b, c, h, w]`` in [-1, 1]; the result has the same shape, and NaN where it is unknown."""


@register
class Downsample(Degradation):
    """Averages of blocks of pixels, for super-resolution.

    Args:
        factor: side of a block [px].
    """

    is_projection = True

    def __init__(self, factor: Annotated[int, Interval(ge=2)] = 4) -> None:
        self.factor = factor

    @override
    def __call__(self, x: Tensor) -> Tensor:
        """Replace each block of pixels, also those cut by the edges, by the average of its known ones."""
        means = over_known(partial(F.avg_pool2d, kernel_size=self.factor, ceil_mode=True), x)
        return F.interpolate(means, scale_factor=self.factor)[..., : x.shape[-2], : x.shape[-1]]


@register
class Grey(Degradation):
    """Brightness without colour, for colourising."""

    is_projection = True

    @override
    def __call__(self, x: Tensor) -> Tensor:
        return _with_colours(_brightness(x), x)


@register
class Blur(Degradation):
    """A Gaussian blur, for deblurring.

    Args:
        sigma: standard deviation of the blur [px].
    """

    def __init__(self, sigma: Annotated[float, Interval(gt=0, le=64)] = 2.0) -> None:
        self.sigma = sigma

    @override
    def __call__(self, x: Tensor) -> Tensor:
        """Blur along the rows and then along the columns; the edges are repeated outwards.

        Unknown pixels have no weight, and become known where a known one is within reach.
        """
        return over_known(self._blurred, x)

    def _blurred(self, x: Tensor) -> Tensor:
        reach = max(1, round(3 * self.sigma))
        places = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
        weights = (-0.5 * (places / self.sigma) ** 2).exp()
        weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)
        padded = F.pad(x, (reach, reach, reach, reach), mode="replicate")
        across = F.conv2d(padded, weights, groups=x.shape[1])
        return F.conv2d(across, weights.transpose(-1, -2), groups=x.shape[1])


@register
class Mask(Degradation):
    """A hole at a random place, for inpainting; its pixels are unknown.

    Args:
        shape: ``box`` for a rectangle, ``brush`` for strokes.
    """

    leaves_holes = True

    def __init__(self, shape: Literal["box", "brush"] = "box") -> None:
        self.shape = shape

    @override
    def __call__(self, x: Tensor) -> Tensor:
        hole = (_box if self.shape == "box" else _strokes)(x)
        return x.masked_fill(hole[:, None], torch.nan)


@register
class Edges(Degradation):
    """Dark lines on white where the brightness changes, for turning drawings into pictures."""

    @override
    def __call__(self, x: Tensor) -> Tensor:
        sobel = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [-1.0, -2.0, -1.0]], device=x.device, dtype=x.dtype) / 8
        kernels = torch.stack((sobel, sobel.T))[:, None]
        slope = F.conv2d(F.pad(_brightness(x), (1, 1, 1, 1), mode="replicate"), kernels).norm(dim=1, keepdim=True)
        lines = 1 - (2 * EDGE_GAIN * slope).clamp(max=2)
        return _with_colours(lines, x)


def _brightness(x: Tensor) -> Tensor:
    """Return the brightness ``[b, 1, h, w]`` of pictures ``[b, c, h, w]``, which may be grey."""
    if x.shape[1] < COLOURS:
        return x[:, :1]
    weights = torch.tensor(LUMINANCE, device=x.device, dtype=x.dtype)
    return torch.einsum("c, bchw -> bhw", weights, x[:, :COLOURS])[:, None]


def _with_colours(grey: Tensor, x: Tensor) -> Tensor:
    """Return grey pictures ``[b, 1, h, w]`` with the channels and the transparency of ``x``."""
    return torch.cat((grey.expand(-1, min(COLOURS, x.shape[1]), -1, -1), x[:, COLOURS:]), dim=1)


def _places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vertical ``[h, 1]`` and horizontal ``[w]`` places of pixels, as shares of the sides."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) + 0.5) / height
    return rows[:, None], (torch.arange(width, device=x.device) + 0.5) / width


def _box(x: Tensor) -> Tensor:
    """Draw a box of a random size at a random place for each row, bool ``[b, h, w]``."""
    low, high = BOX_SIDES
    drawn = randomness.rand("degradation", (len(x), 4), x.device)[..., None, None].unbind(dim=1)
    tall, wide = (low + (high - low) * each for each in drawn[:2])
    top, left = drawn[2] * (1 - tall), drawn[3] * (1 - wide)
    rows, columns = _places(x)
    return (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)


def _strokes(x: Tensor) -> Tensor:
    """Draw connected straight strokes of a random width for each row, bool ``[b, h, w]``."""
    corners = randomness.rand("degradation", (len(x), STROKES + 1, 2), x.device)
    thin, thick = BRUSH_WIDTHS
    width = thin + (thick - thin) * randomness.rand("degradation, width", (len(x), 1, 1), x.device)
    pixels = torch.stack(torch.broadcast_tensors(*_places(x)), dim=-1)
    hole = torch.zeros(len(x), *x.shape[-2:], dtype=torch.bool, device=x.device)
    for stroke in range(STROKES):
        begin, end = (corners[:, stroke + i, None, None] for i in (0, 1))
        way = end - begin
        along = ((pixels - begin) * way).sum(dim=-1) / way.square().sum(dim=-1).clamp(min=1e-6)
        hole |= (pixels - begin - along.clamp(0, 1)[..., None] * way).norm(dim=-1) < width
    return hole
