"""The contract of a data space."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from rectified_flow.condition import Kinds, Values
from rectified_flow.errors import UsageError


class Space(ABC):
    """Between the data that a dataset stores and the ``x`` that a flow works on.

    A flow augments and encodes each training batch, and decodes what it generates. Nothing else in the package knows
    ranges, types or channels of the data. Register a subclass and keep its constructor's arguments as attributes, and
    checkpoints can name it. Random draws belong into :meth:`augment`, and come from
    :mod:`rectified_flow.randomness`.
    """

    key: ClassVar[str] = "images"
    """The entry of a batch that holds the data."""
    shape: tuple[int, ...] | None = None
    """Shape of one ``x``, without the batch; a flow sets it at its first training batch where it is None."""

    @property
    def picture_shape(self) -> tuple[int, ...] | None:
        """``(c, h, w)`` of the RGB or RGBA pictures that :meth:`from_pictures` takes; None if the data are none."""
        return None

    @property
    def conditions(self) -> Kinds:
        """What :meth:`augment` tells the network, by name; the network must take it."""
        return {}

    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        """A random variant of each row of stored data ``[b, ...]``, in training only, and what tells of it."""
        return data, {}

    @abstractmethod
    def encode(self, data: Tensor) -> Tensor:
        """Stored data ``[b, ...]`` to float32 ``x`` ``[b, ...]`` of about unit scale, for which noise is normal."""

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """``x`` ``[b, ...]`` to generated data as a user wants it; what :meth:`Flow.sample` returns."""

    @abstractmethod
    def render(self, data: Tensor) -> Tensor:
        """A picture, uint8 ``[b, 3, h, w]``, of each row of what :meth:`decode` returned."""

    def render_with_alpha(self, data: Tensor) -> Tensor:
        """As :meth:`render`, but ``[b, 4, h, w]``, RGBA, if the data have transparency."""
        return self.render(data)

    def from_pictures(self, pictures: Tensor) -> Tensor:
        """Pictures of :attr:`picture_shape`, uint8 ``[b, c, h, w]``, as data that a dataset might store.

        Raises:
            UsageError: if the space is of other data.
        """
        raise UsageError(f"{type(self).__name__} are no pictures")

    def to_stored(self, x: Tensor) -> Tensor:
        """Generated ``x`` as data that a dataset might store, which :meth:`encode` takes back.

        Raises:
            UsageError: if the space has no such way.
        """
        raise UsageError(f"{type(self).__name__} cannot be stored")

    def prepare(self, device: torch.device) -> None:  # noqa: B027, as most have nothing to load
        """Load what decoding needs, where something is to be loaded.

        Raises:
            UsageError: if it is not there.
        """

    def problem_with(self, data: Tensor) -> str | None:
        """A sentence on what looks wrong with stored ``data``, or None; the trainer asks at the first batch."""
        return None

    @property
    def noun(self) -> str:
        """One datum in words, like ``32 px``, for lines that report a run."""
        return "x".join(map(str, self.shape or ()))
