"""Two folders of pictures, paired by the names of their files."""

from pathlib import Path

from accelerate import PartialState

from rectified_flow.data.build import ImageSource
from rectified_flow.data.open import stored_rows
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.system.terminal import size_text


def pair_by_name(
    target: tuple[Path, ImageDataset], source: tuple[Path, ImageDataset], *, skip_unpaired: bool
) -> ImageDataset:
    """Return the target pictures, each with the source picture of the same name as its source.

    Args:
        target: the folder and the pictures to generate.
        source: the folder and the pictures to start from.
        skip_unpaired: leave out pictures without a partner of the same shape, and print their number.

    Raises:
        UsageError: if pictures have no partner, or one of another shape, and ``skip_unpaired`` is off or none has one.
    """
    (images, mine), (others, theirs) = _names_of(*target), _names_of(*source)
    where = f"--source_path {source[0]} and --dataset_path {target[0]}"
    both = [name for name in mine if name in theirs]
    excluded = {str(Path(name).with_suffix("")) for name in target[1].arguments.get("exclude", ())}
    alone = [name for name in (*mine, *theirs) if (name in mine) != (name in theirs) and name not in excluded]
    if not both:
        raise UsageError(
            f"{where} have no file names in common ({alone[0]} has no partner): rename the files of a pair alike"
        )
    unlike = list[str]()
    if not _is_uniform(target[1], source[1]):
        sizes = {name: (images.size_of(mine[name]), others.size_of(theirs[name])) for name in both}
        unlike = [name for name in both if not _is_alike(*sizes[name])]
    found = f"{len(alone)} pictures in {where} have no partner, such as {alone[0]}" if alone else ""
    remedy = "add the partner"
    if unlike:
        shapes = " and ".join(size_text(*size) for size in sizes[unlike[0]])
        found = f"{len(unlike)} of {len(both)} pairs in {where} differ in shape, such as {unlike[0]} ({shapes})"
        remedy = "crop both pictures alike"
    if found and (not skip_unpaired or len(unlike) == len(both)):
        raise UsageError(f"{found}: {remedy}, or pass --skip_unpaired")
    if found:
        PartialState().print(f"note: {found}; they are left out")
    numbers = {name: row for row, name in enumerate(theirs) if name not in {*unlike}}
    partners = [numbers.get(name, -1) for name in mine]
    paired = target[1].with_source(source[1], partners)
    return paired.subset([row for row, partner in enumerate(partners) if partner >= 0])


def _names_of(folder: Path, pictures: ImageDataset) -> tuple[ImageSource, dict[str, int]]:
    """Return the source of pictures, and its images in the store by their names without suffixes.

    Raises:
        UsageError: if the pictures are not files in a folder, or two files differ in their suffixes alone.
    """
    source, rows = stored_rows(pictures)
    if not isinstance(source, FileFolder):
        raise UsageError(f"--paired pairs files of two folders by name, and {folder} is a dataset: export its pictures")
    names = dict[str, int]()
    for row in rows:
        name = str(Path(source.name_of(row)).with_suffix(""))
        if name in names:
            found = f"another file differs from {source.describe(row)} by its suffix alone"
            raise UsageError(f"--paired needs different names, and {found}")
        names[name] = row
    return source, names


def _is_uniform(*stores: ImageDataset) -> bool:
    """Return whether all pictures had one size before they were resized."""
    sides = [side for store in stores if (known := store.info.originals) for side in (known.width, known.height)]
    return len({*map(tuple, sides[::2])}) == len({*map(tuple, sides[1::2])}) == 1 and all(a == b for a, b in sides)


def _is_alike(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether two sizes have the same ratio of width to height, up to one pixel."""
    return abs(one[0] * other[1] - one[1] * other[0]) <= max(*one, *other)
