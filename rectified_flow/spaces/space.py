"""The contract of a data space: the mathematics between the data that are stored and what a flow works on."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from annotated_types import Interval
from torch import Tensor

from rectified_flow.condition import AugmentationLabels, ConditionSpecs, Values
from rectified_flow.errors import UsageError
from rectified_flow.spaces.augmentation import NUMBERS
from rectified_flow.spaces.medium import Medium

if TYPE_CHECKING:
    import numpy as np

Shape = Sequence[Annotated[int, Interval(gt=0, lt=2**31)]]


@dataclass(frozen=True)
class DataFacts:
    """The facts about the data of a run from which a program builds their space (:meth:`Space.of`)."""

    shape: tuple[int, ...]
    """``(c, h, w)`` of a picture by the flags, or the shape of an item of a registered dataset."""
    mirrored: bool = False
    """Whether training mirrors half of the data."""
    augmentation: float = 0.0
    """Probability of each change that augmentation makes; if it is not 0, the space has to use ``augmentation``."""
    cropped: bool = False
    """Whether training crops data at random."""
    autoencoder: Sequence[str] = ()
    """Name and arguments of an autoencoder; given only to a space that uses ``autoencoder``."""
    stored: "Space | None" = None
    """Space of the data as a store holds them, or of the files of a folder, whose scale may be unknown yet."""
    values: "np.ndarray[Any, Any] | None" = None
    """All stored values ``[n, ...]``, once there is a store."""
    sources: "DataFacts | None" = None
    """The facts of the sources of a translation, if they are other data."""
    teacher: "Space | None" = None
    """Space of a teacher, whose scale the space of its student takes over."""


class Space(ABC):
    """A map between the data that a dataset stores and the ``x`` that a flow works on.

    A flow augments and encodes each training batch, and decodes what it generates, without knowing ranges, types or
    channels of the data. People see the data in their :attr:`medium`. Register a subclass and keep its constructor's
    arguments as attributes, and checkpoints can name it. All random draws are in :meth:`augment`, from
    :mod:`rectified_flow.randomness`.
    """

    key: ClassVar[str] = "images"
    """The entry of a batch that holds the data."""
    uses: ClassVar[Collection[str]] = ()
    """Fields of :class:`DataFacts` that a user may set for this space: ``augmentation``, ``autoencoder``."""
    shape: tuple[int, ...] | None = None
    """Shape of one ``x``, without the batch; a flow sets it at its first training batch where it is None."""
    augmentation: float = 0.0
    """Probability of each change that :meth:`augment` makes to a training picture."""
    has_missing: bool = False
    """Whether ``x`` is NaN where a value is unknown; such values are left out of the loss."""

    @classmethod
    def of(cls, facts: DataFacts, /, *_arguments: Any, **options: Any) -> Self:
        """Build the space of a run; a space that the flag ``space`` names implements it.

        Args:
            facts: what the program knows about the data.
            options: arguments of the flag ``space``, which a subclass declares as its keyword-only parameters.
        """
        raise UsageError(f"{cls.__name__} cannot be built from flags: implement its classmethod of")

    @property
    def medium(self) -> Medium:
        """Return the medium of the data: the form in which people see and exchange them."""
        return Medium(self)

    @property
    def source_space(self) -> "Space":
        """The space of the sources of a translation, which may have a scale of their own."""
        return self

    def augment(self, data: Tensor) -> tuple[Tensor, Values]:
        """Draw a variant of each row of stored data ``[b, ...]`` in training, and conditions that describe it."""
        return data, {}

    @abstractmethod
    def encode(self, data: Tensor) -> Tensor:
        """Convert stored data ``[b, ...]`` to float32 ``x`` ``[b, ...]`` of about unit scale, like the noise."""

    @abstractmethod
    def decode(self, x: Tensor) -> Tensor:
        """Convert ``x`` ``[b, ...]`` to generated data, the result of :meth:`Flow.sample`."""

    def to_stored(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """Convert ``x`` to data that a dataset might store, the inverse of :meth:`encode`.

        Args:
            x: encoded data ``[b, ...]``.
            exact: keep float32 and NaN for unknown values, instead of the type of the store.
        """
        return self.decode(x)


S = TypeVar("S", bound=Space)


def with_augmentation(space: S, probability: float) -> S:
    """Return a space with another probability of augmentation."""
    changed = copy(space)
    changed.augmentation = probability
    return changed


def with_shape(space: S, shape: Sequence[int]) -> S:
    """Return a space for data of another shape, which it does not crop."""
    changed = copy(space)
    changed.shape = tuple(shape)
    return changed


def variant_conditions(space: Space) -> ConditionSpecs:
    """Return the conditions by which :meth:`Space.augment` describes its variants; the network must take them."""
    return {"augmentation": AugmentationLabels(NUMBERS)} if space.augmentation else {}


@singledispatch
def dequantised(space: Space, data: Tensor) -> tuple[Tensor, Tensor | float]:
    """Encode stored data, drawn within the levels of integers, and return the change of volume of a value in bits.

    A kind of data with such a density registers its function with ``@dequantised.register``.

    Raises:
        UsageError: if the space has no such density.
    """
    raise UsageError(f"`metric` likelihood needs a run on pixels or measurements, not {type(space).__name__}")
