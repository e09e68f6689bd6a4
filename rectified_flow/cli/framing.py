"""The flags of the framing and of the mirror images that suit the pictures of a run, where the user gave none."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate import PartialState

from rectified_flow.cli import facts, plan
from rectified_flow.cli.config import NO_WEIGHTS, STARTER, TrainConfig
from rectified_flow.cli.settings import Settings
from rectified_flow.data.mirroring import unmirrored_words
from rectified_flow.data.open import reader_of
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.survey import channel_note, survey
from rectified_flow.distributed import on_main
from rectified_flow.parts import name_of
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.terminal import line


def with_framing(
    settings: Settings[TrainConfig], data: Any, source: ImageSource
) -> tuple[Settings[TrainConfig], list[str]]:
    """Return the settings with a framing that suits the pictures, and sentences about the choice. Collective.

    Args:
        settings: the settings of a run that begins now.
        data: the description of the pictures.
        source: the pictures.
    """
    state, values, given = PartialState(), settings.values, settings.given
    flags, notes = dict[str, Any](), list[str]()
    if reader_of(values.data.space)[0] is None:
        flags, notes = on_main(state, partial(_of_pictures, values, given, data, source))
    channels = on_main(state, lambda: channel_note([source.name_of(number) for number in range(len(source))]))
    notes += [channels] if channels else []
    if "autoencoder" in given and values.data.autoencoder:
        error = facts.round_trip_error(source, values.data)
        spoils = f"the autoencoder changes these pictures by {error:.0f} of 255; pass --image_size 64 without it"
        if error > plan.SPOILED:
            state.print(line("warning", spoils))
    may_mirror = values.data.horizontal_flip and "horizontal_flip" not in given
    if may_mirror and (reason := on_main(state, partial(_reason_not_to_mirror, values, source))):
        flags["horizontal_flip"] = False
        state.print(line("mirroring", f"--no_horizontal_flip, as {reason}; --horizontal_flip overrides it"))
    return settings.resolving({name: value for name, value in flags.items() if name not in given}), notes


def _of_pictures(
    values: TrainConfig, given: Collection[str], data: Any, source: ImageSource
) -> tuple[dict[str, Any], list[str]]:
    """Return the flags that suit pictures and their sources, by some of them, and a sentence for each flag."""
    framing, flags, notes = values.data.framing, dict[str, Any](), list[str]()
    found = survey(source, framing, source.numbers_without(values.data.exclude, values.data.max_train_samples))
    # Other weights, sources and spaces may need three channels.
    is_free = values.init.init_from in (None, STARTER, NO_WEIGHTS) and not values.source.is_given
    is_free = is_free and name_of(values.data.space) in ("", Pixels.__name__)
    if found.is_grey and is_free and not values.data.alpha and "grey" not in given:
        flags["grey"] = True
        notes.append("all pictures are grey, so the samples are grey, too (`no_grey` trains on three channels)")
    if found.resize == "nearest" and values.data.resize is None:
        flags["resize"] = "nearest"
        notes.append("pixel art or label maps are resized without new colours (`resize` lanczos smooths them)")
    if found.bits < 16 and values.data.bits is None:
        flags["bits"] = found.bits
        brightest = f"the values in files of 16 bits are at most {2**found.bits - 1:,}"
        notes.append(f"{brightest}, so this value becomes white (`bits` 16 keeps them dark)")
    if values.source.source_path is not None and values.source.source_resize is None:
        theirs = replace(data.pictures, dataset_path=values.source.source_path, exclude=(), limit=None).find()
        if survey(theirs, framing, range(len(theirs))).resize == "nearest":
            flags["source_resize"] = "nearest"
            notes.append(
                "sources of few colours are resized without new colours (`source_resize` lanczos smooths them)"
            )
    return flags, notes


def _reason_not_to_mirror(values: TrainConfig, source: ImageSource) -> str | None:
    """Return the classes or captions of pictures that are false in a mirror image, in words."""
    wanted = {column.partition("=")[0] for column in values.columns.condition_on}
    table = source.read_table() if wanted else {}
    captions = {name: column for name, column in table.items() if name in wanted or "all" in wanted}
    return unmirrored_words(source.class_names, captions)
