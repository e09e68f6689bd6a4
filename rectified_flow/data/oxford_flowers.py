"""Oxford Flowers 102, pickle-safe."""

import os
from pathlib import Path

from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset


class OxfordFlowersDataset(ImageDataset):
    """Oxford Flowers as uint8 images ``[3, image_size, image_size]`` with labels and true flower names.

    Args:
        image_size: side in pixels.
        split: ``train`` or ``test``.
        source: a hub id, or a local folder of the same layout.
        cache_dir: folder for the decoded images; by default the user's cache folder.
        skip_broken_images: skip images that cannot be decoded instead of raising.

    Raises:
        UsageError: if the source cannot be read.
    """

    def __init__(
        self,
        image_size: int = 64,
        split: str = "train",
        source: str | Path = OXFORD_FLOWERS,
        *,
        cache_dir: Path | None = None,
        skip_broken_images: bool = False,
    ) -> None:
        folder = Path(source) if os.path.isdir(source) else None
        opened = open_dataset(
            str(source),
            folder,
            image_size=image_size,
            split=split,
            cache_dir=cache_dir,
            skip_broken_images=skip_broken_images,
        )
        super().__init__(opened.path, opened.arguments)
