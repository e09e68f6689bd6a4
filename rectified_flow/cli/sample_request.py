"""The request of a call of sample.py: its flags, and the prompts, axes and pictures that they name."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from rectified_flow.cli.model_flags import PicturesConfig
from rectified_flow.cli.sample_names import Names, is_sheet
from rectified_flow.condition import Labels, WrittenCondition, example_texts, read_written, written
from rectified_flow.data.degraded import degraded
from rectified_flow.data.metadata import condition_among
from rectified_flow.data.sources.listing import list_folder
from rectified_flow.errors import LONGEST, UsageError, first_line
from rectified_flow.evaluation.evaluator import AT_ONCE, render_sources
from rectified_flow.flows.flow import SOURCE, Flow, sampling_defaults
from rectified_flow.flows.solvers import NO_GUIDANCE, Guidance
from rectified_flow.load import Trained, reading_of
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.medium import PREVIEW, Medium
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import read_lines
from rectified_flow.system.pictures import fit, open_picture, upright_size
from rectified_flow.system.terminal import size_text

HALF = 127  # value above which a pixel of a mask is white
SEEDS, MAX_CELLS = 6, 24  # default and largest number of cells along an axis of --grid
NUM_SAMPLES, GRID_PICTURES = 64, 100  # default number of samples, and largest number of pictures in a grid
GREY = 127  # value of unknown pixels on a grid
STRENGTH = 0.6
Written = Mapping[str, Sequence[str | None]]
"""Values of conditions as written, by name; they are used in turn, and None is "none"."""


@dataclass(frozen=True)
class SampleRequest:
    """The pictures to write.

    Args:
        names: names of their files; the pictures of ``--from_images`` take turns.
        options: arguments of :func:`sample_batches`.
        texts: the conditions as written; picture ``i`` has value ``i % n`` of each.
        columns: number of columns of ``--grid``.
        shown: the first pictures uint8 ``[n, 3, h, w]`` to show before their results in the grid; None for a grid of
            samples alone.
        kept: pictures uint8 ``[n, c, h, w]`` and a mask bool ``[1, 1, h, w]`` outside of which results equal them.
    """

    names: Names
    options: dict[str, Any]
    texts: Written = field(default_factory=dict)
    columns: int | None = None
    shown: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None


def read_request(flags: PicturesConfig, trained: Trained, options: dict[str, Any]) -> SampleRequest:
    """Read the flags of the pictures."""
    flow, source, has_pictures = trained.flow, trained.source, flags.from_images is not None
    if flow.from_source and not has_pictures:
        raise UsageError(f"{source} translates pictures: pass some with --from_images")
    axes, texts = [axis_of(text, flow, source) for text in flags.grid or ()], written_conditions(flags, flow, source)
    options = options | {"steps": flags.steps or flow.default_steps}
    most = max(map(len, texts.values()), default=0)  # values of a condition, such as all classes
    if axes:
        texts, options["draws"] = cells_of(dict(axes), texts)
    elif not texts and not has_pictures:
        texts = example_texts(flow.conditions)
    options["conditions"] = read_written(flow.conditions, texts)
    if has_pictures and not texts:  # the flow would draw random values, which may not suit the pictures
        kinds = written(flow.conditions).items()
        options["conditions"] = {name: kind.none(1, torch.device("cpu")) for name, kind in kinds}
    if texts or has_pictures:
        _check_guided(options.get("guidance", NO_GUIDANCE), written(flow.conditions).keys() - texts.keys())
    if flags.from_images is not None:
        request = _from_pictures(flags.from_images, flags, trained, options, most)
        return with_texts(request, texts, flow, flags.variants)
    names = [""] * (len(options["draws"]) if axes else flags.num_samples or max(NUM_SAMPLES, most))
    if flags.prompts is not None:
        prompts = next(iter(texts.values()))  # they are written first
        slugs = ["-" + re.sub(r"\W+", "-", text).strip("-")[:60] for text in prompts]
        names = [slugs[number % len(slugs)] for number in range(flags.num_samples or len(slugs))]
    return SampleRequest(Names(names), options, texts, len(axes[1][1]) if axes else None)


def with_texts(request: SampleRequest, texts: dict[str, list[str]], flow: Flow, variants: int) -> SampleRequest:
    """Return a request that assigns the values of each condition to the results of pictures in turn.

    Raises:
        UsageError: if a condition has more values than there are results.
    """
    count = len(request.names)
    for name, values in texts.items():
        if len(values) > count:
            found = f"{len(values)} values of {name} are given, but --from_images yields only {count} results"
            raise UsageError(f"{found}: pass at most {count} values")
    files = count // variants
    # Results are ordered by variant, then by file. Shifted values make the variants of a file differ.
    repeated = {name: values for name, values in texts.items() if variants > 1 and files % len(values) == 0}
    if repeated:
        turns = [number + number // files for number in range(count)]
        texts |= {name: [values[turn % len(values)] for turn in turns] for name, values in repeated.items()}
        request.options["conditions"] |= read_written(flow.conditions, texts)
    return replace(request, texts=texts)


def _check_guided(guidance: Guidance, absent: Collection[str]) -> None:
    """Raise a UsageError if ``--guidance`` scales one of the conditions whose value is "none"."""
    for name, scale in guidance.scales.items():
        if scale != 1 and name in absent:
            text = f"--guidance {name}={scale:g} has no effect, as {name} has no value"
            raise UsageError(f"{text}: pass --set {name}=VALUE, too, or leave out --guidance {name}")


def _from_pictures(
    path: Path, flags: PicturesConfig, trained: Trained, options: dict[str, Any], least: int
) -> SampleRequest:
    """Return translations or inpainted versions of the pictures at ``path``, or at least ``least`` variations."""
    flow, space, degradation = trained.flow, trained.flow.space, trained.degradation
    _check_translation(flags, trained)
    translates = flow.takes_source or flags.mask is not None
    files = find_inputs(path, space.medium)[: flags.num_samples]
    if translates and flags.num_samples is not None and flags.num_samples > len(files):
        found = f"--num_samples {flags.num_samples} exceeds the number of files in --from_images {path}, {len(files)}"
        raise UsageError(f"{found}: leave it out, or pass --variants for several results of each")
    how = reading_of(trained)
    read = partial(space.medium.read, **how)
    images = torch.stack([_read("from_images", file, read) for file in files])
    mask = None if flags.mask is None else load_mask(flags.mask, files, space.medium, pad=how.get("pad", False))
    seen = space.medium.stored(images.to(flow.device)).cpu()
    if not translates:
        start = {"start": seen, "strength": flags.strength or STRENGTH}
        count = flags.num_samples or max(NUM_SAMPLES, len(files), least)
        return SampleRequest(Names([""] * count), options | start)
    if degradation is not None and (flags.degrade or degradation.is_projection):
        seen = _degraded(seen, degradation, space, flags.seed)
    elif mask is not None and flow.takes_source:
        seen = space.to_stored(space.encode(seen).masked_fill(mask, torch.nan), exact=True)
    shown = render_sources(flow, seen[:GRID_PICTURES])
    if flow.takes_source:
        options["conditions"] |= {SOURCE: seen}
    else:
        options |= {"start": seen, "mask": mask, "strength": flags.strength or 1.0}
    names = names_of_results(path, files, flags.variants)
    if mask is None:
        return SampleRequest(names, options, shown=shown)
    return SampleRequest(names, options, shown=shown.masked_fill(mask, GREY), kept=(images, mask))


def _check_translation(flags: PicturesConfig, trained: Trained) -> None:
    """Raise a UsageError if a flag of ``--from_images`` has no effect on the flow."""
    flow, reason = trained.flow, f"has no effect on the {type(trained.flow).__name__} of {trained.source}: leave it out"
    needed = "start" if flags.mask is None else "mask"
    takes_pictures = flow.takes_source or needed in sampling_defaults(flow)
    if not (takes_pictures and flow.space.medium.input_suffixes):
        raise UsageError(f"--from_images {reason}")
    degradation = trained.degradation
    paints = degradation is not None and degradation.leaves_holes
    is_random = not flow.from_source or flow.source_noise > 0 or paints
    works = {
        "degrade": degradation is not None,
        "strength": not flow.takes_source,
        "mask": paints or not flow.takes_source,
        "variants": flags.mask is not None or (flow.takes_source and is_random),
    }
    for name, has_effect in works.items():
        if not has_effect and getattr(flags, name) != getattr(PicturesConfig, name):
            raise UsageError(f"--{name} {reason}")


def _degraded(data: Tensor, degradation: Degradation, space: Space, seed: int) -> Tensor:
    """Return degraded pictures, each by random draws of its own."""
    parts = []
    for numbers in torch.arange(len(data)).split(AT_ONCE):
        with deterministic(Samples(seed, numbers.tolist())):
            parts.append(degraded(data[numbers], degradation, space))
    return torch.cat(parts)


def written_conditions(flags: PicturesConfig, flow: Flow, source: Path) -> dict[str, list[str]]:
    """Return the conditions that the flags give, as written and used in turn."""
    kinds, texts = written(flow.conditions), dict[str, list[str]]()
    caption = next((name for name, kind in kinds.items() if kind.is_text), "text")
    label = next((name for name, kind in kinds.items() if isinstance(kind, Labels)), "labels")
    if flags.prompts is not None:
        _kind_of(caption, kinds, source, "--prompts")
        texts[caption] = read_lines(flags.prompts)
        if not texts[caption]:
            raise UsageError(f"--prompts {flags.prompts} is empty: write a caption in each line")
    if flags.prompt is not None:
        _kind_of(caption, kinds, source, "--prompt")
        texts[caption] = [flags.prompt]
    if flags.classes is not None:
        texts[label] = _values(label, flags.classes, kinds, source, f"--classes {flags.classes}")
    for option in (each for some in flags.set_ for each in some):
        column, equals, text = option.partition("=")
        if not equals:
            raise UsageError(f"--set {option[:LONGEST]} must be NAME=VALUE, such as unicode_version=9")
        name = condition_among(kinds, column)
        texts[name] = [*texts.get(name, ()), *_values(name, text, kinds, source, f"--set {option}")]
    return texts


def _values(name: str, text: str, kinds: Mapping[str, WrittenCondition], source: Path, flag: str) -> list[str]:
    """Return the values of a condition that a flag gives, each of which can be read."""
    kind = _kind_of(name, kinds, source, flag)
    try:
        values = kind.split(text)
        if not kind.is_text:  # any text is a caption, and encoding one takes long
            if "" in values:
                raise UsageError("a value is empty; pass one, and check whether a variable is unset")
            read_written({name: kind}, {name: values})
    except ValueError as error:
        raise UsageError(f"{flag[:LONGEST]}: {first_line(error)}") from error
    return values


def _kind_of(name: str, kinds: Mapping[str, WrittenCondition], source: Path, flag: str) -> WrittenCondition:
    """Return the kind of a condition that a user names."""
    if name not in kinds:
        known = ", ".join(kinds) or "none; train with --use_cfg or --condition_on"
        raise UsageError(f"{flag}: {source} was trained without such a condition; its conditions are {known}")
    return kinds[name]


def axis_of(text: str, flow: Flow, source: Path) -> tuple[str, list[str]]:
    """Return name and values of an axis of ``--grid``: ``NAME``, ``NAME=VALUE,VALUE``, ``seed`` or ``seed=COUNT``."""
    column, _, values = text.partition("=")
    if column == "seed":
        if values and not (values.isdecimal() and 0 < int(values) <= MAX_CELLS):
            raise UsageError(f"--grid {text} must be seed=COUNT, with 1 to {MAX_CELLS}, such as seed=4")
        return column, [str(number) for number in range(int(values or SEEDS))]
    kinds, flag = written(flow.conditions), f"--grid {text}"
    name = condition_among(kinds, column)
    examples = list(_kind_of(name, kinds, source, flag).examples[:MAX_CELLS])
    given = _values(name, values, kinds, source, flag) if values else examples
    if not given:
        raise UsageError(f"{flag} needs values: pass {column}=VALUE,VALUE")
    return name, given


def cells_of(
    axes: Mapping[str, Sequence[str]], written: Mapping[str, list[str]]
) -> tuple[dict[str, list[str]], list[int]]:
    """Return the written conditions of each cell of the grid, row by row, and the number of its random draws."""
    if len(axes) < 2 or axes.keys() & written.keys():
        raise UsageError(f"--grid {' '.join(axes)} has one axis twice, or one that another flag sets")
    cells = [*product(*axes.values())]
    values = dict(zip(axes, map(list, zip(*cells, strict=True)), strict=True))
    draws = [int(text) for text in values.pop("seed", ["0"] * len(cells))]
    return {**written, **values}, draws


def find_inputs(path: Path, medium: Medium) -> list[Path]:
    """Return the files of ``--from_images``, which is one or a folder of them, without the sheets of earlier calls."""
    suffixes = medium.input_suffixes
    if path.is_file():
        return [path]
    found, _, written = list_folder(path)  # samples are inputs, too
    files = [file for file in sorted([*found, *written]) if file.suffix.lower() in suffixes]
    if medium.suffix:  # a folder of samples has pictures of them, too
        files = [file for file in files if not (file.name.endswith(PREVIEW) or is_sheet(file.name))]
    files = [file for file in files if not (is_sheet(file.name) and file in written)]
    if not files:
        known = ", ".join(sorted(suffixes))
        raise UsageError(f"--from_images {path} is neither a file nor a folder of files that end with {known}")
    return files


def _read(flag: str, path: Path, read: Callable[[Path], Tensor]) -> Tensor:
    try:
        return read(path)
    except Exception as error:  # every decoder fails in its own way
        problem = f"cannot be read ({first_line(error)})"
        raise UsageError(f"--{flag} {path} {problem}: convert it, or leave it out") from error


def load_mask(path: Path, files: Sequence[Path], medium: Medium, *, pad: bool = False) -> Tensor:
    """Read ``--mask`` as bool ``[1, 1, h, w]``, true where it is white; transparent parts are not white.

    Args:
        path: the mask.
        files: the pictures that it is for.
        medium: the medium of the pictures.
        pad: whether pictures and mask are padded instead of cropped. The padding is not generated.

    Raises:
        UsageError: if the mask cannot be read, or its transparent parts leave open what is to be generated.
    """
    height, width = medium.sides
    framed = partial(fit, size=(width, height), mode="RGBA", pad=pad)
    rgba = _read("mask", path, lambda path: pil_to_tensor(framed(open_picture(path))))
    size = upright_size(open_picture(path))
    is_margin = pil_to_tensor(framed(Image.new("RGB", size)))[3] <= HALF
    is_seen = rgba[3] > HALF
    mask = (rgba[:3].amax(dim=0) > HALF) & is_seen  # margins are transparent
    if not (is_seen | is_margin).all() and not mask.equal(is_seen):
        unclear = "has transparent parts beside dark ones, so that it is unclear what is generated"
        raise UsageError(f"--mask {path} {unclear}: save it without transparency, white where pixels are generated")
    if not mask.any():
        raise UsageError(f"--mask {path} has no white pixels, so that nothing is generated: paint these parts white")
    for file in files:
        if (other := medium.size_of(file)) != size:
            sizes = f"has {size_text(*size)} px, and {file} of --from_images {size_text(*other)} px"
            raise UsageError(f"--mask {path} {sizes}: pass a mask of the same size")
    return mask[None, None]


def names_of_results(path: Path, files: Sequence[Path], variants: int) -> Names:
    """Return names of the results of ``files``."""
    folder = path if path.is_dir() else path.parent
    stems = ["-".join(file.relative_to(folder).with_suffix("").parts) for file in files]
    [(name, count)] = Counter(stems).most_common(1)
    if count > 1:
        raise UsageError(f"--from_images has two files whose results would both be named {name}: rename a file")
    return Names(stems, variants)
