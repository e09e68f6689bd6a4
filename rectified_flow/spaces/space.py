"""The contract of a data space."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from annotated_types import Interval
from torch import Tensor, nn

from rectified_flow.condition import AugmentationLabels, ConditionSpecs, Values
from rectified_flow.errors import UsageError
from rectified_flow.spaces.augmentation import NUMBERS

if TYPE_CHECKING:
    from rectified_flow.system.pictures import Legend

RGB, RGBA = 3, 4
Shape = Sequence[Annotated[int, Interval(gt=0, lt=2**31)]]


class Space(ABC):
    """A map between the data that a dataset stores and the ``x`` that a flow works on.

    A flow augments and encodes each training batch, and decodes what it generates. Nothing else in the package knows
    ranges, types, channels or files of the data. Register a subclass and keep its constructor's arguments as
    attributes, and checkpoints can name it. All random draws are in :meth:`augment`, from
    :mod:`rectified_flow.randomness`.

    Programs build a space with its constructor, or with a classmethod ``of``. Users set its parameters as arguments of
    ``--space``. Programs pass the following parameters if there are any of these names: ``shape`` of a picture or an
    item, ``horizontal_flip``, ``augmentation``, ``image_size``, ``autoencoder`` (the words of ``--autoencoder``), and
    ``source`` (the dataset or the files, which have a ``space``).
    """

    key: ClassVar[str] = "images"
    """The entry of a batch that holds the data."""
    shape: tuple[int, ...] | None = None
    """Shape of one ``x``, without the batch; a flow sets it at its first training batch where it is None."""

    metrics: ClassVar[tuple[str, ...]] = ("frechet", "kernel", "copies", "manifold", "agreement", "translation")
    """Names of the registered metrics and scores that compare samples with real data by default."""
    has_missing: bool = False
    """Whether ``x`` is NaN where a value is unknown; such values are left out of the loss."""
    augmentation: float = 0.0
    """Probability of each change that :meth:`augment` makes to a training picture."""
    autoencoder: Any = None
    """The frozen network whose latents a store keeps in place of the pictures, if there is one."""
    suffix: str | None = None
    """Suffix of the files that hold generated data beside their pictures; None if the pictures are the data."""

    @property
    def picture_shape(self) -> tuple[int, ...] | None:
        """``(c, h, w)`` of the RGB or RGBA pictures that :meth:`from_pictures` takes; None if the data are none."""
        return None

    @property
    def input_suffixes(self) -> Collection[str]:
        """Suffixes of the files that :meth:`read` reads; empty if samples cannot start from files."""
        from rectified_flow.system.pictures import IMAGE_SUFFIXES  # loads Pillow, which model code does without

        return IMAGE_SUFFIXES if self.picture_shape is not None else ()

    @property
    def summary(self) -> str:
        """Scale and type of the data in a line, for the report of a run; empty for pictures."""
        return ""

    def with_augmentation(self, augmentation: float) -> Self:
        """Return this space with another probability of augmentation."""
        changed = copy(self)
        changed.augmentation = augmentation
        return changed

    def encode_all(self, pictures: Any, *, mirrored: bool) -> tuple[Any, "Space"]:
        """Return the rows that a flow is trained on, in a store, and their space. Collective.

        Args:
            pictures: the :class:`rectified_flow.ImageDataset`; it is the result for spaces that encode each batch.
            mirrored: whether training mirrors half of the pictures.

        Raises:
            UsageError: if the pictures cannot be encoded, or the store cannot be written.
        """
        return pictures, self

    def use_autoencoder(self, place: str) -> None:
        """Replace the autoencoder by the same one in another folder, or of another hub id.

        Raises:
            UsageError: if the space has none.
        """
        raise UsageError("--autoencoder has no effect: the flow has no autoencoder of a folder or hub id")

    def scaled_like(self, other: "Space") -> "Space":
        """Return this space with the scale of another one, by which a teacher generated training data.

        Raises:
            UsageError: if the data of the two cannot be converted.
        """
        return self

    def misfit(self, stored: "Space") -> str | None:
        """Return what is different about data of the space ``stored``, if this space cannot encode them."""
        return None

    @property
    def conditions(self) -> ConditionSpecs:
        """The conditions by which :meth:`augment` describes its variants; the network must take them."""
        return {"augmentation": AugmentationLabels(NUMBERS)} if self.augmentation else {}

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
        """Convert pictures of :attr:`picture_shape`, or the result of :meth:`read`, to data that a dataset stores."""
        return pictures

    def read(self, file: Path) -> Tensor:
        """Read a file ``[c, h, w]`` of one of the :attr:`input_suffixes`, which :meth:`from_pictures` takes.

        Raises:
            Exception: of many types, if the file cannot be read.
        """
        from torchvision.transforms.functional import pil_to_tensor

        from rectified_flow.system.pictures import fit, open_picture

        channels, height, width = self.picture_shape or (RGB, 0, 0)
        return pil_to_tensor(fit(open_picture(file), (width, height), alpha=channels == RGBA))

    def write(self, datum: Tensor) -> bytes:
        """Return the contents of the file of one generated datum ``[c, ...]``, for spaces with a :attr:`suffix`."""
        raise NotImplementedError

    def on_page(self) -> dict[str, Any] | None:
        """Return what an exported program needs to show the output of the network; None for pixels.

        Raises:
            UsageError: if data of this kind cannot be exported.
        """
        raise UsageError(f"--checkpoint has a flow of {type(self).__name__.lower()}, which cannot be exported")

    def decoder(self) -> nn.Module | None:
        """Return the module from ``x`` ``[b, ...]`` to pictures in [-1, 1], if it is exported beside the network."""
        return None

    def to_stored(self, x: Tensor) -> Tensor:
        """Convert generated ``x`` to data that a dataset might store, the inverse of :meth:`encode`."""
        return self.decode(x)

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
