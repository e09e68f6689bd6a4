"""The contract of a medium: the form in which people see and exchange data."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rectified_flow.errors import UsageError
from rectified_flow.registry import Document

if TYPE_CHECKING:
    from rectified_flow.spaces.space import Space
    from rectified_flow.system.pictures import Legend

PREVIEW = "-preview.png"  # end of the name of the picture beside a generated file of other data


class Medium:
    """The form of data for people: files, pictures, and the words that describe the data.

    A space has a medium (:attr:`Space.medium <rectified_flow.spaces.space.Space.medium>`). The space is mathematics on
    tensors, and the medium is everything that programs read, write, show and report. A kind of data overrides what it
    has: :meth:`render` at least, ``suffix`` and :meth:`write` for files of its own, ``input_suffixes`` and :meth:`read`
    for samples that start from files. A program that needs more ends with an error.

    Args:
        space: the space of the data.
    """

    space: "Space"
    items: ClassVar[str] = "items"
    """Data in the plural, for reports."""
    metrics: ClassVar[tuple[str, ...]] = ("frechet", "kernel", "copies", "manifold", "agreement", "translation")
    """Names of the registered metrics and scores that compare samples with real data by default."""
    framed_by: ClassVar[tuple[str, ...]] = ()
    """Arguments of :meth:`read` by which files are framed as in training: some of ``bits``, ``pad`` and ``resize``."""
    suffix: str = ""
    """Suffix of the files that hold generated data beside their pictures; empty if the pictures are all."""

    def __init__(self, space: "Space") -> None:
        self.space = space

    def render(self, data: Tensor) -> Tensor:
        """Render a picture, uint8 ``[b, 3, h, w]``, of each row of generated data.

        Raises:
            UsageError: if the data have no pictures.
        """
        raise UsageError(f"data of {type(self.space).__name__} have no pictures")

    @property
    def legend(self) -> "Legend | None":
        """The meaning of the colours of :meth:`render`, to draw below pictures; None for true colours."""
        return None

    @property
    def noun(self) -> str:
        """One datum in words, like ``32 px``, for lines that report a run."""
        return "x".join(map(str, self.space.shape or ()))

    @property
    def summary(self) -> str:
        """Scale and type of the data in a line, for the report of a run; empty for pictures."""
        return ""

    @property
    def picture_shape(self) -> tuple[int, ...]:
        """``(c, h, w)`` of the RGB or RGBA pictures that the data are, or were encoded from; empty for other data."""
        return ()

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of what :meth:`read` returns."""
        return tuple((self.picture_shape or self.space.shape or (0, 0))[-2:])

    @property
    def input_suffixes(self) -> Collection[str]:
        """Suffixes of the files that :meth:`read` reads; empty if samples cannot start from files."""
        return ()

    def read(self, file: Path) -> Tensor:
        """Read a file ``[c, h, w]`` of one of the ``input_suffixes``, for :meth:`stored`.

        A medium also takes the arguments in its ``framed_by``.

        Raises:
            Exception: of many types, if the file cannot be read.
        """
        raise NotImplementedError

    def size_of(self, file: Path) -> tuple[int, int]:
        """Return the width and the height of the contents of a file that :meth:`read` reads, before it resizes them."""
        raise NotImplementedError

    def stored(self, data: Tensor) -> Tensor:
        """Convert results of :meth:`read`, or stored pictures, to data as the space stores them, ``[b, ...]``."""
        return data

    @property
    def codec(self) -> str:
        """Hash of the autoencoder that the data pass, for the names of files; empty if data are kept as they are."""
        return ""

    def reconstructed(self, pictures: Tensor) -> Tensor:
        """Return pictures, uint8 ``[b, 3, h, w]``, as the flow sees them: decoded from latents, if it uses latents.

        A copy of a training picture by the flow is like its reconstruction, which may differ much from the picture.
        """
        return pictures

    def rows(self, dataset: Any, *, mirrored: bool, recorded: "Space | None" = None) -> tuple[Any, "Space"]:
        """Return the rows that a flow is trained on, and the space of these rows. Collective.

        Args:
            dataset: the data of a run; it is the result unless the space stores the data in another form.
            mirrored: whether training mirrors half of the pictures.
            recorded: the space that the run has recorded, if it resumes.

        Raises:
            UsageError: if the data cannot be encoded, or the store cannot be written.
        """
        return dataset, self.space

    def has_rows(self, store: Path, *, mirrored: bool) -> bool:
        """Return whether :meth:`rows` has nothing to encode, for the data in the folder of a store."""
        return True

    def prepare(self, device: torch.device, autoencoder: str | None = None) -> None:
        """Load the frozen weights by which data are shown and read, if there are any.

        Args:
            device: where the weights are to be.
            autoencoder: another folder or hub id of the same autoencoder.

        Raises:
            UsageError: if the weights are missing, or are others than in training.
        """
        if autoencoder is not None:
            raise UsageError("`autoencoder` has no effect: the flow has no autoencoder of a folder or hub id")

    def contents(self, data: Tensor) -> Tensor:
        """Return generated data ``[b, ...]`` as their files hold them: pictures as uint8, with their transparency."""
        return data

    def files(self, content: Tensor, **options: object) -> dict[str, bytes]:
        """Return the files of one row of :meth:`contents`, by the ends of their names; the last is the picture.

        Args:
            content: a row of :meth:`contents` on the CPU.
            options: options with which Pillow saves the picture.
        """
        own = {end: self.write(content) for end in self.ends[:-1]}
        return own | {self.ends[-1]: encoded(self.render(content[None])[0], **options)}

    @property
    def ends(self) -> tuple[str, ...]:
        """The ends of the names of :meth:`files`."""
        return (self.suffix, PREVIEW) if self.suffix else (".png",)

    def write(self, content: Tensor) -> bytes:
        """Return the contents of the file with the ``suffix``, of one row of :meth:`contents`."""
        raise NotImplementedError

    def page(self) -> Document:
        """Return what an exported program needs to show the output of the network; empty for pixels.

        Raises:
            UsageError: if data of this kind cannot be exported.
        """
        raise UsageError(f"a flow of {type(self.space).__name__.lower()} cannot be exported")

    def decoders(self) -> dict[str, nn.Module]:
        """Return the modules by name, from ``x`` ``[b, ...]`` to pictures in [-1, 1], that are exported, too."""
        return {}

    def problem_with(self, batch: Mapping[str, Tensor]) -> str | None:
        """Return a sentence on wrong stored data in a batch, or None; the trainer checks its first batch."""
        return None

    def misfit(self, other: "Medium") -> str | None:
        """Return what is different about stored data of another medium, if the space cannot encode them."""
        return None


def encoded(picture: Tensor, **options: object) -> bytes:
    """Return the PNG file of a picture, uint8 ``[c, h, w]``, RGB or RGBA, saved by Pillow with these options."""
    from rectified_flow.system.pictures import encode_picture  # loads Pillow, which model code does without

    return encode_picture(picture.permute(1, 2, 0).numpy(), ".png", **options)
