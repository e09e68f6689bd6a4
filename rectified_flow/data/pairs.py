"""Two folders of pictures, paired by the names of their files."""

from pathlib import Path

from accelerate import PartialState

from rectified_flow.data.format import Original
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.system.terminal import size_text


def pair_by_name(pictures: ImageDataset, source: ImageDataset, *, skip_unpaired: bool) -> ImageDataset:
    """Return the pictures, each with the picture of the same name in ``source`` as its source.

    Args:
        pictures: the pictures to generate.
        source: the pictures to start from.
        skip_unpaired: leave out pictures without a partner of the same shape, and print their number.

    Raises:
        UsageError: if pictures have no partner, or one of another shape, and ``skip_unpaired`` is off or none has one.
    """
    mine, theirs = _rows_by_stem(pictures), _rows_by_stem(source)
    where = f"--source_path {source.info.source} and --dataset_path {pictures.info.source}"
    both = [stem for stem in mine if stem in theirs]
    excluded = {_stem(name) for name in pictures.arguments.get("exclude", ())}
    alone = [stem for stem in (*mine, *theirs) if (stem in mine) != (stem in theirs) and stem not in excluded]
    if not both:
        raise UsageError(
            f"{where} have no file names in common ({alone[0]} has no partner): rename the files of a pair alike"
        )
    originals = {stem: (pictures.originals[mine[stem]], source.originals[theirs[stem]]) for stem in both}
    unlike = [stem for stem in both if not _is_alike(*originals[stem])]
    found = f"{len(alone)} pictures in {where} have no partner, such as {alone[0]}" if alone else ""
    remedy = "add the partner"
    if unlike:
        shapes = " and ".join(size_text(each.width, each.height) for each in originals[unlike[0]])
        found = f"{len(unlike)} of {len(both)} pairs in {where} differ in shape, such as {unlike[0]} ({shapes})"
        remedy = "crop both pictures alike"
    if found and (not skip_unpaired or len(unlike) == len(both)):
        raise UsageError(f"{found}: {remedy}, or pass --skip_broken_images")
    if found:
        PartialState().print(f"note: {found}; they are left out")
    fit = {stem: row for stem, row in theirs.items() if stem not in {*unlike}}
    partners = [fit.get(stem, -1) for stem in mine]
    paired = pictures.with_source(source, partners)
    return paired.subset([row for row, partner in enumerate(partners) if partner >= 0])


def _stem(name: str) -> str:
    return str(Path(name).with_suffix(""))


def _rows_by_stem(pictures: ImageDataset) -> dict[str, int]:
    """Return the row of each picture by its name without the suffix.

    Raises:
        UsageError: if two names differ in their suffixes alone.
    """
    rows = dict[str, int]()
    for row, name in enumerate(pictures.names):
        if rows.setdefault(_stem(name), row) != row:
            raise UsageError(f"--paired needs different names, and {name} differs from another by its suffix alone")
    return rows


def _is_alike(one: Original, other: Original) -> bool:
    """Return whether two pictures have the same ratio of width to height, up to one pixel."""
    return abs(one.width * other.height - one.height * other.width) <= max(one.width, one.height, *other[1:])
