"""Resize fields in floating point. Imports no torch."""

from math import ceil, floor
from typing import Any

import numpy as np

from rectified_flow.measurements.files import Array


def fit_field(values: Array, size: tuple[int, int], *, pad: bool = False) -> Array:
    """Resize a field, and crop it to the centre or pad it.

    A new pixel is the mean over a box that is as wide as the new pixel, and at least as wide as an old one. Shrinking
    therefore keeps the mean of the field, enlarging is linear, and no value leaves the range of its channel.

    Args:
        values: ``[c, h, w]``. NaN is unknown: the mean is that of the known part of the box, and NaN where more than
            half of the box is unknown.
        size: width and height of the result [px].
        pad: keep the whole field, and fill the rest with NaN, or with the smallest value of the channel for integers.

    Returns:
        ``[c, h, w]`` in the type of ``values``, computed in float64; integers are rounded. A field that has this size
        already is returned as it is.
    """
    channels, height, width = values.shape
    if (width, height) == size:
        return values
    scale = (min if pad else max)(size[0] / width, size[1] / height)
    inner = [max(1, round(side * scale)) for side in (height, width)] if pad else list(size[::-1])
    rows, columns = (
        _boxes(side, side if pad else min(side, after / scale), after)
        for side, after in zip((height, width), inner, strict=True)
    )
    top, left = (size[1] - inner[0]) // 2, (size[0] - inner[1]) // 2
    result = np.empty((channels, size[1], size[0]), values.dtype)
    for channel, place in zip(values, result, strict=True):
        known = ~np.isnan(channel)
        fitted = _mean(np.where(known, channel, 0), rows, columns)
        place[:] = np.nan if values.dtype.kind == "f" else channel.min()
        if not known.all():
            weight = _mean(known, rows, columns)
            fitted = np.where(weight >= 0.5 - 1e-9, fitted / np.maximum(weight, 0.25), np.nan)
        if known.any():
            fitted = np.clip(fitted, np.nanmin(channel), np.nanmax(channel))
        fitted = fitted if values.dtype.kind == "f" else np.rint(fitted)
        place[top : top + inner[0], left : left + inner[1]] = fitted
    return result


Boxes = tuple[np.ndarray[Any, np.dtype[np.intp]], np.ndarray[Any, np.dtype[np.float64]]]
"""Numbers of the old pixels in the box of each new one ``[n, k]``, and their weights, whose sum over ``k`` is 1."""


def _boxes(side: int, extent: float, after: int) -> Boxes:
    """Return the boxes of ``after`` new pixels in the middle ``extent`` of ``side`` old ones."""
    scale, start = extent / after, (side - extent) / 2
    if scale == 1:
        start = floor(start)  # whole pixels are cropped without a change of values
    width = max(scale, 1)
    begin = start + (np.arange(after) + 0.5) * scale - width / 2
    numbers = np.floor(begin).astype(np.intp)[:, None] + np.arange(ceil(width) + 1)
    overlap = np.minimum(numbers + 1, begin[:, None] + width) - np.maximum(numbers, begin[:, None])
    weights = np.maximum(overlap, 0)
    return numbers.clip(0, side - 1), weights / weights.sum(axis=1, keepdims=True)


def _mean(channel: Array, rows: Boxes, columns: Boxes) -> Array:
    """Return the means over boxes of one channel ``[h, w]``, float64."""
    for numbers, weights in (rows, columns):  # each iteration resizes the first axis, then transposes
        shrunk = np.zeros((len(numbers), channel.shape[1]))
        for number, weight in zip(numbers.T, weights.T, strict=True):
            shrunk += weight[:, None] * channel[number]
        channel = shrunk.T
    return channel
