"""Inputs of sample.py: prompts, values of conditions by name, the axes of a grid, and pictures to start from."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from tqdm.auto import tqdm

from rectified_flow.cli.flags.sampling import PicturesConfig
from rectified_flow.condition import Condition, ConditionSpecs, Labels, Number, WrittenCondition, chosen
from rectified_flow.data.fields import read_field
from rectified_flow.data.resizing import fit_field
from rectified_flow.data.sources.image_folder import IMAGE_SUFFIXES, find_files
from rectified_flow.errors import UsageError, first_line
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.networks.captions import Caption
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.pixels import RGB, RGBA
from rectified_flow.spaces.space import Space
from rectified_flow.system.pictures import fit, open_picture, upright_size
from rectified_flow.system.terminal import size_text

HALF = 127
"""Value above which a pixel of a mask is white."""
PREVIEW = "-preview.png"
"""End of the name of the picture beside a generated file of measurements."""
SEEDS, MOST_CELLS = 6, 24
"""Default and largest number of cells along an axis of ``--grid``."""
Written = Mapping[str, list[str]]
"""Values of conditions as written, by name; they are used in turn."""


@dataclass(frozen=True)
class Axis:
    """An axis of ``--grid``: the values of a condition as written, or the numbers of random draws."""

    name: str
    values: list[str]


def written_conditions(flags: PicturesConfig, flow: Flow, source: Path) -> dict[str, list[str]]:
    """Return the conditions that the flags give, as written and used in turn; examples of captions if none is given."""
    kinds, written = chosen(flow.conditions), dict[str, list[str]]()
    captions = [name for name, kind in kinds.items() if isinstance(kind, Caption)]
    prompts = _read_prompts(flags.prompts) if flags.prompts else [] if flags.prompt is None else [flags.prompt]
    if prompts:
        flag = "prompts" if flags.prompts else "prompt"
        if not captions:
            raise UsageError(
                f"--{flag} has no effect: {source} was trained without captions; train with --condition_on"
            )
        written[captions[0]] = prompts
    if flags.classes is not None:
        labels = [name for name in ("labels", *kinds) if isinstance(kinds.get(name), Labels)]
        if not labels:
            raise UsageError(f"--classes has no effect: {source} was trained without labels; train with --use_cfg")
        written[labels[0]] = _values_of(flags.classes, kinds[labels[0]])
    for option in (each for some in flags.set_ for each in some):
        name, _, text = option.partition("=")
        if name in written:
            raise UsageError(f"--set {option} is the second value of {name}: separate several values by commas")
        written[name] = _values_of(text, _kind_of(name, kinds, source, f"--set {option}"))
    if not written and captions and not flags.grid and flags.from_images is None:
        examples = {name: kinds[name].examples for name in captions}  # type: ignore[attr-defined]
        written = {name: list(each) for name, each in examples.items() if each}
    return written


def _kind_of(name: str, kinds: ConditionSpecs, source: Path, flag: str) -> WrittenCondition:
    """Return the kind of a condition that a user names."""
    kind = kinds.get(name)
    if not isinstance(kind, WrittenCondition):
        known = ", ".join(each for each in kinds if isinstance(kinds[each], WrittenCondition))
        known = known or "none; train with --condition_on"
        raise UsageError(f"{flag}: {source} has no such condition; its conditions are {known}")
    return kind


def _values_of(text: str, kind: Condition) -> list[str]:
    """Return the values that a user gives: a caption, or others separated by semicolons or else by commas."""
    names = list(kind.names) or [str(i) for i in range(kind.num_classes)] if isinstance(kind, Labels) else []
    if isinstance(kind, Caption) or text in names:
        return [text]
    separator = ";" if ";" in text else ","
    return names if text.strip() == "all" and names else [each.strip() for each in text.split(separator)]


def _parse(name: str, values: list[str], kind: WrittenCondition) -> Tensor:
    """Return the values of a condition that a user wrote."""
    try:
        parsed = kind.parse(values)
    except UsageError as error:
        flag = "--prompt:" if isinstance(kind, Caption) else "--classes" if name == "labels" else f"--set {name}:"
        raise UsageError(f"{flag} {error}") from error
    if isinstance(kind, Number):
        low, high = kind.quantiles[0], kind.quantiles[-1]
        for value, text in zip(parsed.tolist(), values, strict=True):
            if not low <= value <= high:
                end = low if value < low else high
                tqdm.write(
                    f"warning: {name}={text} is outside of the training range {low:g} to {high:g}: {end:g} is used"
                )
    return parsed


def conditions_of(written: dict[str, list[str]], flow: Flow) -> dict[str, Tensor]:
    """Return the values of conditions as written; if any is given, the other columns are "none"."""
    kinds = chosen(flow.conditions)
    values = {}
    for name, texts in written.items():
        kind = kinds[name]
        if isinstance(kind, WrittenCondition):
            values[name] = _parse(name, texts, kind)
    others = {name: kind for name, kind in kinds.items() if name not in (*values, SOURCE)}
    if written:
        values |= {name: kind.none(1, torch.device("cpu")) for name, kind in others.items()}
    return values


def _read_prompts(path: Path) -> list[str]:
    """Return the lines of ``--prompts``."""
    try:
        prompts = [text.strip() for text in path.read_text(encoding="utf-8-sig").splitlines() if text.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts {path} cannot be read ({first_line(error)}): pass a text file") from error
    if not prompts:
        raise UsageError(f"--prompts {path} is empty: write a caption in each line")
    return prompts


def axis_of(text: str, flow: Flow, source: Path) -> Axis:
    """Return an axis of ``--grid``: ``NAME``, ``NAME=VALUE,VALUE``, ``seed`` or ``seed=COUNT``."""
    name, _, values = text.partition("=")
    if name == "seed":
        if values and not (values.isdecimal() and 0 < int(values) <= MOST_CELLS):
            raise UsageError(f"--grid {text} must be seed=COUNT, with 1 to {MOST_CELLS}, such as seed=4")
        return Axis(name, [str(number) for number in range(int(values or SEEDS))])
    kind = _kind_of(name, chosen(flow.conditions), source, f"--grid {text}")
    if values:
        given = values.split(";") if isinstance(kind, Caption) else _values_of(values, kind)
        if len(given) > MOST_CELLS:
            raise UsageError(f"--grid {name} has {len(given)} values, more than {MOST_CELLS}: pass fewer")
        return Axis(name, [each.strip() for each in given])
    if isinstance(kind, Labels):
        return Axis(name, _values_of("all", kind)[:MOST_CELLS])
    if isinstance(kind, Number):
        return Axis(name, [f"{value:.9g}" for value in dict.fromkeys(kind.quantiles[:: len(kind.quantiles) // 4])])
    examples = list(kind.examples) if isinstance(kind, Caption) else []
    if not examples:
        raise UsageError(f"--grid {text} needs values: pass {name}=VALUE,VALUE")
    return Axis(name, examples[:SEEDS])


def cells_of(axes: Sequence[Axis], written: Written) -> tuple[dict[str, list[str]], list[int]]:
    """Return the written conditions of each cell of the grid, row by row, and the number of its random draws."""
    rows, columns = axes
    if rows.name == columns.name:
        raise UsageError(f"--grid {rows.name} {columns.name} has one axis twice: pass two different ones")
    for name, texts in written.items():
        if name in (rows.name, columns.name):
            raise UsageError(f"--grid has the axis {name}, which another flag sets: leave one out")
        if len(texts) > 1:
            raise UsageError(f"--grid needs a single value of {name}, not {len(texts)}: make it an axis")
    count = len(rows.values) * len(columns.values)
    cells = {name: [texts[0]] * count for name, texts in written.items()}
    draws = [0] * count
    across = [(rows, [text for text in rows.values for _ in columns.values])]
    for axis, texts in (*across, (columns, columns.values * len(rows.values))):
        if axis.name == "seed":
            draws = [int(text) for text in texts]
        else:
            cells[axis.name] = texts
    return cells, draws


def find_inputs(path: Path, space: Space) -> list[Path]:
    """Return the files of ``--from_images``, which is one or a folder of them."""
    suffixes: Collection[str] = IMAGE_SUFFIXES
    if isinstance(space, Fields):
        suffixes = {space.files["suffix"], space.files["suffix"].replace(".tif", ".tiff")}
    found = find_files(path) if path.is_dir() else []
    ours = [file for file in found if isinstance(space, Fields) and file.name.endswith((PREVIEW, "grid.png"))]
    files = [path] if path.is_file() else [file for file in found if file.suffix.lower() in suffixes]
    files = [file for file in files if file not in ours]
    if not files and isinstance(space, Fields) and path.is_dir():
        raise UsageError(
            f"--from_images {path} has no {space.files['suffix']} files like the training data: pass another folder"
        )
    if not files:
        raise UsageError(f"--from_images {path} is neither a picture nor a folder of pictures: pass another path")
    return files


def load_inputs(files: Sequence[Path], space: Space) -> Tensor:
    """Read pictures as uint8 ``[n, c, h, w]`` of the shape of a space, or measurements as float32."""
    channels, height, width = space.picture_shape or space.shape or (RGB, 0, 0)
    rows = []
    for file in files:
        try:
            if isinstance(space, Fields):
                values = read_field(file, space.files["channels_last"])
                known = (space.sources or space).files["dtype"]
                if values.dtype.name != known:
                    raise ValueError(f"its values are {values.dtype.name}, not {known}")
                values = fit_field(values, (width, height))
                rows.append(torch.from_numpy(values.astype(np.float32)))
            else:
                rows.append(pil_to_tensor(fit(open_picture(file), (width, height), alpha=channels == RGBA)))
        except Exception as error:  # every decoder fails in its own way
            raise UsageError(f"--from_images {file} cannot be read ({first_line(error)}): remove it") from error
        if len(rows[-1]) != channels:
            raise UsageError(f"--from_images {file} has {len(rows[-1])} channels, not {channels}: remove it")
    return torch.stack(rows)


def load_mask(path: Path | None, files: Sequence[Path], space: Space) -> Tensor | None:
    """Read ``--mask`` as bool ``[1, 1, h, w]``, true where it is white; None without the flag."""
    if path is None:
        return None
    _, height, width = space.picture_shape or space.shape or (RGB, 0, 0)
    try:
        image = open_picture(path)
        size = upright_size(image)
        mask = pil_to_tensor(fit(image, (width, height))).amax(dim=0) > HALF
    except Exception as error:  # every decoder fails in its own way
        raise UsageError(f"--mask {path} cannot be read ({first_line(error)}): pass a picture") from error
    for file in () if isinstance(space, Fields) else files:
        other = upright_size(open_picture(file))
        if other != size:
            sizes = f"has {size_text(*size)} px, and {file} of --from_images {size_text(*other)} px"
            raise UsageError(f"--mask {path} {sizes}: pass a mask of the same size")
    if not mask.any():
        raise UsageError(f"--mask {path} is black: paint white what is to be generated")
    return mask[None, None]


def names_of_results(path: Path, files: Sequence[Path], variants: int) -> list[str]:
    """Return names of the results of ``files``, all of the first variant before those of the next.

    Raises:
        UsageError: if two results would have the same name, or that of the grid.
    """
    folder = path if path.is_dir() else path.parent
    stems = ["-".join(file.relative_to(folder).with_suffix("").parts) for file in files]
    names = [f"{stem}{f'-{number + 1}' * (variants > 1)}.png" for number in range(variants) for stem in stems]
    twice = [name for name, count in Counter([*names, "grid.png"]).items() if count > 1]
    if twice:
        raise UsageError(f"--from_images {path} has two pictures for the result {twice[0]}: rename one")
    return names
