"""From flags to the data of a run: pictures, columns, sources, and the space of the flow."""

from dataclasses import replace
from math import gcd
from typing import Any, cast

import numpy as np
from accelerate import PartialState
from torch.utils.data import Dataset

from rectified_flow.condition import ConditionSpecs, Labels, WrittenCondition
from rectified_flow.data.config import ColumnConfig, DataConfig, RunData, SourceConfig
from rectified_flow.data.degraded import Degraded
from rectified_flow.data.metadata import Column, identity_of
from rectified_flow.data.open import find_columns, find_source, open_dataset, open_images, reader_of, space_of_folder
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.store import ImageDataset, pair_by_name
from rectified_flow.data.stream import Batches
from rectified_flow.errors import UsageError, first_line
from rectified_flow.evaluation.features import RealData
from rectified_flow.evaluation.heldout import Split, hold_out
from rectified_flow.flags import choose, choose_named, name_of, refuse, split_part, typed_options
from rectified_flow.flows.flow import Flow
from rectified_flow.registry import find, names, parameters_of
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.space import DataFacts, Space
from rectified_flow.system.terminal import line, size_text

FEW, NAMED = 10, 5
"""Number of pictures below which a class is reported, and largest number of names in a list."""


def find_data(config: DataConfig) -> ImageSource | Dataset[Any]:
    """Return the source of the images that the flags name, or the items of a registered ``--dataset``."""
    name, options = split_part(config.dataset)
    if config.dataset_path is None and name in names("dataset"):
        choice = choose("dataset", "dataset", config.dataset)
        return choice.build(image_size=config.image_size, cache_dir=config.cache_dir)
    refuse({f"dataset {' '.join(options)}": options}, "has no effect without a registered dataset; leave it out")
    return find_source(**data_arguments_of(config))


def open_pictures(config: DataConfig, source: ImageSource | None = None) -> ImageDataset:
    """Open the training pictures, decoding them first if they are not in a store yet."""
    return open_images(source, **data_arguments_of(config))


def open_data(data: RunData, source: ImageSource | None = None, kinds: ConditionSpecs | None = None) -> ImageDataset:
    """Open the pictures of a run with their columns and their sources. Collective.

    ``kinds`` are the conditions of a trained flow: its columns get these kinds, and all other columns are left out.
    """
    seed = data.pictures.data_seed or 0
    pictures = open_pictures(data.pictures, source)
    pictures = add_columns(pictures, data.columns, source=source, kinds=kinds, seed=seed)
    return add_source(pictures, data.pictures, data.source)


def data_arguments_of(config: DataConfig) -> dict[str, Any]:
    """Return the arguments of :func:`rectified_flow.open_dataset` by the flags of the data."""
    arguments = {name: getattr(config, name) for name in parameters_of(open_dataset) if hasattr(config, name)}
    return arguments | {"dataset": name_of(config.dataset)}


def with_space(config: DataConfig, *, may_choose: bool = True) -> DataConfig:
    """Return the flags of the data with the space of most files, and the size of the first picture in place of 0.

    The files determine the space if ``--space`` has no name. Without ``--space``, ``may_choose`` must be true.
    """
    folder = config.dataset_path
    is_free = (may_choose or config.space) and not name_of(config.space)
    if is_free and folder is not None and folder.is_dir() and (space := space_of_folder(folder)):
        config = replace(config, space=(space, *config.space))
    if config.image_size == 0:
        source = find_data(replace(config, image_size=DataConfig.image_size))
        if not isinstance(source, ImageSource):
            raise UsageError("--image_size 0 is for pictures: pass the size of the items")
        width, height = source.size_of(0)
        common = gcd(width, height)
        config = replace(config, image_size=min(width, height), aspect_ratio=f"{width // common}:{height // common}")
    return config


def check_source(flags: SourceConfig) -> None:
    """Check the flags of the sources before any picture is decoded."""
    choose_degradation(flags.degrade)
    if flags.source_path is not None and not flags.source_path.is_dir():
        raise UsageError(f"--source_path {flags.source_path} is not a folder")


def add_source(pictures: ImageDataset, data: DataConfig, flags: SourceConfig) -> ImageDataset:
    """Return the pictures with those of ``--source_path`` as their sources, if the flag is given."""
    if flags.source_path is None:
        return pictures
    try:
        source = open_pictures(replace(data, dataset_path=flags.source_path, exclude=()))
    except UsageError as error:
        raise UsageError(str(error).replace("--dataset_path", "--source_path")) from error
    if not flags.paired:
        return pictures.changed(source=source, seed=data.data_seed or 0)
    return pair_by_name(pictures, source, skip_unpaired=data.skip_broken_images)


def add_degradation(dataset: Any, degrade: str | None, space: Space, seed: int) -> Any:
    """Return a dataset with degraded data as the sources of its items, if ``--degrade`` is given."""
    degradation = choose_degradation(degrade)
    return dataset if degradation is None else Degraded(dataset, degradation, space, seed)


def add_columns(
    pictures: ImageDataset,
    flags: ColumnConfig,
    *,
    source: ImageSource | None = None,
    kinds: ConditionSpecs | None = None,
    seed: int = 0,
) -> ImageDataset:
    """Add the columns of ``--condition_on`` to the pictures as conditions, and print a summary of each. Collective."""
    if not flags.condition_on:
        return pictures
    state, columns = PartialState(), dict[str, Column]()
    for found in find_columns(pictures, flags.condition_on, source):
        if found.name in columns:
            raise UsageError(f"--condition_on {found.column}: another column is {found.name}, too; rename one of them")
        if kinds is not None:
            kind = kinds.get(found.name)
        else:
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
    return pictures.changed(columns=columns, seed=seed)


