"""The contract of a data space."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Space(ABC):
    """Between the data that a dataset stores and the ``x`` that a flow works on.

    A flow encodes each training batch, and decodes what it generates. Nothing else in the package knows ranges, types
    or channels of the data. Register a subclass and keep its constructor's arguments as attributes, and checkpoints can
    name it. Random draws belong into :meth:`augment`, and come from :mod:`rectified_flow.randomness`.
    """

    key: ClassVar[str] = "images"
    """The entry of a batch that holds the data."""
    shape: tuple[int, ...] | None = None
    """Shape of one ``x``, without the batch; a flow sets it at its first training batch where it is None."""

    @abstractmethod
    def encode(self, data: Tensor) -> Tensor:
        """Stored data ``[b, ...]`` to float32 ``x`` ``[b, ...]`` of about unit scale, for which noise is normal."""

    def augment(self, x: Tensor) -> Tensor:
        """A random variant of each row of ``x``, in training only."""
        return x

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """``x`` ``[b, ...]`` to generated data as a user wants it; what :meth:`Flow.sample` returns."""

    @abstractmethod
    def draw(self, data: Tensor) -> Tensor:
        """A picture, uint8 ``[b, 3, h, w]``, of each row of what :meth:`decode` returned."""

    def problem_with(self, data: Tensor) -> str | None:
        """A sentence on what looks wrong with stored ``data``, or None; the trainer asks at the first batch."""
        return None

    @property
    def noun(self) -> str:
        """One datum in words, like ``32 px``, for lines that report a run."""
        return "x".join(map(str, self.shape or ()))
