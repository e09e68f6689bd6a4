"""Transforms of the values of measurements, so that a network gets numbers that are spread evenly over their range."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rectified_flow.registry import register


class Transform(ABC):
    """An increasing, differentiable function of a value in physical units, with its inverse.

    Register a subclass and keep its constructor's arguments as attributes, and ``--transform`` and checkpoints can name
    it.
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


@register
class Sqrt(Transform):
    """The square root, which evens out the noise of counts; for values below 0, minus that of their magnitude."""

    def __call__(self, values: Tensor) -> Tensor:
        """Return ``sqrt(v)``, and ``-sqrt(-v)`` below 0."""
        return values.sign() * values.abs().sqrt()

    def inverse(self, values: Tensor) -> Tensor:
        """Return ``y |y|``."""
        return values * values.abs()
