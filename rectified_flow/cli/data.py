"""From flags to the data of a run: pictures, columns, sources, and the space of the flow."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from math import gcd, prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import PartialState
from torch.utils.data import Dataset

from rectified_flow.condition import ConditionSpecs, WrittenCondition, as_number
from rectified_flow.data.build import ImageSource
from rectified_flow.data.config import FIELDS, ColumnConfig, DataConfig, RunData, SourceConfig
from rectified_flow.data.fields import stored_type
from rectified_flow.data.metadata import Column, choose_columns, identity_of
from rectified_flow.data.open import find_source, open_images, read_table, space_of_folder
from rectified_flow.data.pairs import pair_by_name
from rectified_flow.data.store import FieldInfo, ImageDataset
from rectified_flow.data.stream import Batches
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.flags import Choice, choose, refuse, typed_options
from rectified_flow.flows.flow import Flow
from rectified_flow.registry import find, names, parameters_of
from rectified_flow.spaces.autoencoders import Autoencoder, open_autoencoder
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.fields import Fields, default_show
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.spaces.transforms import Transform
from rectified_flow.system.terminal import line

MOST_NAMED = 4
"""Number of channels whose ranges are printed."""
MOST_VALUES = 2**24
"""Number of stored values from which percentiles are taken."""
DATA_FLAGS = (
    *("dataset", "dataset_path", "image_size", "cache_dir"),
    *("skip_broken_images", "aspect_ratio", "crop", "alpha", "channels_last", "store_bits", "exclude"),
)
"""Flags that are arguments of :func:`rectified_flow.open_dataset`."""


def open_registered(config: DataConfig) -> tuple[Dataset[Any] | None, ImageSource | None]:
    """Return ``(items, None)`` or ``(None, source)`` for a registered ``--dataset`` or measurements, else two None."""
    if config.dataset_path is None and config.dataset in names("dataset"):
        choice = choose("dataset", "dataset", config.dataset, config.dataset_options)
        opened = choice.build(image_size=config.image_size, cache_dir=config.cache_dir)
        return (None, opened) if isinstance(opened, ImageSource) else (opened, None)
    named = {"dataset_options": config.dataset_options}
    refuse(named, f"has no effect: --dataset {config.dataset} is not a registered dataset; leave it out")
    return None, find_source(**data_arguments_of(config)) if config.is_fields else None


def open_pictures(config: DataConfig, source: ImageSource | None = None) -> ImageDataset:
    """Open the training pictures, decoding them first if they are not in a store yet.

    Args:
        config: the flags of the data.
        source: the image source of a registered ``--dataset``, in place of the one that the flags name.

    Raises:
        UsageError: if they cannot be found, read or stored.
    """
    return open_images(source, **data_arguments_of(config))


def open_data(data: RunData, source: ImageSource | None = None, kinds: ConditionSpecs | None = None) -> ImageDataset:
    """Open the pictures of a run with their columns and their sources. Collective.

    Args:
        data: the block ``data`` of ``config.json``.
        source: the image source of a registered ``--dataset``.
        kinds: the conditions of a trained flow, from which columns take their kinds.

    Raises:
        UsageError: if pictures, columns or sources cannot be found, read or stored.
    """
    seed = data.pictures.data_seed or 0
    pictures = open_pictures(data.pictures, source)
    pictures = add_columns(pictures, data.columns, source=source, kinds=kinds, seed=seed)
    return add_source(pictures, data.pictures, data.source)


def data_arguments_of(config: DataConfig) -> dict[str, Any]:
    """Return the arguments of :func:`rectified_flow.open_dataset` by the flags of the data."""
    return {name: getattr(config, name) for name in DATA_FLAGS} | {"fields": config.is_fields}


def with_field_flags(config: DataConfig, *, may_choose: bool = True) -> DataConfig:
    """Return the flags of the data, with --space Fields and the native size if the folder has measurements.

    Args:
        config: the flags of the data.
        may_choose: choose the space by the files, unless a flag names it.

    Raises:
        UsageError: if a flag is for measurements, and there are none.
    """
    folder = config.dataset_path
    is_free = may_choose and config.space is None
    if is_free and folder is not None and folder.is_dir() and (space := space_of_folder(folder)):
        config = replace(config, space=space)
    if config.is_fields:
        refuse({"autoencoder": config.autoencoder}, f"encodes pictures, and {folder} has measurements: leave it out")
    if not config.is_fields:
        refuse(config.of_fields, "is for measurements: pass --space Fields with it")
    if config.native_size:
        width, height = cast(Any, find_source(**data_arguments_of(config))).native_size
        common = gcd(width, height)
        ratio = f"{width // common}:{height // common}"
        return replace(config, image_size=min(width, height), aspect_ratio=ratio, native_size=False)
    return config


def check_source(data: DataConfig, flags: SourceConfig) -> None:
    """Check the flags of the sources before any picture is decoded.

    Raises:
        UsageError: if the pictures to start from are no folder, or are among those to generate, or if the pictures
            cannot be degraded.
    """
    if flags.degrade is not None and data.is_fields and flags.degrade.lower() in ("grey", "edges"):
        raise UsageError(f"--degrade {flags.degrade} is for pictures with colours: pass another for measurements")
    if flags.degrade is not None and data.space in (None, FIELDS):
        _, height, width = data.framing.shape
        try:
            if (degradation := choose_degradation(flags.degrade)) is not None:
                degradation.check_sides(height, width)
        except ValueError as error:
            raise UsageError(f"--degrade {flags.degrade} does not suit --image_size: {error}") from error
    if flags.source_path is None:
        return
    if not flags.source_path.is_dir():
        raise UsageError(f"--source_path {flags.source_path} is not a folder")
    if data.dataset_path is not None and flags.source_path.resolve().is_relative_to(data.dataset_path.resolve()):
        raise UsageError(
            f"--source_path {flags.source_path} lies in --dataset_path {data.dataset_path}, whose pictures are "
            "generated: pass two folders side by side"
        )


def add_source(pictures: ImageDataset, data: DataConfig, flags: SourceConfig) -> ImageDataset:
    """Return the pictures with those of ``--source_path`` as their sources, if the flag is given.

    Args:
        pictures: the pictures to generate.
        data: the flags of these pictures, by which the sources are read, too.
        flags: the flags of the sources.

    Raises:
        UsageError: if the sources cannot be read, or with ``--paired`` if pictures have no partner.
    """
    if flags.source_path is None:
        return pictures
    try:
        source = open_pictures(replace(data, dataset_path=flags.source_path, exclude=()))
    except UsageError as error:
        raise UsageError(str(error).replace("--dataset_path", "--source_path")) from error
    if not flags.paired:
        return pictures.with_source(source, seed=data.data_seed or 0)
    folder = data.dataset_path or Path(data.dataset)
    return pair_by_name((folder, pictures), (flags.source_path, source), skip_unpaired=flags.skip_unpaired)


def add_columns(
    pictures: ImageDataset,
    flags: ColumnConfig,
    *,
    source: ImageSource | None = None,
    kinds: ConditionSpecs | None = None,
    seed: int = 0,
) -> ImageDataset:
    """Add the columns of ``--condition_on`` to the pictures as conditions, and print a summary of each. Collective.

    Args:
        pictures: the pictures.
        flags: the flags of the columns.
        source: the image source of a registered ``--dataset``.
        kinds: the conditions of a trained flow. Columns take their kinds from it, and other columns are left out.
        seed: seed of the choice among several captions.

    Raises:
        UsageError: if a column does not exist or does not suit its kind, or the text encoder is unavailable.
    """
    if not flags.condition_on:
        return pictures
    state, columns = PartialState(), dict[str, Column]()
    types = dict(option.partition("=")[::2] for option in flags.condition_types)
    table = read_table(pictures, source)
    for found in choose_columns(table, flags.condition_on, types, pictures.info.source):
        kind = None if kinds is None else kinds.get(found.name)
        if kinds is None:
            kind = found.kind.fit(found.texts, text_encoder=flags.text_encoder, text_tokens=flags.text_tokens)
            state.print(line(found.column, found.summary))
        if isinstance(kind, WrittenCondition):
            try:
                values = kind.stored(found.texts, pictures.path.parent, state)
            except UsageError as error:
                raise UsageError(f"the column {found.column} of {pictures.info.source}: {error}") from error
            columns[found.name] = Column(kind, found.first, found.texts, values)
    if flags.text_encoder and not any(each.kind.is_text for each in columns.values()):
        raise UsageError("--text_encoder has no effect: no column of --condition_on has captions; leave it out")
    return pictures.with_columns(columns, seed=seed)


def check_fields(space: Space, pictures: ImageDataset, flag: str) -> None:
    """Raise a UsageError if the channels or the type of measurements differ from those of a space.

    Args:
        space: the space of a trained flow.
        pictures: pictures or measurements.
        flag: the flag that names them.
    """
    if not isinstance(space, Fields):
        return
    found = {} if pictures.info.fields is None else pictures.info.fields.files
    wanted, has = ([files.get(name) for name in ("channels", "dtype")] for files in (space.files, found))
    if wanted != has:
        has_text = f"{has[0]} channels of {has[1]}" if found else "pictures"
        raise UsageError(
            f"{flag} has {has_text}, and the flow was trained on {wanted[0]} channels of {wanted[1]}: pass such files"
        )


def check_classes(flow: Flow, source: object, pictures: ImageDataset | RenderedItems) -> None:
    """Raise a UsageError if the flow of the checkpoint ``source`` and the pictures have different classes."""
    if flow.class_names not in ([], pictures.class_names):
        differ = f"{source} was trained on different classes than {pictures.info.source}"
        raise UsageError(f"{differ}: pass the training pictures of the checkpoint with --dataset_path")


def check_columns(flow: Flow, source: object, pictures: ImageDataset) -> None:
    """Raise a UsageError if a column of the pictures has other values than those that the flow was trained on."""
    for name, column in pictures.columns.items():
        known = flow.conditions.get(name)
        if known is None or identity_of(known) != identity_of(column.kind):
            differ = f"the column {name} of {pictures.info.source} differs from the one that {source} was trained on"
            raise UsageError(f"{differ}: restore the metadata, or train again")


def build_space(data: DataConfig, items: Any = None, source: ImageDataset | ImageSource | None = None) -> Space:
    """Build the space of the flags; the scales of a space of latents are measured later.

    Args:
        data: the flags of the data.
        items: a registered dataset of items, the first of which has the shape of the data.
        source: measurements, in a store or in the files of a folder, whose range is not known yet.

    Raises:
        UsageError: if there is no such space or autoencoder, or the size of the pictures does not suit it.
    """
    if data.space in (None, FIELDS):
        refuse({"space_options": data.space_options}, "has no effect without a registered --space; leave it out")
    if data.is_fields:
        return _field_space(data, source or find_source(**data_arguments_of(data)))
    if data.space is not None:
        choice = choose("space", Space, data.space, data.space_options)
        shape = data.framing.shape
        if items is not None:
            shape = tuple(Batches(items).__getitems__([0])[choice.target.key].shape[1:])
        space: Space = choice.build(
            shape=shape, horizontal_flip=data.horizontal_flip, augmentation=data.augment, image_size=data.image_size
        )
        return space
    if data.autoencoder is None:
        return picture_space(data)
    if data.autoencoder in names(Autoencoder):
        choice = choose("autoencoder", Autoencoder, data.autoencoder, data.autoencoder_options)
        return Latents(choice.build(), data.image_size)
    return Latents(open_autoencoder(data.autoencoder), data.image_size)


def picture_space(config: DataConfig) -> Pixels:
    """Return the space of the pictures themselves."""
    return Pixels(config.framing.shape, horizontal_flip=config.horizontal_flip, augmentation=config.augment)


def _field_space(data: DataConfig, source: Any) -> Fields:
    """Return the space of measurements.

    Raises:
        UsageError: if a flag does not suit the values.
    """
    fields: FieldInfo | None = source.info.fields if isinstance(source, ImageDataset) else None
    if isinstance(source, ImageDataset) and fields is None:
        raise UsageError(f"{source.info.source} has no measurements: leave out --space Fields")
    files = asdict(source.format) if fields is None else fields.files
    low, high = ((), ()) if fields is None else _value_range(data, source, fields)
    transform = choose_named("transform", Transform, data.transform or "linear")
    for number, least in enumerate((*fields.low, *low) if fields else (), 1):
        try:
            transform.check(least)
        except ValueError as error:
            flag = (
                f"--transform {data.transform} {error}: channel {(number - 1) % len(low) + 1} of {source.info.source}"
            )
            raise UsageError(f"{flag}, or its range, reaches down to {least:g}") from error
    if fields is None and data.transform:  # any range that suits the transform, until the values are known
        low, high = (1.0,) * files["channels"], (2.0,) * files["channels"]
    shape = (files["channels"], *data.framing.shape[1:])
    stored = stored_type(files["dtype"], data.store_bits)
    how: dict[str, Any] = {"dtype": stored, "has_missing": fields is not None and fields.missing > 0, "files": files}
    how |= {"horizontal_flip": data.horizontal_flip, "augmentation": data.augment}
    if isinstance(source, ImageDataset) and isinstance(source.source, ImageDataset):
        how["sources"] = _field_space(data, source.source)
        if how["sources"].shape != shape:
            channels = how["sources"].files["channels"]
            raise UsageError(
                f"--source_path has {channels} channels, and the fields to generate have {shape[0]}: pass sources with "
                "the same number"
            )
    try:
        return Fields(shape, low, high, transform=transform, show=data.show or default_show(files), **how)
    except ValueError as error:
        flag = f"--show {data.show}" if str(error).startswith((str(data.show), "matplotlib")) else "--value_range"
        raise UsageError(f"{flag} does not suit {source.info.source if fields else source.name}: {error}") from error


def describe_fields(space: Fields, pictures: ImageDataset) -> str:
    """Return the ranges of measurements that are scaled to [-1, 1], the transform, and the number of unknown values."""
    ranges = [f"{least:.6g} to {most:.6g}" for least, most in zip(space.low, space.high, strict=True)]
    more = f", and {len(ranges) - MOST_NAMED} more" * (len(ranges) > MOST_NAMED)
    missing = pictures.info.fields.missing if pictures.info.fields else 0
    share = missing / (len(pictures) * prod(space.shape or ()))
    unknown = f"; {missing} unknown values ({share:.2%}) are left out of the loss" * (missing > 0)
    return f"{space.dtype}, {', '.join(ranges[:MOST_NAMED])}{more}, {type(space.transform).__name__.lower()}{unknown}"


def _value_range(
    data: DataConfig, pictures: ImageDataset, fields: FieldInfo
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the values of each channel that become -1 and 1.

    Raises:
        UsageError: if the flag names no range.
    """
    given, channels = data.value_range or ("measured",), len(fields.low)
    name, _, share = given[0].partition(":")
    if given == ("measured",):
        return fields.low, fields.high
    percent = as_number(share) if name == "percentile" and len(given) == 1 else None
    if percent is not None and 0 <= percent < 50:
        pixels = pictures.images.reshape(*pictures.images.shape[:2], -1)
        some = pixels[..., :: 1 + pixels.size // MOST_VALUES].astype(np.float64)  # from every field
        ends = np.nanpercentile(some, [percent, 100 - percent], axis=(0, 2))
        return ends[0].tolist(), ends[1].tolist()
    numbers = [as_number(text) for text in given]
    if None in numbers or len(numbers) not in (2, 2 * channels):
        raise UsageError(
            f"--value_range {' '.join(given)} must be measured, percentile:P with P below 50, MIN MAX, or "
            f"MIN MAX for each of the {channels} channels"
        )
    known = [float(number or 0) for number in numbers] * (2 * channels // len(numbers))
    return known[::2], known[1::2]


def choose_named(flag: str, base: type, text: str) -> Any:
    """Return the object of ``NAME`` or ``NAME:VALUE``, with the value of the constructor's first argument.

    Args:
        flag: the flag with this text.
        base: the class whose registered subclasses have the names.
        text: the text; names are not case-sensitive.

    Raises:
        UsageError: if it is not registered, or the value does not fit.
    """
    name, colon, value = text.partition(":")
    known = {each.lower(): each for each in names(base)}
    target = find(flag, base, known.get(name.lower(), name))
    parameters = list(parameters_of(target))
    if colon and not parameters:
        raise UsageError(f"--{flag} {text}: {name} takes no value; pass {name}")
    options = [f"{parameters[0]}={value}"] if colon else []
    return Choice(flag, target, typed_options(flag, target, options)).build()


def choose_degradation(text: str | None) -> Degradation | None:
    """Return the degradation of ``--degrade``, if it is given.

    Raises:
        UsageError: if it is not registered, or the value does not fit.
    """
    return None if text is None else choose_named("degrade", Degradation, text)
