"""The flags of the framing and of the mirror images that suit the pictures of a run, where the user gave none."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import PartialState

from rectified_flow.cli.planning import reading
from rectified_flow.cli.planning.sizes import SPOILED
from rectified_flow.cli.training_flags import NO_WEIGHTS, STARTER, DataConfig, InitConfig, SourceConfig
from rectified_flow.data.description import PictureData
from rectified_flow.data.framing import Bits, Resize
from rectified_flow.data.mirroring import unmirrored_words
from rectified_flow.data.open import reader_of
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.survey import Survey, survey
from rectified_flow.distributed import on_main
from rectified_flow.parts import name_of
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.terminal import line


@dataclass(frozen=True)
class FramedFlags:
    """The groups of flags that a choice of the framing depends on.

    Args:
        pictures: the flags of the pictures.
        source: the flags of the sources of a translation.
        init: the flags of the initial weights.
        columns: names of the columns that are conditions, as on the command line.
        given: names of the flags that the user gave.
    """

    pictures: DataConfig
    source: SourceConfig
    init: InitConfig
    columns: tuple[str, ...]
    given: Collection[str]


def framing_of(flags: FramedFlags, data: PictureData, source: ImageSource) -> tuple[dict[str, object], list[str]]:
    """Return the flags that suit the pictures of a run that begins now, and sentences about the choice. Collective.

    Args:
        flags: the flags of the run.
        data: the description of the pictures.
        source: the pictures.
    """
    state, chosen, notes = PartialState(), dict[str, object](), list[str]()
    if reader_of(flags.pictures.space)[0] is None:
        chosen, notes = on_main(state, partial(_of_pictures, flags, data, source))
    if "autoencoder" in flags.given and flags.pictures.autoencoder:
        error = reading.round_trip_error(source, flags.pictures)
        spoils = f"the autoencoder changes these pictures by {error:.0f} of 255; pass --image_size 64 without it"
        if error > SPOILED:
            state.print(line("warning", spoils))
    may_mirror = flags.pictures.horizontal_flip and "horizontal_flip" not in flags.given
    if may_mirror and (reason := on_main(state, partial(_reason_not_to_mirror, flags.columns, source))):
        chosen["horizontal_flip"] = False
        state.print(line("mirroring", f"--no_horizontal_flip, as {reason}; --horizontal_flip overrides it"))
    return chosen, notes


def _of_pictures(flags: FramedFlags, data: PictureData, source: ImageSource) -> tuple[dict[str, object], list[str]]:
    """Return the flags that suit pictures and their sources, by some of them, and a sentence for each flag."""
    framing, chosen, notes = flags.pictures.framing, dict[str, object](), list[str]()
    numbers = source.numbers(flags.pictures.max_train_samples)
    found = survey(source, framing, numbers)
    # Other weights, sources and spaces may need three channels.
    is_free = flags.init.init_from in (None, STARTER, NO_WEIGHTS) and not flags.source.is_given
    is_free = is_free and name_of(flags.pictures.space) in ("", Pixels.__name__)
    if found.is_grey and is_free and not flags.pictures.alpha and "grey" not in flags.given:
        chosen["grey"] = True
        some = "all" if len(found.facts) == len(numbers) else f"the {len(found.facts)} examined"
        notes.append(f"{some} pictures are grey, so the samples are grey, too (--no_grey trains on three channels)")
    own, own_notes = _of_values(found, flags.pictures.resize, flags.pictures.bits)
    chosen, notes = chosen | own, notes + own_notes
    if data.sources is not None:
        theirs = data.sources.described(data.pictures).find()
        found = survey(theirs, framing, range(len(theirs)))
        # Without a number of their own, sources have the bits of the pictures.
        usual = own.get("bits", data.pictures.bits)
        own, own_notes = _of_values(found, flags.source.source_resize, flags.source.source_bits, "source_", usual)
        chosen, notes = chosen | own, notes + [f"sources: {note}" for note in own_notes]
    return chosen, notes


def _of_values(
    found: Survey, resize: Resize | None, bits: Bits | None, prefix: str = "", usual: object = 16
) -> tuple[dict[str, object], list[str]]:
    """Return the flags of the filter and of the range of values, and a sentence for each.

    Args:
        found: the facts about some pictures.
        resize: the filter that the user gave.
        bits: the number of bits that the user gave.
        prefix: beginning of the names of the flags.
        usual: the number of bits without the flag.
    """
    chosen, notes = dict[str, object](), list[str]()
    if found.resize == "nearest" and resize is None:
        chosen[f"{prefix}resize"] = "nearest"
        notes.append(f"pixel art or label maps are resized without new colours (--{prefix}resize lanczos smooths them)")
    if found.bits != usual and bits is None:
        chosen[f"{prefix}bits"] = found.bits
        brightest = f"the values in files of 16 bits are at most {2**found.bits - 1:,}"
        kept = f"{brightest}, so this value becomes white (--{prefix}bits 16 keeps them dark)"
        notes += [kept] if found.bits < 16 else []
    return chosen, notes


def _reason_not_to_mirror(columns: Sequence[str], source: ImageSource) -> str | None:
    """Describe the classes or captions of pictures that are false for a mirror image; None if there are none."""
    wanted = {column.partition("=")[0] for column in columns}
    table = source.read_table() if wanted else {}
    captions = {name: column for name, column in table.items() if name in wanted or "all" in wanted}
    stems = [Path(source.name_of(number)).stem for number in source.numbers()]
    return unmirrored_words(source.class_names, captions, stems)
