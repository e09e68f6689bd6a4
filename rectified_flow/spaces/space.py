"""The contract of a data space."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rectified_flow.condition import ConditionSpecs, Values
from rectified_flow.errors import UsageError

if TYPE_CHECKING:
    from rectified_flow.system.pictures import Legend


class Space(ABC):
    """A map between the data that a dataset stores and the ``x`` that a flow works on.

    A flow augments and encodes each training batch, and decodes what it generates. Nothing else in the package knows
    ranges, types or channels of the data. Register a subclass and keep its constructor's arguments as attributes, and
    checkpoints can name it. All random draws are in :meth:`augment`, from
    :mod:`rectified_flow.randomness`.
    """

    key: ClassVar[str] = "images"
    """The entry of a batch that holds the data."""
    shape: tuple[int, ...] | None = None
    """Shape of one ``x``, without the batch; a flow sets it at its first training batch where it is None."""

    metrics: ClassVar[tuple[str, ...]] = ("frechet", "kernel", "copies", "manifold", "agreement", "translation")
    """Names of the registered metrics and scores that compare samples with real data by default."""
    has_missing: bool = False
    """Whether ``x`` is NaN where a value is unknown; such values are left out of the loss."""

    @property
    def picture_shape(self) -> tuple[int, ...] | None:
        """``(c, h, w)`` of the RGB or RGBA pictures that :meth:`from_pictures` takes; None if the data are none."""
        return None

    @property
    def conditions(self) -> ConditionSpecs:
        """The conditions by which :meth:`augment` describes its variants; the network must take them."""
        return {}

    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        """Draw a variant of each row of stored data ``[b, ...]`` in training, and conditions that describe it."""
        return data, {}

    @abstractmethod
    def encode(self, data: Tensor) -> Tensor:
        """Convert stored data ``[b, ...]`` to float32 ``x`` ``[b, ...]`` of about unit scale, like the noise."""

    def augment_source(self, data: Tensor) -> Tensor:
        """Draw a variant of each row of sources ``[b, ...]``, which is that of the data for the same random draws."""
        return self.augment(data)[0]

    def encode_source(self, data: Tensor) -> Tensor:
        """Encode sources of a translation, which may be encoded already: floating point of the shape of ``x``."""
        is_encoded = data.is_floating_point() and data.shape[1:] == self.shape
        return data.float() if is_encoded else self.encode(data)

    def decode_source(self, x: Tensor) -> Tensor:
        """Convert encoded sources to a form that :meth:`encode_source` takes; by default they stay as they are."""
        return x

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """Convert ``x`` ``[b, ...]`` to generated data, the result of :meth:`Flow.sample`."""

    @abstractmethod
    def render(self, data: Tensor) -> Tensor:
        """Render a picture, uint8 ``[b, 3, h, w]``, of each row of generated data."""

    @property
    def legend(self) -> "Legend | None":
        """The meaning of the colours of :meth:`render`, to draw below pictures; None for true colours."""
        return None

    def render_with_alpha(self, data: Tensor) -> Tensor:
        """Render RGBA pictures ``[b, 4, h, w]`` if the data have transparency, else those of :meth:`render`."""
        return self.render(data)

    def from_pictures(self, pictures: Tensor) -> Tensor:
        """Convert pictures of :attr:`picture_shape`, uint8 ``[b, c, h, w]``, to data that a dataset might store.

        Raises:
            UsageError: if the space is of other data.
        """
        raise UsageError(f"{type(self).__name__} are no pictures")

    def to_stored(self, x: Tensor) -> Tensor:
        """Convert generated ``x`` to data that a dataset might store, the inverse of :meth:`encode`.

        Raises:
            UsageError: if the space has no such way.
        """
        raise UsageError(f"{type(self).__name__} cannot be stored")

    def dequantised(self, data: Tensor) -> tuple[Tensor, Tensor | float]:
        """Encode stored data, drawn within the levels of integers, and return the change of volume of a value in bits.

        Raises:
            UsageError: if the space has no such density.
        """
        raise UsageError(f"--metric likelihood needs a run on pixels or measurements, not {type(self).__name__}")

    def prepare(self, device: torch.device) -> None:  # noqa: B027, as most have nothing to load
        """Load the weights that decoding needs, if there are any.

        Raises:
            UsageError: if they are missing.
        """

    def problem_with(self, data: Tensor) -> str | None:
        """Return a sentence on wrong stored ``data``, or None; the trainer checks its first batch."""
        return None

    @property
    def noun(self) -> str:
        """One datum in words, like ``32 px``, for lines that report a run."""
        return "x".join(map(str, self.shape or ()))
