"""Images from the Hugging Face hub, or from a local folder in one of its layouts."""

import io
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from typing_extensions import override

from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.listing import files_fingerprint, find_files, is_image
from rectified_flow.distributed import join_processes
from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import printable
from rectified_flow.system.pictures import content_of, open_picture

SAVED_TO_DISK = ("dataset_dict.json", "state.json")
TABLE_SUFFIXES = (".parquet", ".arrow")
IMAGE_COLUMNS = ("image", "images", "img", "picture", "photo", "target", "jpg", "png", "webp", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "fine_label")
"""Conventional names of the columns of images and of labels, the most usual first."""
MOST_GAPS, FEW_LABELS = 2, 10
"""Largest ratio of the integers up to the largest label to the different labels for gaps to be classes, and number of
different labels above which labels that hardly recur are no classes."""


class HuggingFaceSource(ImageSource):
    """The image column, and the label column if there is one, of a dataset that ``datasets`` reads.

    Args:
        source: a hub id, or a local folder that was written by ``save_to_disk`` or contains Parquet files.
        split: name of the split to read. A dataset without a split ``train`` that has only one split is read anyway.
        image_column: column of the images; by default one with a conventional name, or else the first.
        label_column: column of the labels; by default one with a conventional name, else the first column of classes.
    """

    notes: list[str]

    def __init__(
        self, source: str | Path, split: str = "train", *, image_column: str = "", label_column: str = ""
    ) -> None:
        self.source, self.split, is_folder = source, split, isinstance(source, Path)
        self.name = f"{printable(source.name) if isinstance(source, Path) else source} {split}"
        self.notes = []
        self._chosen = image_column, label_column
        self._title = f"the folder {source}" if is_folder else f"`dataset` {source}"

    @cached_property
    @override
    def fingerprint(self) -> str:  # type: ignore[override]
        if isinstance(self.source, Path):  # so that an existing store opens without loading the dataset
            return f"{self._files} {self.split} {self._chosen}"
        return f"{self.source} {self.split} {self._chosen} {self._rows._fingerprint}"

    @cached_property
    def _files(self) -> str:
        """The fingerprint of the files of a local folder."""
        return files_fingerprint(Path(self.source), find_files(Path(self.source)))

    @cached_property
    @override
    def class_names(self) -> list[str]:  # type: ignore[override]
        if self._label_column is None:
            return []
        if names := getattr(self._rows.features[self._label_column], "names", None):
            return _true_names(self.name, list(names))
        return [str(value) for value in self._numbers]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The class of each value in a column of integers, which need not start at 0 or be consecutive."""
        values = sorted({value for value in self._rows[self._label_column] if value is not None and value >= 0})
        if values and values[-1] < MOST_GAPS * len(values):  # a class or two may be missing in this split
            values = [*range(values[-1] + 1)]
        return {value: label for label, value in enumerate(values)}

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def load(self, index: int) -> tuple[Image.Image, int]:
        row = self._rows[index]
        image, label = row[self._image_column] or {"bytes": b""}, row.get(self._label_column)
        content = io.BytesIO(image["bytes"]) if image["bytes"] is not None else self._find_file(image["path"])
        return open_picture(content), -1 if label is None else self._class_of(int(label))

    def _class_of(self, value: int) -> int:
        """Return the class of a value of the column of labels; an invalid value is returned unchanged."""
        is_named = hasattr(self._rows.features[self._label_column], "names")
        return value if is_named or value < 0 else self._numbers[value]

    def _find_file(self, path: str | None) -> Path:
        """Return the file of a row, which is among the dataset's own: a table from elsewhere may name any file."""
        import datasets
        import huggingface_hub

        caches = (datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)
        folders = [self.source] if isinstance(self.source, Path) else [Path(folder) for folder in caches]
        file = Path(folders[0], path or "").resolve()
        if not any(file.is_relative_to(folder.resolve()) for folder in folders):
            raise ValueError(f"the row names {file}, a file outside the dataset's folder")
        return file

    @override
    def read_table(self) -> dict[str, Any]:
        rows = self._rows.remove_columns(_columns(self._rows, "Image"))
        columns = {name: rows[name] for name in rows.features}  # read when they are used
        for name in _columns(rows, "ClassLabel"):
            names = rows.features[name].names
            columns[name] = [None if label is None or label < 0 else names[label] for label in rows[name]]
        return columns

    @override
    def column_names(self) -> list[str]:
        _ = self._image_column  # which may add a note
        columns = self._rows.remove_columns(_columns(self._rows, "Image")).features
        return [name for name in columns if name != self._label_column]  # which has the classes

    @cached_property
    def _image_column(self) -> str:
        """The column of the images, with a note if there are others."""
        return self._choose("image", self._chosen[0], _columns(self._rows, "Image"), IMAGE_COLUMNS)

    @cached_property
    def _label_column(self) -> str | None:
        """The column of the labels, with a note if there are others or if its values cannot be classes."""
        kinds, chosen = self._rows.features, self._chosen[1]
        named = _columns(self._rows, "ClassLabel")
        integers = [name for name in kinds if "int" in getattr(kinds[name], "dtype", "") and name not in named]
        found = named + [name for name in integers if chosen or name in LABEL_COLUMNS]
        if not (found or chosen):
            return None
        column = self._choose("label", chosen, found, LABEL_COLUMNS)
        values = {*self._rows[column]} if column in integers else {0}
        if len(values) > max(FEW_LABELS, len(self._rows) // 2):
            self.notes.append(f"no classes: the column {column} has {len(values)} different numbers")
            return None
        return column

    def _choose(self, what: str, chosen: str, columns: list[str], conventional: tuple[str, ...]) -> str:
        """Return the chosen column, or else the one with a conventional name, or else the first, with a note."""
        if chosen and chosen not in columns:
            has = f"is not among the {what} columns of {self.name}: {', '.join(columns) or 'there are none'}"
            other = "; `condition_on` trains on a column of texts" * (what == "label")
            raise UsageError(f"`{what}_column` {chosen} {has}{other}")
        column = chosen or next((name for name in conventional if name in columns), columns[0])
        others = ", ".join(name for name in columns if name != column)
        if others and not chosen:
            note = f"read the {what} column {column}, not {others}: pass `{what}_column` to choose another"
            self.notes.append(note)
        return column

    @cached_property
    def _rows(self) -> Any:
        """The split, with its images left undecoded."""
        import datasets

        rows = self._load()
        columns = _columns(rows, "Image") or [name for name in rows.features if _holds_pictures(rows, name)]
        if not columns:
            found = f"{self._title} has no image column, only {', '.join(rows.features)}"
            raise UsageError(f"{found}: to train on image files beside a table, move the table away")
        for column in columns:
            rows = rows.cast_column(column, datasets.Image(decode=False))
        return rows

    def _load(self) -> Any:
        """Load the split without changing its columns."""
        import datasets

        table = find_dataset_file(self.source, find_files(self.source)) if isinstance(self.source, Path) else None
        if isinstance(self.source, str):
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
            datasets.config.HF_HUB_OFFLINE |= not _hub_answers(self.source)  # loads the cached copy without retries
        try:
            if table is None or table.name not in SAVED_TO_DISK:
                return self._load_split(self._cache_dir)
            return self._split_of(datasets.load_from_disk(str(self.source)))
        except Exception as error:  # from datasets, the hub client, the network or the file system
            why = (content_of(table) if table else None) or first_line(error)
            if table is None and datasets.config.HF_HUB_OFFLINE:
                why = "there is no network; pass `dataset` synthetic-flowers or `dataset_path`"
            raise UsageError(f"{self._title} cannot be read as a dataset ({why})") from error

    @property
    def _cache_dir(self) -> str | None:
        """A folder of its own for each state of local files, as ``datasets`` ignores their sizes and contents."""
        import datasets

        is_local = isinstance(self.source, Path)
        return str(Path(datasets.config.HF_DATASETS_CACHE, f"rectified-flow-{self._files}")) if is_local else None

    def _load_split(self, cache_dir: str | None) -> Any:
        """Load the split with the library ``datasets``."""
        import datasets

        try:
            return datasets.load_dataset(str(self.source), split=self.split, cache_dir=cache_dir)
        except ValueError:
            if self.split != "train":
                raise
        return self._split_of(datasets.load_dataset(str(self.source), cache_dir=cache_dir))

    def _split_of(self, loaded: Any) -> Any:
        """Return the split of a dataset, or its only one in place of ``train``."""
        if not isinstance(loaded, dict):
            return loaded
        if self.split not in loaded and self.split == "train" and len(loaded) == 1:
            [(name, rows)] = loaded.items()
            self.notes.append(f"read the split {name}, as there is no other")
            return rows
        if self.split not in loaded:
            raise ValueError(f'Unknown split "{self.split}". Should be one of {[*loaded]}.')
        return loaded[self.split]


def _columns(rows: Any, kind: str) -> list[str]:
    """Return the columns of a kind of the library ``datasets``."""
    return [column for column, feature in rows.features.items() if type(feature).__name__ == kind]


def _holds_pictures(rows: Any, column: str) -> bool:
    """Return whether the first value of a column is an encoded picture, as bytes or with the entry ``bytes``."""
    value: Any = next((value for value in rows[column] if value is not None), None)
    with suppress(OSError, TypeError, KeyError):
        return bool(open_picture(io.BytesIO(value["bytes"] if isinstance(value, dict) else value)))
    return False


def _hub_answers(dataset: str) -> bool:
    """Return whether the hub can be reached. An error response such as "no such dataset" counts as reachable."""
    import huggingface_hub

    join_processes().print(f"reading {dataset} from {huggingface_hub.constants.ENDPOINT}")
    try:
        huggingface_hub.HfApi().dataset_info(dataset, timeout=10)
    except Exception as error:  # the network library has its own exception types
        return isinstance(error, huggingface_hub.errors.HfHubHTTPError)
    return True


def find_dataset_file(folder: Path, files: Sequence[Path]) -> Path | None:
    """Return a file that makes a folder a dataset in one of the hub's layouts; None for a folder of image files.

    Args:
        folder: the folder.
        files: all files below it.
    """
    saved = [folder / name for name in SAVED_TO_DISK if (folder / name).exists()]
    tables = [file for file in files if file.suffix in TABLE_SUFFIXES]
    if tables and any(map(is_image, files)) and all(map(_has_no_bytes, tables)):
        tables = []  # tables about the pictures beside them
    return next(iter(saved + tables), None)


def _has_no_bytes(table: Path) -> bool:
    """Return whether a Parquet file has no column that may hold pictures."""
    from pyarrow import ArrowException, parquet

    with suppress(ArrowException, OSError):
        return not any(_may_hold_bytes(field.type) for field in parquet.read_schema(table))
    return False


def _may_hold_bytes(kind: Any) -> bool:
    """Return whether values of a type of Arrow are bytes, or contain some."""
    from pyarrow import types

    inner = (kind.field(number).type for number in range(kind.num_fields))
    return types.is_binary(kind) or types.is_large_binary(kind) or any(map(_may_hold_bytes, inner))


def _true_names(dataset: str, class_names: list[str]) -> list[str]:
    """Return the flowers' names (Nilsback & Zisserman 2008) for the ids "1" to "102", which the hub sorts as text."""
    if "flower" not in dataset.lower():
        return class_names
    flowers = Path(__file__).with_name("oxford_flowers.txt").read_text().splitlines()
    if set(class_names) != {str(number + 1) for number in range(len(flowers))}:
        return class_names
    return [flowers[int(name) - 1] for name in class_names]
