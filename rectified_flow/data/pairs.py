"""Two folders of pictures, paired by the names of their files."""

from pathlib import Path

from accelerate import PartialState

from rectified_flow.data.open import suffixes_of
from rectified_flow.data.sources.huggingface import find_dataset_file
from rectified_flow.data.sources.image_folder import find_files
from rectified_flow.data.store import ImageDataset
from rectified_flow.errors import UsageError
from rectified_flow.system.files import printable


def pair_by_name(
    target: tuple[Path, ImageDataset], source: tuple[Path, ImageDataset], *, skip_unpaired: bool
) -> ImageDataset:
    """Return the target pictures, each with the source picture of the same name as its source.

    Args:
        target: the folder and the pictures to generate.
        source: the folder and the pictures to start from.
        skip_unpaired: leave out pictures without a partner, and print their number.

    Raises:
        UsageError: if pictures have no partner, and ``skip_unpaired`` is off or none has one.
    """
    pictures, sources = target[1], source[1]
    mine, theirs = names_of(*target), names_of(*source)
    partners = [theirs.get(name, -1) for name in mine]
    alone = [name for name, partner in zip(mine, partners, strict=True) if partner < 0]
    alone += [name for name in theirs if name not in mine]
    where = f"--source_path {source[0]} and --dataset_path {target[0]}"
    if max(partners) < 0:
        raise UsageError(
            f"{where} have no file names in common ({alone[0]} has no partner): rename the files of a pair alike"
        )
    if alone:
        found = f"{len(alone)} pictures in {where} have no partner, such as {alone[0]}"
        if not skip_unpaired:
            raise UsageError(f"{found}: add the partner, or pass --skip_unpaired")
        PartialState().print(f"note: {found}; they are left out")
    paired = pictures.with_source(sources, partners)
    return paired.subset([row for row, partner in enumerate(partners) if partner >= 0])


def names_of(folder: Path, pictures: ImageDataset) -> dict[str, int]:
    """Return the rows of a store by the names of its files, without suffixes and relative to the folder.

    Raises:
        UsageError: if the pictures are not files in a folder, or two files differ in their suffixes alone.
    """
    if not folder.is_dir() or find_dataset_file(folder) is not None:
        raise UsageError(f"--paired pairs files of two folders by name, and {folder} is a dataset: export its pictures")
    folder, broken, rows = folder.resolve(), {*pictures.info.skipped}, dict[str, int]()
    for file in find_files(folder, lambda _unreadable: None):
        name = str(file.relative_to(folder).with_suffix(""))
        if file.suffix.lower() not in suffixes_of(pictures) or printable(file) in broken:
            continue
        if name in rows:
            raise UsageError(
                f"--paired needs different names, and another file differs from {file} by its suffix alone"
            )
        rows[name] = len(rows)
    if len(rows) != len(pictures):
        found = f"{folder} has {len(rows)} intact pictures, and had {len(pictures)} when they were decoded"
        raise UsageError(f"{found}: pass an empty --cache_dir to decode them again")
    return rows
