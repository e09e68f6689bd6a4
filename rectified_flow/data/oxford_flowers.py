"""Oxford Flowers 102, pickle-safe."""

from pathlib import Path

from rectified_flow.data.huggingface import HuggingFaceSource
from rectified_flow.data.image_store import ImageDataset
from rectified_flow.data.store_builder import open_store

OXFORD_FLOWERS = "nelorth/oxford-flowers"


class OxfordFlowersDataset(ImageDataset):
    """Oxford Flowers as uint8 images ``[3, image_size, image_size]`` with labels and true flower names.

    Args:
        image_size: side in pixels.
        split: ``train`` or ``test``.
        source: a hub id, or a local folder of the same layout.
        cache_dir: where the decoded images are kept; by default the user's cache folder.
        skip_broken_images: leave out what cannot be decoded instead of raising.

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
        if Path(source).is_dir():
            source = Path(source)
        pictures = HuggingFaceSource(source, split)
        super().__init__(open_store(pictures, image_size, cache_dir=cache_dir, skip_broken_images=skip_broken_images))
