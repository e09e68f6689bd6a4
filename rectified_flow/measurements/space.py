"""Fields: a space of measurements, which converts between physical units and values of about -1 to 1."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.condition import Values, as_number
from rectified_flow.errors import UsageError
from rectified_flow.measurements.files import Array, FieldFormat, as_type, encode_field, fit_field, read_field
from rectified_flow.parts import choose_named
from rectified_flow.registry import describe, register
from rectified_flow.spaces.augmentation import augmented
from rectified_flow.spaces.pixels import cropped, mirrored
from rectified_flow.spaces.space import RGB, Space

if TYPE_CHECKING:
    from rectified_flow.system.pictures import Legend


class Transform(ABC):
    """An increasing, differentiable function of a value in physical units, with its inverse.

    Register a subclass and keep its constructor's arguments as attributes, and flags and checkpoints can name it.
    """

    @abstractmethod
    def __call__(self, values: Tensor) -> Tensor:
        """Transform values of any shape; those that have no transform become infinite or NaN."""

    @abstractmethod
    def inverse(self, values: Tensor) -> Tensor:
        """Return the values in physical units."""

    @torch.enable_grad()
    def log_slope(self, values: Tensor) -> Tensor:
        """Return the logarithm of the derivative at values in physical units."""
        values = values.detach().requires_grad_()
        [slope] = torch.autograd.grad(self(values).sum(), values)
        return slope.log()


@register
class Linear(Transform):
    """No change."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def inverse(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values


@register
class Log(Transform):
    """The natural logarithm, for positive values over several orders of magnitude."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return the logarithms."""
        return values.log()

    def inverse(self, values: Tensor) -> Tensor:
        """Return the exponentials."""
        return values.exp()


