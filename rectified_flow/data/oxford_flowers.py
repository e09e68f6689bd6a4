"""Oxford Flowers 102, pickle-safe."""

import os
from pathlib import Path
from typing import Any

from rectified_flow.data import OXFORD_FLOWERS
from rectified_flow.data.open import open_dataset
from rectified_flow.data.store import ImageDataset


class OxfordFlowersDataset(ImageDataset):
    """Oxford Flowers 102 as uint8 images ``[3, image_size, image_size]`` with labels and true flower names.

    Args:
        image_size: side in pixels.
        split: ``train`` or ``test``.
        source: a hub id, or a local folder of the same layout.
        options: further arguments of :func:`rectified_flow.open_dataset`, such as ``cache_dir``.

    Raises:
        UsageError: if the source cannot be read.
    """

    def __init__(
        self, image_size: int = 64, split: str = "train", source: str | Path = OXFORD_FLOWERS, **options: Any
    ) -> None:
        folder = source if os.path.isdir(source) else None
        opened = open_dataset(str(source), folder, image_size=image_size, split=split, **options)
        super().__init__(opened.path, opened.arguments)
