"""Transforms of the values of measurements, so that a network gets numbers that are spread evenly over their range."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rectified_flow.registry import register


class Transform(ABC):
    """An increasing function of a value in physical units, with its inverse.

    Register a subclass and keep its constructor's arguments as attributes, and ``--transform`` and checkpoints can name
    it.
    """

    @abstractmethod
    def __call__(self, values: Tensor) -> Tensor:
        """Transform values of any shape."""

    @abstractmethod
    def inverse(self, values: Tensor) -> Tensor:
        """Return the values in physical units."""

    @abstractmethod
    def log_slope(self, values: Tensor) -> Tensor:
        """Return the logarithm of the derivative at values in physical units."""

    def check(self, least: float) -> None:  # noqa: B027, as most take any
        """Raise a ValueError, whose message is a predicate, if values of ``least`` and above cannot be transformed."""


@register
class Linear(Transform):
    """No change."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def inverse(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def log_slope(self, values: Tensor) -> Tensor:
        """Return 0."""
        return torch.zeros_like(values)


@register
class Log(Transform):
    """The natural logarithm, for positive values over several orders of magnitude."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return the logarithms."""
        return values.log()

    def inverse(self, values: Tensor) -> Tensor:
        """Return the exponentials."""
        return values.exp()

    def log_slope(self, values: Tensor) -> Tensor:
        """Return the logarithm of ``1 / v``."""
        return -values.log()

    def check(self, least: float) -> None:
        """Raise a ValueError for values that are not positive."""
        if least <= 0:
            raise ValueError("is undefined for values of 0 or below; pass asinh or sqrt")


@register
class Asinh(Transform):
    """The inverse hyperbolic sine: linear for values below ``scale``, logarithmic far above, and defined for all.

    Args:
        scale: magnitude at which the logarithmic part begins, in the unit of the data.

    Raises:
        ValueError: if the scale is not positive.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"the scale is {scale:g}; it must be positive")
        self.scale = scale

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``asinh(v / scale)``."""
        return torch.asinh(values / self.scale)

    def inverse(self, values: Tensor) -> Tensor:
        """Return ``scale * sinh(y)``."""
        return self.scale * torch.sinh(values)

    def log_slope(self, values: Tensor) -> Tensor:
        """Return the logarithm of ``1 / sqrt(v^2 + scale^2)``."""
        return -torch.hypot(values, torch.tensor(self.scale, dtype=values.dtype, device=values.device)).log()


@register
class Sqrt(Transform):
    """The square root, which evens out the noise of counts. Its inverse continues below 0 as ``-y^2``."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``sqrt(v)``, and ``-sqrt(-v)`` below 0."""
        return values.sign() * values.abs().sqrt()

    def inverse(self, values: Tensor) -> Tensor:
        """Return ``y |y|``."""
        return values * values.abs()

    def log_slope(self, values: Tensor) -> Tensor:
        """Return the logarithm of ``1 / (2 sqrt(v))``."""
        return -torch.log(2 * values.abs().sqrt())

    def check(self, least: float) -> None:
        """Raise a ValueError for negative values."""
        if least < 0:
            raise ValueError("is for values of 0 and above; pass asinh")
