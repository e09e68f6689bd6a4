"""Oxford Flowers 102 (Nilsback & Zisserman 2008), pickle-safe."""

from pathlib import Path

from rectified_flow.data.huggingface import HuggingFaceSource
from rectified_flow.data.image_store import ImageDataset, open_store

OXFORD_FLOWERS = "nelorth/oxford-flowers"

# By Oxford id, starting at 1.
FLOWER_NAMES = (
    "pink primrose",
    "hard-leaved pocket orchid",
    "canterbury bells",
    "sweet pea",
    "english marigold",
    "tiger lily",
    "moon orchid",
    "bird of paradise",
    "monkshood",
    "globe thistle",
    "snapdragon",
    "colt's foot",
    "king protea",
    "spear thistle",
    "yellow iris",
    "globe-flower",
    "purple coneflower",
    "peruvian lily",
    "balloon flower",
    "giant white arum lily",
    "fire lily",
    "pincushion flower",
    "fritillary",
    "red ginger",
    "grape hyacinth",
    "corn poppy",
    "prince of wales feathers",
    "stemless gentian",
    "artichoke",
    "sweet william",
    "carnation",
    "garden phlox",
    "love in the mist",
    "mexican aster",
    "alpine sea holly",
    "ruby-lipped cattleya",
    "cape flower",
    "great masterwort",
    "siam tulip",
    "lenten rose",
    "barbeton daisy",
    "daffodil",
    "sword lily",
    "poinsettia",
    "bolero deep blue",
    "wallflower",
    "marigold",
    "buttercup",
    "oxeye daisy",
    "common dandelion",
    "petunia",
    "wild pansy",
    "primula",
    "sunflower",
    "pelargonium",
    "bishop of llandaff",
    "gaura",
    "geranium",
    "orange dahlia",
    "pink-yellow dahlia",
    "cautleya spicata",
    "japanese anemone",
    "black-eyed susan",
    "silverbush",
    "californian poppy",
    "osteospermum",
    "spring crocus",
    "bearded iris",
    "windflower",
    "tree poppy",
    "gazania",
    "azalea",
    "water lily",
    "rose",
    "thorn apple",
    "morning glory",
    "passion flower",
    "lotus",
    "toad lily",
    "anthurium",
    "frangipani",
    "clematis",
    "hibiscus",
    "columbine",
    "desert-rose",
    "tree mallow",
    "magnolia",
    "cyclamen",
    "watercress",
    "canna lily",
    "hippeastrum",
    "bee balm",
    "ball moss",
    "foxglove",
    "bougainvillea",
    "camellia",
    "mallow",
    "mexican petunia",
    "bromelia",
    "blanket flower",
    "trumpet creeper",
    "blackberry lily",
)


class OxfordFlowersSource(HuggingFaceSource):
    """The hub's copy, whose classes are Oxford ids in text order ('1', '10', '100', ...), with their true names."""

    @property
    def class_names(self) -> list[str]:
        names = super().class_names
        if set(names) <= {str(number + 1) for number in range(len(FLOWER_NAMES))}:
            return [FLOWER_NAMES[int(name) - 1] for name in names]
        return names


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
        pictures = OxfordFlowersSource(source, split)
        super().__init__(open_store(pictures, image_size, cache_dir=cache_dir, skip_broken_images=skip_broken_images))
