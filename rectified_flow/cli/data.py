"""From flags to the data of a run: their description, their space, and a summary of them."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any, cast

from torch.utils.data import Dataset

from rectified_flow.cli.training_flags import ColumnConfig, DataConfig, SourceConfig
from rectified_flow.condition import Labels
from rectified_flow.data.description import Columns, ItemData, PictureData, RunData, Sources
from rectified_flow.data.metadata import identity_of
from rectified_flow.data.open import Pictures, existing_folder, reader_of, registered_dataset, space_of_folder
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import Batches
from rectified_flow.errors import UsageError, first_line
from rectified_flow.evaluation.features import RealData
from rectified_flow.flows.flow import Flow
from rectified_flow.parts import choose_named, name_of, split_part, typed_options
from rectified_flow.registry import find, names
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.space import DataFacts, Space


def data_of(pictures: DataConfig, source: SourceConfig, columns: ColumnConfig) -> RunData:
    """Describe the data that the flags name."""
    return _described(pictures, source, columns)[0]


def find_data(
    pictures: DataConfig, source: SourceConfig, columns: ColumnConfig, known: object = None
) -> tuple[RunData, Any]:
    """Describe the data that the flags name, and find them: the source of pictures, or the items of a dataset.

    Args:
        pictures: the flags of the pictures.
        source: the flags of the sources of a translation.
        columns: the flags of the columns.
        known: the data that an earlier call found for the same flags of files or tables, to be used again.
    """
    data, found = _described(pictures, source, columns)
    found = known if found is None and isinstance(known, FileFolder | HuggingFaceSource) else found
    return data, data.find() if found is None else found


def _described(pictures: DataConfig, source: SourceConfig, columns: ColumnConfig) -> tuple[RunData, Any]:
    """Describe the data, and return a registered dataset, whose kind is known only once it has been built."""
    name, options = split_part(pictures.dataset)
    degradation, seed = choose_degradation(source.degrade), pictures.data_seed or 0
    is_registered = pictures.dataset_path is None and name in names("dataset")
    if options and not is_registered:
        needless = f"--dataset {' '.join(options)}"
        raise UsageError(f"{needless} has no effect without a registered dataset; leave it out")
    found: Any = None
    if is_registered:
        found = registered_dataset(pictures.dataset, pictures.image_size, pictures.cache_dir)
        if not isinstance(found, ImageSource):
            return ItemData(pictures.dataset, pictures.image_size, pictures.cache_dir, degradation, seed), found
    described = Pictures(
        name,
        pictures.dataset_path,
        pictures.image_size,
        cache_dir=pictures.cache_dir,
        skip_broken_images=pictures.skip_broken_images,
        aspect_ratio=pictures.aspect_ratio,
        crop=pictures.crop,
        alpha=pictures.alpha,
        grey=pictures.grey,
        resize=pictures.resize or "lanczos",
        bits=pictures.bits or 16,
        space=pictures.space,
        exclude=pictures.exclude,
        options=tuple(options),
        limit=pictures.max_train_samples,
        image_column=pictures.image_column,
        label_column=pictures.label_column,
    )
    sources = None
    if source.source_path is not None:
        sources = Sources(source.source_path, source.paired, source.source_resize or "lanczos", source.source_bits)
    data = PictureData(
        described,
        Columns(columns.condition_on, columns.text_encoder, columns.text_tokens) if columns.condition_on else None,
        sources,
        degradation,
        pictures.holdout,
        seed,
    )
    return data, found


def flags_of_files(data: DataConfig, *, may_choose: bool = True) -> dict[str, Any]:
    """Return the space of most files, and the size of the first picture in place of an image size of 0.

    The files determine the space if ``--space`` has no name. Without ``--space``, ``may_choose`` must be true.
    """
    flags, folder = dict[str, Any](), data.dataset_path
    is_free = (may_choose or data.space) and not name_of(data.space)
    if is_free and folder is not None and folder.is_dir() and (space := space_of_folder(folder)):
        flags["space"] = (space, *data.space)
    if data.image_size == 0:
        sized = replace(data, image_size=DataConfig.image_size, space=flags.get("space", data.space))
        _, found = find_data(sized, SourceConfig(), ColumnConfig())
        if not isinstance(found, ImageSource):
            raise UsageError("--image_size 0 is for pictures: pass the size of the items")
        width, height = _first_size(found, found.numbers(), skips_broken=data.skip_broken_images)
        common = gcd(width, height)
        flags |= {"image_size": min(width, height), "aspect_ratio": f"{width // common}:{height // common}"}
    return flags


def _first_size(source: ImageSource, numbers: Sequence[int], *, skips_broken: bool) -> tuple[int, int]:
    """Return the width and the height of the first of some pictures [px], or of the first that is not broken."""
    for number in numbers:
        try:
            return source.size_of(number)
        except Exception as error:  # decoders raise exceptions of many types
            if not skips_broken:
                broken = f"--image_size 0 reads the first picture, and {source.place_of(number)} is broken"
                raise UsageError(f"{broken} ({first_line(error)}): remove it, or pass --skip_broken_images") from error
    raise UsageError(f"--image_size 0 reads the first picture, and all of {source.name} are broken: pass a size")


def check_source(flags: SourceConfig) -> None:
    """Check the flags of the sources before any picture is decoded."""
    choose_degradation(flags.degrade)
    if flags.source_path is not None:
        existing_folder("source_path", flags.source_path)


def check_conditions(flow: Flow, source: object, pictures: RealData) -> None:
    """Raise a UsageError if classes or columns of the pictures are not those that the flow was trained on."""
    labels = flow.conditions.get("labels")
    if isinstance(labels, Labels) and [*labels.examples] != pictures.class_names:
        differ = f"{source} was trained on different classes than {pictures.info.source}"
        raise UsageError(f"{differ}: pass the training pictures of the checkpoint with `dataset_path`")
    for name, column in getattr(pictures, "columns", {}).items():
        known = flow.conditions.get(name)
        if known is None or identity_of(known) != identity_of(column.kind):
            differ = f"the column {name} of {pictures.info.source} differs from the one that {source} was trained on"
            raise UsageError(f"{differ}: restore the metadata, or train again")


def kind_of_space(data: DataConfig) -> type[Space]:
    """Return the class of the space of the flags."""
    return find("space", Space, name_of(data.space) or ("Latents" if data.autoencoder else "Pixels"))


Found = ImageDataset | ImageSource | Dataset[Any]
"""A store, the files of a folder, whose range of values is not known yet, or another dataset."""


def build_space(data: DataConfig, found: Found | None = None, teacher: Space | None = None) -> Space:
    """Build the space of the flags, for a student with the scale of its teacher; that of latents is measured later."""
    space = _space_of(data, found, teacher)
    if data.augment > 0 and not can_augment(space):
        raise UsageError(f"--augment has no effect on {type(space).__name__}: leave it out")
    return space


def is_augmentable(data: DataConfig, found: Found) -> bool:
    """Return whether the space of the flags would crop and augment training data if it were asked to."""
    return can_augment(_space_of(replace(data, augment=data.augment or 1.0), found))


def _space_of(data: DataConfig, found: Found | None, teacher: Space | None = None) -> Space:
    kind = kind_of_space(data)
    if data.autoencoder and "autoencoder" not in kind.uses:
        raise UsageError(f"--autoencoder encodes pictures, and the data are {kind.__name__}: leave it out")
    *_, options = reader_of(data.space)
    typed = typed_options("space", kind.of, options)
    try:
        return kind.of(replace(data_facts(data, kind, found), teacher=teacher), **typed)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"--space {kind.__name__} cannot be built ({first_line(error)})") from error


def can_augment(space: Space) -> bool:
    """Return whether a space crops and augments training data."""
    return "augmentation" in space.uses


def data_facts(data: DataConfig, kind: type[Space], found: Found | None) -> DataFacts:
    """Return what is known about the data of the flags; the first item of a dataset gives the shape of its items."""
    facts = DataFacts(data.framing.shape, data.horizontal_flip, data.augment, data.crop == "random", data.autoencoder)
    if isinstance(found, ImageDataset):
        sources = None if found.source is None else data_facts(data, kind, cast(ImageDataset, found.source))
        return replace(facts, stored=found.space, values=found.entries["images"], sources=sources)
    if isinstance(found, ImageSource):
        return replace(facts, stored=found.space)
    if found is not None:
        return replace(facts, shape=tuple(Batches(found).__getitems__([0])[kind.key].shape[1:]))
    return facts


def choose_degradation(text: str | None) -> Degradation | None:
    """Return the degradation of ``--degrade``, if it is given."""
    return None if text is None else choose_named("degrade", Degradation, text)
