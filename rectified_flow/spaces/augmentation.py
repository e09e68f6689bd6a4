"""Augmentation that does not leak: random variants of pictures, and numbers that describe them to the network.

The network is conditioned on these numbers, and sampling sets them to 0, so that pictures are generated as they were
before (Karras et al. 2022, arXiv:2206.00364, appendix F.2).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rectified_flow import randomness

SHIFT = 0.125  # standard deviation of a shift, as a share of the side
SCALE, STRETCH = 0.2, 0.2  # standard deviations of binary logarithms
BRIGHTNESS, CONTRAST, SATURATION = 0.2, 0.5, 1.0
"""Standard deviations of a summand of values in [-1, 1], and of binary logarithms of factors."""
NUMBERS = 14  # numbers that describe the augmentation of a row
COLOURS = 3


def augmented(
    x: Tensor, probability: float, *, colours: bool = True, has_missing: bool = False
) -> tuple[Tensor, Tensor]:
    """Draw random variants of pictures, and the numbers that describe each.

    Mirroring left to right and top to bottom, whole-pixel shifts, scaling, rotation, stretching along any axis, and
    other colours are drawn for each row on their own.

    Args:
        x: pictures ``[b, c, h, w]``, float32 in [-1, 1]; the first three of three channels or more are colours.
        probability: probability of each kind of change; mirroring then applies to half of the rows.
        colours: change colours, too, and clip values to [-1, 1].
        has_missing: values may be NaN, for unknown, and unknown pixels do not spread.

    Returns:
        Pictures ``[b, c, h, w]`` in [-1, 1], and numbers ``[b, 14]``; a row without changes is the same to the bit, and
        its numbers are 0.
    """
    count, device, (height, width) = len(x), x.device, x.shape[-2:]
    happens = (randomness.rand("augmentation", (count, 7), device) < probability).float()
    mirrors, inverts, shifts, scales, turns, stretches, recolours = happens.unbind(dim=1)
    recolours = recolours if colours else torch.zeros_like(recolours)
    normal = randomness.randn("augmentation sizes", (count, 9), device).unbind(dim=1)
    turn, axis, hue = ((randomness.rand("augmentation angles", (count, 3), device) * 2 - 1) * math.pi).unbind(dim=1)

    mirrored, inverted = mirrors * (normal[0] > 0), inverts * (normal[1] > 0)
    shift_x, shift_y = (shifts * normal[2] * SHIFT * width).round(), (shifts * normal[3] * SHIFT * height).round()
    scale, stretch = scales * normal[4] * SCALE, stretches * normal[5] * STRETCH
    turn, hue = turns * turn, recolours * hue
    brightness, contrast = recolours * normal[6] * BRIGHTNESS, recolours * normal[7] * CONTRAST
    saturation = recolours * normal[8] * SATURATION
    moves = (
        *(mirrored, inverted, shift_x / (SHIFT * width), shift_y / (SHIFT * height), scale / SCALE),
        *(turn.cos() - 1, turn.sin(), stretch / STRETCH * (2 * axis).cos(), stretch / STRETCH * (2 * axis).sin()),
    )
    changes = (brightness / BRIGHTNESS, contrast / CONTRAST, hue.cos() - 1, hue.sin(), saturation / SATURATION)

    with torch.autocast(device.type, enabled=False):  # in bf16, places of pixels would be rounded to half a pixel
        flips = torch.diag_embed(torch.stack((1 - 2 * mirrored, 1 - 2 * inverted), dim=1))
        stretched = _rotation(axis) @ torch.diag_embed(2 ** torch.stack((stretch, -stretch), dim=1)) @ _rotation(-axis)
        linear = 2 ** scale[:, None, None] * _rotation(turn) @ stretched @ flips
        whole = (scale == 0) & (turn == 0) & (stretch == 0) if has_missing else None
        moved = _moved(x, linear, torch.stack((shift_x, shift_y), dim=1), whole)
        x = _where_any(moves, moved.clamp(-1, 1) if colours else moved, x)
        if colours:
            x = _where_any(changes, _recoloured(x, brightness, contrast, hue, saturation), x)
    return x, torch.stack((*moves, *changes), dim=1)


def _where_any(numbers: Sequence[Tensor], changed: Tensor, x: Tensor) -> Tensor:
    """Return ``changed`` in rows where one of ``numbers`` ``[b]`` is not 0, else ``x``."""
    return torch.where((torch.stack(tuple(numbers)) != 0).any(dim=0)[:, None, None, None], changed, x)


def _rotation(angle: Tensor) -> Tensor:
    """Return rotations by angles ``[b]``, as matrices ``[b, 2, 2]``."""
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.stack((cos, -sin), dim=1), torch.stack((sin, cos), dim=1)), dim=1)


def over_known(resample: Callable[[Tensor], Tensor], x: Tensor, least: float = 0.0) -> Tensor:
    """Resample known pixels by a linear map, divided by their weight; NaN where the weight is at most ``least``."""
    unknown = x.isnan()
    values, weight = resample(x.masked_fill(unknown, 0)), resample((~unknown).to(x.dtype))
    # Without unknown pixels, the weight is 1 up to rounding, and the result stays the same to the bit.
    return torch.where(unknown.any(), values / weight.masked_fill(weight <= least, torch.nan), values)


def _moved(x: Tensor, linear: Tensor, shift: Tensor, whole: Tensor | None = None) -> Tensor:
    """Move the points ``p`` of pictures, from the centre [px], to ``linear @ p + shift``; edges are mirrored.

    With ``whole``, bool ``[b]``, pixels may be unknown; in these rows, each pixel moves to the place of another.
    """
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) - (height - 1) / 2
    columns = torch.arange(width, device=x.device) - (width - 1) / 2
    targets = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
    inverse = torch.linalg.inv_ex(linear).inverse  # torch.linalg.inv would wait for the GPU
    sources = torch.einsum("bij, bhwj -> bhwi", inverse, targets - shift[:, None, None])
    grid = 2 * torch.stack((sources[..., 0] / width, sources[..., 1] / height), dim=-1)
    sample = partial(F.grid_sample, grid=grid, padding_mode="reflection", align_corners=False)
    if whole is None:
        return sample(x, mode="bicubic")
    moved = over_known(partial(sample, mode="bicubic"), x, least=0.5)
    whole = whole & x.isnan().flatten(1).any(dim=1)  # other rows stay the same to the bit
    return torch.where(whole[:, None, None, None], sample(x, mode="nearest"), moved)


def _recoloured(x: Tensor, brightness: Tensor, contrast: Tensor, hue: Tensor, saturation: Tensor) -> Tensor:
    """Change the brightness, contrast (about mid-grey), hue (an angle) and saturation (a logarithm) of pictures."""
    colours = x[:, :COLOURS] * 2 ** contrast[:, None, None, None] + brightness[:, None, None, None]
    if colours.shape[1] == COLOURS:
        grey = torch.full((COLOURS, COLOURS), 1 / COLOURS, device=x.device)  # the projection on the grey axis
        identity = torch.eye(COLOURS, device=x.device)
        rest, across = identity - grey, (identity.roll(1, dims=0) - identity.roll(1, dims=1)) / COLOURS**0.5
        turned = hue.cos()[:, None, None] * rest + hue.sin()[:, None, None] * across
        colours = torch.einsum("bij, bjhw -> bihw", grey + 2 ** saturation[:, None, None] * turned, colours)
    return torch.cat((colours.clamp(-1, 1), x[:, COLOURS:]), dim=1)
