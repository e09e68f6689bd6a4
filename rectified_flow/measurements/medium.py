"""The medium of measurements: their files, and their pictures in true colours or in a colour map."""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rectified_flow.measurements.files import FieldFormat, encode_field, fit_field, read_field
from rectified_flow.registry import Document, describe
from rectified_flow.spaces.medium import Medium
from rectified_flow.spaces.pictures import RGB

if TYPE_CHECKING:
    from rectified_flow.measurements.space import Fields
    from rectified_flow.system.pictures import Legend

LEVELS = 256
OUTSIDE = 0.01  # margin beyond the range within which values are not marked, as a share of the range
BELOW, ABOVE, UNKNOWN = (0, 160, 255), (255, 0, 0), (127, 127, 127)
"""Colours of values below and above the range, and of unknown ones."""


class Measurements(Medium):
    """Measurements in physical units, in files of the format of the data.

    Args:
        space: the space of the measurements; its ``show`` decides how they are rendered.

    Raises:
        ValueError: if ``show`` names channels or a colour map that do not exist.
    """

    space: "Fields"
    items = "images"
    metrics = ("spectra",)
    framed_by = ("pad",)

    def __init__(self, space: "Fields") -> None:
        super().__init__(space)
        self.suffix: str = space.files["suffix"]
        numbers, _, name = space.show.partition(":")
        self.shown = [int(number) - 1 if number.isdecimal() else -1 for number in numbers.split(",")]
        """Numbers of the channels that are rendered, from 0."""
        self._colour_map, channels = name or "viridis", len(space.low)
        if len(self.shown) not in (1, RGB) or not {*self.shown} <= {*range(channels)}:
            rule = "pass 1:viridis, or three like 3,2,1"
            raise ValueError(f"{space.show} names no channels from 1 to {channels}: {rule}")
        if len(self.shown) == 1:
            colour_map(self._colour_map)  # raises an error for an unknown name

    @property
    @override
    def noun(self) -> str:
        return str(FieldFormat(**self.space.files))

    @property
    @override
    def summary(self) -> str:
        space = self.space
        ranges = ", ".join(f"{least:.6g} to {most:.6g}" for least, most in zip(space.low, space.high, strict=True))
        unknown = "; unknown values are left out of the loss" * space.has_missing
        return f"{space.dtype}, {ranges}, {type(space.transform).__name__.lower()}{unknown}"

    @override
    def misfit(self, other: Medium) -> str | None:
        differ = f"has {other.noun}, and the flow was trained on {self.noun}: pass such files"
        return None if other.noun == self.noun else differ

    @property
    @override
    def input_suffixes(self) -> Collection[str]:
        suffix = self.space.source_space.files["suffix"]
        return {suffix, suffix.replace(".tif", ".tiff")}

    @override
    def read(self, file: Path, *, pad: bool = False) -> Tensor:
        """Read a field of the type of the sources, or of the data; float32 in physical units, of this shape.

        Args:
            file: the file.
            pad: pad the whole field, as :func:`fit_field` does, instead of cropping its centre.
        """
        sources = self.space.source_space
        values, how, file_type = read_field(file, sources.files["channels_last"])
        wanted = FieldFormat(**sources.files)
        # Integers of a file with a mark for unknown values are read as floating point.
        if how.channels != wanted.channels or wanted.dtype not in (how.dtype, file_type):
            raise ValueError(f"it has {how}, not {wanted}")
        height, width = self.sides
        field = torch.from_numpy(fit_field(values, (width, height), pad=pad).astype(np.float32))
        undefined = ~(sources.encode(field).isfinite() | field.isnan())
        if undefined.any():
            name, value = type(sources.transform).__name__.lower(), field[undefined][0].item()
            raise ValueError(f"it holds the value {value:g}, for which transform={name} is undefined")
        return field

    @override
    def size_of(self, file: Path) -> tuple[int, int]:
        _, height, width = read_field(file, self.space.source_space.files["channels_last"])[0].shape
        return width, height

    @override
    def write(self, content: Tensor) -> bytes:
        return encode_field(content.numpy(), FieldFormat(**self.space.files))

    @override
    def page(self) -> Document:
        space, legend = self.space, self.legend
        scale = {"low": list(space.low), "high": list(space.high), "transform": describe(space.transform)}
        ends = {} if legend is None else {"colours": legend.colours.tolist(), "ends": [legend.least, legend.greatest]}
        return {**scale, "files": space.files, "shown": self.shown, **ends}

    @override
    def render(self, data: Tensor) -> Tensor:
        x = self.space.encode(data)[:, self.shown]
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
    @override
    def legend(self) -> "Legend | None":
        from rectified_flow.system.pictures import Legend  # loads Pillow, which model code does without

        if len(self.shown) == RGB:
            return None
        [channel] = self.shown
        least, greatest = (f"{values[channel]:.4g}" for values in (self.space.low, self.space.high))
        name = f"channel {channel + 1}" if len(self.space.low) > 1 else ""
        return Legend(colour_map(self._colour_map), least, greatest, name)


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
