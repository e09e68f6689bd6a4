"""Fields: a space of measurements, which converts between physical units and values of about -1 to 1."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from math import log
from typing import Annotated, Any, cast

import numpy as np
import torch
from annotated_types import Gt
from torch import Tensor
from typing_extensions import override

from rectified_flow import randomness
from rectified_flow.condition import Values, as_number
from rectified_flow.errors import UsageError
from rectified_flow.measurements.files import Array, as_type
from rectified_flow.measurements.medium import Measurements
from rectified_flow.parts import choose_named
from rectified_flow.registry import Document, register
from rectified_flow.spaces.augmentation import augmented
from rectified_flow.spaces.pixels import cropped, mirrored
from rectified_flow.spaces.space import DataFacts, Space, dequantised, with_augmentation


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
    """The values as they are."""

    @override
    def __call__(self, values: Tensor) -> Tensor:
        return values

    @override
    def inverse(self, values: Tensor) -> Tensor:
        return values


@register
class Log(Transform):
    """The natural logarithm, for positive values over several orders of magnitude."""

    @override
    def __call__(self, values: Tensor) -> Tensor:
        return values.log()

    @override
    def inverse(self, values: Tensor) -> Tensor:
        return values.exp()


@register
@dataclass(frozen=True)
class Asinh(Transform):
    """The inverse hyperbolic sine: linear for values below ``scale``, logarithmic far above, and defined for all."""

    scale: Annotated[float, Gt(0)] = 1.0

    @override
    def __call__(self, values: Tensor) -> Tensor:
        return torch.asinh(values / self.scale)

    @override
    def inverse(self, values: Tensor) -> Tensor:
        return self.scale * torch.sinh(values)


MAX_VALUES = 2**24  # number of stored values from which percentiles are taken


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

    uses = ("augmentation",)

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
    files: Document = field(default_factory=dict)
    sources: "Fields | None" = None

    def __post_init__(self) -> None:
        self.shape, channels = tuple(self.shape), self.shape[0]
        self.low, self.high = tuple(self.low) or (-1.0,) * channels, tuple(self.high) or (1.0,) * channels
        plain = {"suffix": ".npy", "dtype": self.dtype, "channels": channels, "channels_last": False}
        self.files = {**plain, **self.files}
        _ = self.medium  # raises an error for channels or colours that do not exist
        bottom, top = self.transform(torch.tensor([self.low, self.high], dtype=torch.float64))
        if not (top > bottom).all():
            raise ValueError(f"the ranges are {self.low} to {self.high}: pass MIN below MAX")
        scales = torch.stack((2 / (top - bottom), -(top + bottom) / (top - bottom))).float()[..., None, None]
        self._scale, self._offset = scales

    @classmethod
    @override
    def of(
        cls,
        facts: DataFacts,
        /,
        *,
        value_range: str = "measured",
        transform: str = "linear",
        show: str = "",
    ) -> "Fields":
        """Build the space of a run on measurements.

        Args:
            facts: what is known about the data.
            value_range: range that is scaled to [-1, 1]: ``measured``, ``percentile:P``, ``MIN,MAX`` for all channels,
                or ``MIN,MAX,MIN,MAX,...`` for each.
            transform: transform before scaling: ``linear``, ``log``, ``asinh:SCALE``, or a registered one.
            show: channels to show, see :class:`Fields`; by default their type decides.
        """
        stored = facts.stored
        if not isinstance(stored, cls):
            raise UsageError(f"`space` {cls.__name__} needs measurements: pass `dataset_path` with a folder of them")
        look: dict[str, Any] = {
            "shape": (len(stored.low), *facts.shape[1:]),
            "show": show or stored.show,
            "horizontal_flip": facts.mirrored,
            "augmentation": facts.augmentation,
        }
        if facts.teacher is not None:
            return replace(cast(Fields, facts.teacher), has_missing=stored.has_missing, **look)
        low, high = range_of(value_range, stored, facts.values)
        chosen, least = choose_named("space transform", Transform, transform), min(*stored.low, *low)
        if not chosen(torch.tensor(least)).isfinite():
            raise UsageError(f"`space` transform={transform} is undefined for the value {least:g}: pass asinh")
        sources = None
        if facts.sources is not None:
            sources = cls.of(facts.sources, value_range=value_range, transform=transform, show=show)
            if len(sources.low) != len(low):
                raise UsageError(f"`source_path` has {len(sources.low)} channels: sources need {len(low)} channels")
        return replace(stored, low=low, high=high, transform=chosen, sources=sources, **look)

    @property
    @override
    def medium(self) -> Measurements:
        return Measurements(self)

    @property
    @override
    def source_space(self) -> "Fields":
        return with_augmentation(self.sources, self.augmentation) if self.sources else self

    @override
    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        unknown = data.is_floating_point()  # degraded sources may have unknown values where the data have none
        data = cropped(data.float(), self.shape, at_random=True)
        data = mirrored(data) if self.horizontal_flip else data
        if not self.augmentation:
            return data, {}
        x, numbers = augmented(self.encode(data), self.augmentation, colours=False, has_missing=unknown)
        return self.decode(x), {"augmentation": numbers}

    @override
    def encode(self, data: Tensor) -> Tensor:
        scale, offset = self._scale.to(data.device), self._offset.to(data.device)
        return self.transform(cropped(data, self.shape).float()) * scale + offset

    @override
    def decode(self, x: Tensor) -> Tensor:
        scale, offset = self._scale.to(x.device), self._offset.to(x.device)
        return self.transform.inverse((x.float() - offset) / scale)

    @override
    def to_stored(self, x: Tensor, *, exact: bool = False) -> Tensor:
        data = self.decode(x)
        return data if exact else torch.from_numpy(as_type(data.cpu().numpy(), np.dtype(self.dtype))).to(x.device)

    def log_scale(self, data: Tensor) -> Tensor:
        """Return the logarithm of the derivative of :meth:`encode` at values in physical units."""
        return self.transform.log_slope(data) + self._scale.to(data.device).log()


@dequantised.register
def _(space: Fields, data: Tensor) -> tuple[Tensor, Tensor | float]:
    """Draw integers within their unit; the volume changes by the slopes of the transform, in the mean of a row."""
    values = cropped(data.float(), space.shape)
    if not data.is_floating_point():
        values = values + randomness.rand("dequantisation", values.shape, values.device) - 0.5
    return space.encode(values), space.log_scale(values).double().flatten(1).mean(dim=1).cpu() / log(2)


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
        raise UsageError(f"`space` value_range={text} must be {choices}")
    numbers *= 2 * len(stored.low) // len(numbers)
    return numbers[::2], numbers[1::2]