@register
@dataclass(frozen=True)
class Asinh(Transform):
    """The inverse hyperbolic sine: linear for values below ``scale``, logarithmic far above, and defined for all."""

    scale: Annotated[float, Gt(0)] = 1.0

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``asinh(v / scale)``."""
        return torch.asinh(values / self.scale)

    def inverse(self, values: Tensor) -> Tensor:
        """Return ``scale * sinh(y)``."""
        return self.scale * torch.sinh(values)


LEVELS = 256
OUTSIDE = 0.01  # margin beyond the range within which values are not marked, as a share of the range
MAX_VALUES = 2**24  # number of stored values from which percentiles are taken
BELOW, ABOVE, UNKNOWN = (0, 160, 255), (255, 0, 0), (127, 127, 127)
"""Colours of values below and above the range, and of unknown ones."""


@register
@dataclass(eq=False)
class Fields(Space):
    """Measurements ``[b, c, h, w]``.

    Stored and generated fields are in physical units; NaN stands for unknown values, which are left out of the loss.
    The flow works on the transformed values, of which ``low`` and ``high`` are -1 and 1. Nothing is clipped. If stored
    fields are larger than the given ``shape``, training crops random parts. Other uses crop the centre.

    Args:
        shape: ``(c, h, w)``.
        low: value of each channel that becomes -1, in physical units.
        high: value of each channel that becomes 1.
        transform: transform of the values, before they are scaled.
        dtype: numpy name of the type in which fields are stored.
        show: how fields are rendered: ``3,2,1`` for the channels of red, green and blue, or ``1:viridis`` for a channel
            in a colour map of matplotlib.
        has_missing: whether values can be unknown.
        horizontal_flip: mirror half of the training fields.
        augmentation: probability of each change to a training field, without changes of colours; 0 for none.
        files: the format of the files that fields come from, and are written to
            (:class:`rectified_flow.measurements.files.FieldFormat`); by default ``[c, h, w]`` in ``.npy``.
        sources: the space of the sources of a translation, if they have a scale of their own.
    """

    metrics = ("spectra",)

    shape: tuple[int, ...] = field()
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    _: KW_ONLY
    transform: Transform = field(default_factory=Linear)
    dtype: str = "float32"
    show: str = "1:viridis"
    has_missing: bool = False
    horizontal_flip: bool = False
    augmentation: float = 0.0
    files: dict[str, Any] = field(default_factory=dict)
    sources: "Fields | None" = None

    def __post_init__(self) -> None:
        self.shape, channels = tuple(self.shape), self.shape[0]
        self.low, self.high = tuple(self.low) or (-1.0,) * channels, tuple(self.high) or (1.0,) * channels
        plain = {"suffix": ".npy", "dtype": self.dtype, "channels": channels, "channels_last": False}
        self.files = {**plain, **self.files}
        self.suffix: str = self.files["suffix"]
        numbers, _, name = self.show.partition(":")
        self.shown = [int(number) - 1 if number.isdecimal() else -1 for number in numbers.split(",")]
        """Numbers of the channels that are rendered, from 0."""
        self._colour_map = name or "viridis"
        if len(self.shown) not in (1, RGB) or not {*self.shown} <= {*range(channels)}:
            raise ValueError(f"{self.show} names no channels from 1 to {channels}: pass 1:viridis, or three like 3,2,1")
        if len(self.shown) == 1:
            colour_map(self._colour_map)  # raises an error for an unknown name
        bottom, top = self.transform(torch.tensor([self.low, self.high], dtype=torch.float64))
        if not (top > bottom).all():
            raise ValueError(f"the ranges are {self.low} to {self.high}: pass MIN below MAX")
        scales = torch.stack((2 / (top - bottom), -(top + bottom) / (top - bottom))).float()[..., None, None]
        self._scale, self._offset = scales

    @classmethod
    def of(
        cls,
        source: Any,
        shape: Sequence[int],
        *,
        value_range: str = "measured",
        transform: str = "linear",
        show: str = "",
        horizontal_flip: bool = False,
        augmentation: float = 0.0,
    ) -> "Fields":
        """Build the space of a run on measurements.

        Args:
            source: measurements in a store, whose range is known, or in the files of a folder.
            shape: shape of which the last two are the height and the width.
            value_range: range that is scaled to [-1, 1]: ``measured``, ``percentile:P``, ``MIN,MAX`` for all channels,
                or ``MIN,MAX,MIN,MAX,...`` for each.
            transform: transform before scaling: ``linear``, ``log``, ``asinh:SCALE``, or a registered one.
            show: channels to show, see :class:`Fields`; by default their type decides.
            horizontal_flip: mirror half of the training fields.
            augmentation: probability of each change to a training field.
        """
        stored, partner = source.space, getattr(source, "source", None)
        low, high = range_of(value_range, stored, getattr(source, "images", None))
        chosen, least = choose_named("space transform", Transform, transform), min(*stored.low, *low)
        if not chosen(torch.tensor(least)).isfinite():
            raise UsageError(f"--space transform={transform} is undefined for the value {least:g}: pass asinh")
        sources = None
        if partner is not None:
            sources = cls.of(partner, shape, value_range=value_range, transform=transform, show=show)
            if len(sources.low) != len(low):
                raise UsageError(f"--source_path has {len(sources.low)} channels: sources need {len(low)} channels")
        scale: dict[str, Any] = {"low": low, "high": high, "transform": chosen, "sources": sources}
        draws: dict[str, Any] = {"horizontal_flip": horizontal_flip, "augmentation": augmentation}
        return replace(stored, shape=(len(low), *shape[1:]), show=show or stored.show, **scale, **draws)

    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        """Draw a random part of each row, mirrored and augmented if the space does so; float32 in physical units."""
        data = cropped(data.float(), self.shape, at_random=True)
        data = mirrored(data) if self.horizontal_flip else data
        if not self.augmentation:
            return data, {}
        x, numbers = augmented(self.encode(data), self.augmentation, colours=False, has_missing=self.has_missing)
        return self.decode(x), {"augmentation": numbers}

    def encode(self, data: Tensor) -> Tensor:
        """Return float32 in about [-1, 1], the centre of larger fields."""
        scale, offset = self._scale.to(data.device), self._offset.to(data.device)
        return self.transform(cropped(data, self.shape).float()) * scale + offset

    def decode(self, x: Tensor) -> Tensor:
        """Return float32 in physical units."""
        scale, offset = self._scale.to(x.device), self._offset.to(x.device)
        return self.transform.inverse((x.float() - offset) / scale)

    def augment_source(self, data: Tensor) -> Tensor:
        """Draw a variant of each row of sources, in physical units."""
        return (self.sources or self).augment(data)[0]

    def encode_source(self, data: Tensor) -> Tensor:
        """Encode sources, which are always in physical units."""
        return (self.sources or self).encode(data)

    def decode_source(self, x: Tensor) -> Tensor:
        """Return encoded sources in physical units."""
        return (self.sources or self).decode(x)

    def scaled_like(self, other: Space) -> "Fields":
        """Return this space with the ranges, the transforms and the file format of another."""
        kept = ("shape", "show", "has_missing", "horizontal_flip", "augmentation")
        return replace(cast(Fields, other), **{name: getattr(self, name) for name in kept})

    @property
    def noun(self) -> str:
        """The number and the type of the channels of the files."""
        return str(FieldFormat(**self.files))

    def misfit(self, stored: Space) -> str | None:
        """Return the number and the type of the channels of ``stored``, if they are others."""
        differ = f"has {stored.noun}, and the flow was trained on {self.noun}: pass such files"
        return None if stored.noun == self.noun else differ

    @property
    def input_suffixes(self) -> set[str]:
        """The suffix of the files of the data, also as it is written out."""
        return {suffix := str(self.files["suffix"]), suffix.replace(".tif", ".tiff")}

    def read(self, file: Path) -> Tensor:
        """Read a field of the type of the sources, or of the data; float32 in physical units, of this shape."""
        values, how, _ = read_field(file, self.files["channels_last"])
        if str(how) != (wanted := (self.sources or self).noun):
            raise ValueError(f"it has {how}, not {wanted}")
        _, height, width = self.shape
        return torch.from_numpy(fit_field(values, (width, height)).astype(np.float32))

    def write(self, datum: Tensor) -> bytes:
        """Return the file of a field in the format of the data."""
        return encode_field(datum.numpy(), FieldFormat(**self.files))

    def on_page(self) -> dict[str, Any]:
        """Return the conversion to physical units, and the colours by which fields are shown."""
        legend = self.legend
        scale = {"low": list(self.low), "high": list(self.high), "transform": describe(self.transform)}
        ends = {} if legend is None else {"colours": legend.colours.tolist(), "ends": [legend.least, legend.greatest]}
        return {**scale, "files": self.files, "shown": self.shown, **ends}

    @property
    def summary(self) -> str:
        """The stored type, the ranges that are scaled to [-1, 1], and the transform."""
        ranges = ", ".join(f"{least:.6g} to {most:.6g}" for least, most in zip(self.low, self.high, strict=True))
        unknown = "; unknown values are left out of the loss" * self.has_missing
        return f"{self.dtype}, {ranges}, {type(self.transform).__name__.lower()}{unknown}"

    def to_stored(self, x: Tensor) -> Tensor:
        """Return fields of the stored type, clipped to its range; integers are rounded."""
        return torch.from_numpy(as_type(self.decode(x).cpu().numpy(), np.dtype(self.dtype))).to(x.device)

    def render(self, data: Tensor) -> Tensor:
        """Render three channels as red, green and blue, or one in a colour map that marks values out of its range."""
        x = self.encode(data)[:, self.shown]
        share = (x + 1) / 2
        colours = (share.nan_to_num(0.5) * (LEVELS - 1)).round().clamp(0, LEVELS - 1).long()
        if len(self.shown) == RGB:
            return colours.to(torch.uint8)
        pictures = colour_map(self._colour_map).to(x.device)[colours[:, 0]].movedim(-1, 1).contiguous()
        for marked, colour in ((share < -OUTSIDE, BELOW), (share > 1 + OUTSIDE, ABOVE), (share.isnan(), UNKNOWN)):
            paint = torch.tensor(colour, dtype=torch.uint8, device=x.device)
            pictures = torch.where(marked, paint[:, None, None], pictures)
        return pictures

    @property
    def legend(self) -> "Legend | None":
        """The colours of a colour map, and the values at both ends."""
        from rectified_flow.system.pictures import Legend  # loads Pillow, which model code does without

        if len(self.shown) == RGB:
            return None
        [channel] = self.shown
        least, greatest = (f"{value:.4g}" for value in (self.low[channel], self.high[channel]))
        name = f"channel {channel + 1}" if len(self.low) > 1 else ""
        return Legend(colour_map(self._colour_map), least, greatest, name)

    def dequantised(self, data: Tensor) -> tuple[Tensor, Tensor | float]:
        """Draw integers within their unit; the volume changes by the slopes of the transform, in the mean of a row."""
        values = cropped(data.float(), self.shape)
        if not data.is_floating_point():
            values = values + randomness.rand("dequantisation", values.shape, values.device) - 0.5
        log_slope = self.transform.log_slope(values) + self._scale.to(values.device).log()
        return self.encode(values), log_slope.double().flatten(1).mean(dim=1).cpu() / log(2)


def range_of(text: str, stored: Fields, images: Array | None) -> tuple[Sequence[float], Sequence[float]]:
    """Return the values of each channel that become -1 and 1, by a ``value_range`` of :meth:`Fields.of`.

    ``images`` are the stored fields ``[n, c, h, w]``, if there is a store already.
    """
    name, _, percent = text.partition(":")
    if name == "percentile" and (least := as_number(percent)) is not None and 0 <= least < 50:
        if images is None:  # the values are read later
            return stored.low, stored.high
        pixels = images.reshape(*images.shape[:2], -1)
        some = pixels[..., :: 1 + pixels.size // MAX_VALUES].astype(np.float64)  # from every field
        low, high = np.nanpercentile(some, [least, 100 - least], axis=(0, 2)).tolist()
        return low, high
    if text == "measured":
        return stored.low, stored.high
    parts = text.split(",")
    numbers = [number for part in parts if (number := as_number(part)) is not None]
    if len(numbers) < len(parts) or len(parts) not in (2, 2 * len(stored.low)):
        choices = "measured, percentile:P, MIN,MAX, or MIN,MAX for each channel"
        raise UsageError(f"--space value_range={text} must be {choices}")
    numbers *= 2 * len(stored.low) // len(numbers)
    return numbers[::2], numbers[1::2]


def default_show(how: FieldFormat) -> str:
    """Return the default of ``show``: uint8 and uint16 in grey or RGB, other types in a colour map."""
    if how.dtype not in ("uint8", "uint16"):
        return "1:viridis"
    return "1,2,3" if how.channels == RGB else "1:grey"


@cache
def colour_map(name: str) -> Tensor:
    """Return the colours of a colour map of matplotlib, uint8 ``[256, 3]``."""
    if name == "grey":
        return torch.arange(LEVELS, dtype=torch.uint8)[:, None].expand(-1, RGB).contiguous()
    import matplotlib  # takes a second to import

    if name not in matplotlib.colormaps:
        raise ValueError(f"matplotlib has no colour map {name}: pass viridis, magma or grey")
    return torch.from_numpy(matplotlib.colormaps[name](range(LEVELS), bytes=True)[:, :RGB].copy())
