"""Images from the Hugging Face hub, or from a local folder in one of its layouts."""

import io
import logging
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from PIL import Image

from rectified_flow.data.metadata import Table
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.folder import files_fingerprint, find_files
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import content_of, open_picture

SAVED_TO_DISK = ("dataset_dict.json", "state.json")
TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
MAX_CLASSES = 100_000
"""Largest number of classes in a column of numbers without names; larger numbers are dates or ids."""


class HuggingFaceSource(ImageSource):
    """The image column, and the label column if there is one, of a dataset that ``datasets`` reads.

    Args:
        source: a hub id, or a local folder that was written by ``save_to_disk`` or contains Parquet files.
        split: name of the split to read.

    Raises:
        UsageError: on the first read, if the dataset cannot be loaded, or has no such split or no image column.
    """

    def __init__(self, source: str | Path, split: str = "train") -> None:
        self.source, self.split = source, split
        self.name, self._flag = f"{source} {split}", f"--dataset {source}"
        if isinstance(source, Path):
            self.name, self._flag = f"{printable(source.name)} {split}", f"--dataset_path {source}"

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Hash of the files, or of the rows of a hub dataset."""
        if isinstance(self.source, Path):  # so that an existing store opens without loading the dataset
            return f"{files_fingerprint(self.source, find_files(self.source))} {self.split}"
        return f"{self.source} {self.split} {self._rows._fingerprint}"

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """Names of the classes by label; empty without a label column."""
        if self._label_column is None:
            return []
        feature = self._rows.features[self._label_column]
        if names := getattr(feature, "names", None):
            return _true_names(list(names))
        largest = max((label for label in self._rows[self._label_column] if label is not None), default=-1)
        if largest >= MAX_CLASSES:
            raise UsageError(f"{self.name} has the {self._label_column} {largest}: number the classes from 0")
        return [str(label) for label in range(largest + 1)]

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, index: int) -> tuple[Image.Image, int]:
        """Return the undecoded image of a row, and its label or -1."""
        row = self._rows[index]
        image = row[_columns(self._rows, "Image")[0]] or {"bytes": b"", "path": None}
        content = self._find_file(image["path"]) if image["bytes"] is None else io.BytesIO(image["bytes"])
        label = row.get(self._label_column)
        return open_picture(content), -1 if label is None else int(label)

    def read_table(self) -> Table:
        """Return the columns beside the images, with the names of classes."""
        import datasets

        rows = self._rows.remove_columns(_columns(self._rows, "Image"))

        def read(name: str) -> list[Any]:
            feature, values = rows.features[name], list(rows[name])
            if not isinstance(feature, datasets.ClassLabel):
                return values
            return [None if value is None or value < 0 else feature.int2str(value) for value in values]

        columns = {name: partial(read, name) for name in rows.features}
        return Table(columns, [self.describe(row) for row in range(len(rows))])

    def _find_file(self, path: str | None) -> Path:
        """Return the file that a row names in place of its image's bytes.

        Raises:
            ValueError: if it is not among the dataset's own files: a table from elsewhere may name any file.
        """
        import datasets
        import huggingface_hub

        caches = (datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)
        folders = [self.source] if isinstance(self.source, Path) else [Path(folder) for folder in caches]
        file = Path(folders[0], path or "").resolve()
        if not any(file.is_relative_to(folder.resolve()) for folder in folders):
            raise ValueError(f"the row names {file}, a file outside the dataset's folder")
        return file

    @cached_property
    def _label_column(self) -> str | None:
        kinds = self._rows.features
        integers = [name for name in ("label", "labels") if "int" in getattr(kinds.get(name), "dtype", "")]
        return next(iter(_columns(self._rows, "ClassLabel") + integers), None)

    @cached_property
    def _rows(self) -> Any:
        """The split, with its images left undecoded."""
        import datasets

        splits = self._load()
        if self.split not in splits:
            raise UsageError(f"{self.source} has no split {self.split!r}: pass one of {', '.join(splits)}")
        rows = splits[self.split]
        kinds = rows.features.items()
        columns = _columns(rows, "Image") or [name for name, kind in kinds if _holds_pictures(rows, name, kind)]
        if not columns:
            found = f"{self._flag} has no image column, only {', '.join(rows.features)}"
            raise UsageError(f"{found}: to train on image files beside a table, move the table away")
        for column in columns:
            rows = rows.cast_column(column, datasets.Image(decode=False))
        return rows

    def _load(self) -> Any:
        """Return all splits by name."""
        import datasets

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        offline = isinstance(self.source, str) and not _hub_answers(self.source)
        table = find_dataset_file(self.source) if isinstance(self.source, Path) else None
        datasets.config.HF_HUB_OFFLINE |= offline  # load the cached copy without a minute of retries
        try:
            is_saved = table is not None and table.name in SAVED_TO_DISK
            splits = (datasets.load_from_disk if is_saved else datasets.load_dataset)(str(self.source))
            return splits if isinstance(splits, dict) else {"train": splits}
        except Exception as error:  # from datasets, the hub client, the network or the file system
            reason = f"cannot be read as a dataset ({(table and content_of(table)) or first_line(error)})"
            if isinstance(self.source, str):
                why = "there is no network" if offline else f"check the name ({first_line(error)})"
                reason = f"could not be loaded from the hub: {why}; pass --dataset synthetic-flowers or --dataset_path"
            raise UsageError(f"{self._flag} {reason}") from error


def _columns(rows: Any, kind: str) -> list[str]:
    """Return the columns of a kind of the library ``datasets``."""
    return [column for column, feature in rows.features.items() if type(feature).__name__ == kind]


def _holds_pictures(rows: Any, column: str, kind: Any) -> bool:
    """Return whether the first value of a column is an encoded picture, as bytes or with the entry ``bytes``."""
    if not ("bytes" in kind if isinstance(kind, dict) else getattr(kind, "dtype", "").endswith("binary")):
        return False
    value: Any = next(filter(None, rows[column]), None)
    with suppress(OSError, TypeError):
        return bool(open_picture(io.BytesIO(value["bytes"] if isinstance(value, dict) else value)))
    return False


def _hub_answers(dataset: str) -> bool:
    """Return whether the hub can be reached. An error response such as "no such dataset" counts as reachable."""
    import huggingface_hub

    PartialState().print(f"reading {dataset} from {huggingface_hub.constants.ENDPOINT}")
    try:
        with suppress(huggingface_hub.errors.HfHubHTTPError):
            huggingface_hub.HfApi().dataset_info(dataset, timeout=10)
    except Exception:  # the network library has its own exception types
        return False
    return True


def find_dataset_file(folder: Path) -> Path | None:
    """Return a file that makes ``folder`` a dataset in one of the hub's layouts; None for a folder of image files."""
    saved = [folder / name for name in SAVED_TO_DISK if (folder / name).exists()]
    files = find_files(folder, lambda _error: None)  # errors are reported when the images are read
    tables = [file for file in files if file.suffix in TABLE_SUFFIXES]
    return next(iter(saved + tables), None)


def _true_names(class_names: list[str]) -> list[str]:
    """Return the flowers' names (Nilsback & Zisserman 2008) for the ids "1" to "102", which the hub sorts as text."""
    flowers = Path(__file__).with_name("oxford_flowers.txt").read_text().splitlines()
    if set(class_names) != {str(number + 1) for number in range(len(flowers))}:
        return class_names
    return [flowers[int(name) - 1] for name in class_names]