def summary_of(dataset: ImageDataset) -> str:
    """Return the number, the sizes and the faults of pictures in one line."""
    info, names, texts = dataset.info, dataset.class_names, [str(len(dataset))]
    if info.framing is not None:
        sizes = [original[1:] for original in dataset.originals]
        (width, height), *others = {*sizes}
        widths, heights = zip(*sizes, strict=True)
        spans = f"{min(widths)} to {max(widths)} px wide, {min(heights)} to {max(heights)} px high"
        texts.append(spans if others else f"all {width}x{height} px")
        if enlarged := sum(info.framing.enlarges(*size) for size in sizes):
            texts.append(f"{enlarged} smaller than {size_text(*info.framing.stored_size)} px, so enlarged and blurred")
    if info.duplicates:
        texts.append(f"{info.duplicates} equal to an earlier picture")
    counts = np.bincount(dataset.labels, minlength=len(names)) if names else np.array([])
    rare = [f"{names[label]} ({counts[label]})" for label in counts.argsort(kind="stable") if counts[label] < FEW]
    if rare:
        shown = ", ".join(rare[:NAMED]) + ", ..." * (len(rare) > NAMED)
        texts.append(f"{len(rare)} of {len(names)} classes with fewer than {FEW} pictures: {shown}")
    if info.skipped:
        texts.append(f"{len(info.skipped)} left out; the first is {info.skipped[0]}")
    return "; ".join(texts)


def split_of(pictures: ImageDataset, data: DataConfig) -> Split | None:
    """Return the split by ``--holdout`` into training and held-out pictures; None without ``--holdout``. Collective.

    One of the two parts may be too small. All programs that open the pictures of a run get the same split.
    """
    return hold_out(pictures, data.holdout, data.data_seed or 0) if data.holdout else None


def divided(pictures: ImageDataset, data: DataConfig) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the pictures that a run is trained on, and those that it holds out, if there are any. Collective."""
    split = split_of(pictures, data)
    if split is not None and split.problem is None:
        return split.divide(pictures)
    if split is not None:
        PartialState().print(f"warning: no pictures are held out, as --holdout leaves {split.problem}")
    return pictures, None


def check_conditions(flow: Flow, source: object, pictures: RealData) -> None:
    """Raise a UsageError if classes or columns of the pictures are not those that the flow was trained on."""
    labels = flow.conditions.get("labels")
    if isinstance(labels, Labels) and [*labels.examples] != pictures.class_names:
        differ = f"{source} was trained on different classes than {pictures.info.source}"
        raise UsageError(f"{differ}: pass the training pictures of the checkpoint with --dataset_path")
    for name, column in getattr(pictures, "columns", {}).items():
        known = flow.conditions.get(name)
        if known is None or identity_of(known) != identity_of(column.kind):
            differ = f"the column {name} of {pictures.info.source} differs from the one that {source} was trained on"
            raise UsageError(f"{differ}: restore the metadata, or train again")


def kind_of_space(data: DataConfig) -> type[Space]:
    """Return the class of the space of the flags."""
    return find("space", Space, name_of(data.space) or ("Latents" if data.autoencoder else "Pixels"))


def can_augment(data: DataConfig) -> bool:
    """Return whether the space of the flags augments training data."""
    return "augmentation" in kind_of_space(data).uses


Found = ImageDataset | ImageSource | Dataset[Any]
"""A store, the files of a folder, whose range of values is not known yet, or another dataset."""


def build_space(data: DataConfig, found: Found | None = None, teacher: Space | None = None) -> Space:
    """Build the space of the flags, for a student with the scale of its teacher; that of latents is measured later."""
    kind = kind_of_space(data)
    used = {"augment": data.augment > 0 and "augmentation" not in kind.uses}
    refuse(used, f"has no effect on {kind.__name__}: leave it out")
    needless = bool(data.autoencoder) and "autoencoder" not in kind.uses
    refuse({"autoencoder": needless}, f"encodes pictures, and the data are {kind.__name__}: leave it out")
    *_, options = reader_of(data.space)
    typed = typed_options("space", kind.of, options)
    try:
        return kind.of(replace(facts_of(data, kind, found), teacher=teacher), **typed)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"--space {kind.__name__} cannot be built ({first_line(error)})") from error


def facts_of(data: DataConfig, kind: type[Space], found: Found | None) -> DataFacts:
    """Return what is known about the data of the flags; the first item of a dataset gives the shape of its items."""
    facts = DataFacts(data.framing.shape, data.horizontal_flip, data.augment, data.autoencoder)
    if isinstance(found, ImageDataset):
        sources = None if found.source is None else facts_of(data, kind, cast(ImageDataset, found.source))
        return replace(facts, stored=found.space, values=found.entries["images"], sources=sources)
    if isinstance(found, ImageSource):
        return replace(facts, stored=found.space)
    if found is not None:
        return replace(facts, shape=tuple(Batches(found).__getitems__([0])[kind.key].shape[1:]))
    return facts


def choose_degradation(text: str | None) -> Degradation | None:
    """Return the degradation of ``--degrade``, if it is given."""
    return None if text is None else choose_named("degrade", Degradation, text)
