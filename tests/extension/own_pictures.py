"""A source of pictures of one's own: coloured squares, which the program decodes once into a store."""

from PIL import Image

from rectified_flow import ImageSource, register


class Squares(ImageSource):
    """Pictures by number; any exception of ``load`` means a broken picture."""

    name, fingerprint = "squares", "squares, version 1"
    class_names = ("dark", "bright")

    def __len__(self) -> int:
        return 20

    def load(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (12, 12), (index * 12, 99, 255 - index * 12)), int(index >= 10)

    def place_of(self, index: int) -> str:
        return f"square {index}"


@register(role="dataset")
def squares() -> Squares:
    """Return the squares."""
    return Squares()
