"""Open the dataset that the flags name."""

import os
from pathlib import Path

from rectified_flow.data.framing import Crop, Framing
from rectified_flow.data.huggingface import HuggingFaceSource, find_dataset_file
from rectified_flow.data.image_folder import ImageFolder
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_builder import ImageSource, open_store
from rectified_flow.data.synthetic_flowers import SYNTHETIC_FLOWERS, SyntheticFlowers
from rectified_flow.errors import UsageError
from rectified_flow.files import usable_path


def open_dataset(
    dataset: str,
    dataset_path: str | Path | None = None,
    *,
    image_size: int,
    split: str = "train",
    cache_dir: str | Path | None = None,
    skip_broken_images: bool = False,
    aspect_ratio: str = "1:1",
    crop: Crop = "center",
    alpha: bool = False,
) -> ImageDataset:
    """Open a dataset as uint8 images of ``image_size`` px, decoding the images first if they are not in a store yet.

    Args:
        dataset: ``synthetic-flowers`` or a hub id; unused if ``dataset_path`` is given.
        dataset_path: a folder of images, or of a dataset in one of the hub's layouts.
        image_size: short side in pixels.
        split: split of a hub dataset.
        cache_dir: folder for decoded images; by default the user's cache folder.
        skip_broken_images: skip images that cannot be decoded instead of raising.
        aspect_ratio: width:height.
        crop: the part that is kept: ``center``, ``random`` or ``none``. For random parts, images have a margin, and the
            space of a flow must know the shape of the parts: ``Pixels((3, image_size, image_size))``.
        alpha: keep transparency, as a fourth channel.

    Raises:
        UsageError: if a path is empty, the ratio does not suit the size, or the images cannot be found, read or stored.
    """
    if "" in (dataset_path, cache_dir):  # which would mean the current folder
        raise UsageError("--dataset_path or --cache_dir is empty: is a variable not set?")
    dataset_path, cache_dir = (None if path is None else Path(path) for path in (dataset_path, cache_dir))
    framing = Framing.of(image_size, aspect_ratio, alpha=alpha, crop=crop)
    source = _find_source(dataset, dataset_path, max(framing.stored_size), split, skip_broken_images)
    recipe = {
        "dataset": dataset,
        "dataset_path": None if dataset_path is None else str(dataset_path),
        "image_size": image_size,
        "split": split,
        "cache_dir": None if cache_dir is None else str(cache_dir),
        "skip_broken_images": skip_broken_images,
        "aspect_ratio": aspect_ratio,
        "crop": crop,
        "alpha": alpha,
    }
    store = open_store(source, framing, cache_dir=cache_dir, skip_broken_images=skip_broken_images)
    return ImageDataset(store, recipe)


def _find_source(dataset: str, folder: Path | None, side: int, split: str, skip: bool) -> ImageSource:
    if folder is not None:
        folder = usable_path("--dataset_path", folder).resolve()
        if not folder.is_dir():
            raise UsageError(f"--dataset_path {folder} is not a folder")
        if find_dataset_file(folder) is not None:
            return HuggingFaceSource(folder, split)
        return ImageFolder(folder, skip_unreadable=skip)
    if dataset == SYNTHETIC_FLOWERS:
        return SyntheticFlowers(2 * side)
    if os.path.isdir(dataset):
        raise UsageError(f"--dataset {dataset} is a folder: pass it as --dataset_path {dataset}")
    return HuggingFaceSource(dataset, split)
