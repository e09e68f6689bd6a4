"""Picture files: opening, grids, atomic writing, and the settings of a sample as metadata.

The settings of a generated picture are an XMP packet, which PNG, WebP and JPEG files carry: the IPTC property
``DigitalSourceType`` with the value ``trainedAlgorithmicMedia``, and the settings as JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from html import escape, unescape
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import numpy as np
import torch
from annotated_types import Interval
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

from rectified_flow.errors import UsageError
from rectified_flow.system.artifact import write_output
from rectified_flow.system.colour import BAD_EXIF, profile_of, to_srgb
from rectified_flow.system.files import open_regular, parse_document, reading, writing
from rectified_flow.system.lettering import text_picture

if TYPE_CHECKING:
    from _typeshed import StrOrBytesPath

FORMATS = ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF"]
"""Formats that are opened, whatever a file is called: an EPS file, for one, would start another program."""
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"}
OTHER_SUFFIXES = {".psd", ".svg", ".dng", ".cr2", ".nef", ".arw", ".dcm", ".jp2", ".exr", ".zip", ".tar"}
"""Suffixes of files that may hold pictures and are not read."""
PLUGINS = {"HEIF": ("pillow_heif.HeifImagePlugin", ".heic", ".heif"), "JXL": ("pillow_jxl", ".jxl")}
PLUGIN_HINT = "pip install pillow-heif pillow-jxl-plugin to read heic and jxl"
for _format, (_module, *_suffixes) in PLUGINS.items():
    try:
        import_module(_module)  # registers the format with Pillow
        FORMATS.append(_format)
        IMAGE_SUFFIXES.update(_suffixes)
    except ImportError:
        OTHER_SUFFIXES.update(_suffixes)
CONTENTS = (
    (0, b"version https://git-lfs", "a Git LFS pointer; git lfs pull fetches the file"),
    (0, b"PK\3\4", "a zip archive; unpack it"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it"),
    (257, b"ustar", "a tar archive; unpack it"),
    (128, b"DICM", "a DICOM file; convert it to PNG or TIFF"),
    *((4, b"ftyp" + kind, f"a HEIC picture; {PLUGIN_HINT}") for kind in (b"heic", b"heix", b"mif1", b"msf1")),
    *((0, mark, f"a JPEG XL picture; {PLUGIN_HINT}") for mark in (b"\0\0\0\x0cJXL ", b"\xff\x0a")),
    *((0, mark, "a TIFF file of another kind; `space` Fields reads measurements") for mark in (b"II", b"MM")),
    (0, b"<", "text such as a web page"),
)
"""Files that are taken for pictures: the place of a mark, the mark, and what to do."""
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
"""A PNG may hold a long text, such as the settings of the program that made it; all texts have a limit together."""
TURNED = (5, 6, 7, 8)
"""Values of the orientation tag that exchange width and height; Pillow's size of a TIFF has them exchanged already."""
GREY_TOLERANCE = 3  # largest difference of the channels of a grey picture, as formats round them [levels of 256]
ANIMATED, MOST_FRAMES = ("GIF", "WEBP", "PNG", "AVIF"), 8
"""Formats of animations, and number of frames among which one is looked for that shows something."""
SUBFILE, SMALLER = 254, 1 | 4  # tag of a TIFF's page, and its bits for a smaller copy and for a mask
HAZE = slice(16, 240)  # alpha of partly transparent pixels
DEPTHS = (8, 10, 12, 14, 16)  # numbers of bits of the values in files of 16 bits

MIN_WIDTH, TEXT_LINES, TEXT_SIZE = 112, 3, 11
"""Least width of a picture with a text [px], lines of the text, and size of its letters [px]."""
Grid = NDArray[np.uint8]  # [h, w, c]
BAR_HEIGHT = 10  # height of the bar of a legend [px]


def open_picture(source: Path | IO[bytes]) -> Image.Image:
    """Open a picture without decoding it yet."""
    if isinstance(source, Path):
        open_regular(source).close()
    try:
        return Image.open(source, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise OSError(content_of(source) or str(error)) from error


def content_of(source: Path | IO[bytes]) -> str | None:
    """Describe the content of a file that is not a picture, with advice; None if it is unknown or cannot be read."""
    head = b" "
    with suppress(OSError), open_regular(source) if isinstance(source, Path) else source as file:
        file.seek(0)
        head = file.read(512)
    if isinstance(source, Path) and source.suffix.lower() == ".npz":
        return "a NumPy archive; save one of its arrays as NAME.npy"
    known = next((found for at, mark, found in CONTENTS if head.startswith(mark, at)), None)
    return known if head else "the file is empty"


def needed_bits(image: Image.Image) -> int | None:
    """Return the least number of bits of :data:`DEPTHS` for the values of an image of 16 bits; None for other images.

    Call before the image is decoded: Pillow keeps only the high bytes of colours, so that at least 8 bits are found.
    """
    is_deep = image.mode.startswith("I;16")
    if not is_deep and not any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())):
        return None
    colours = image if is_deep else image.convert("RGB")
    most = int(np.asarray(colours).max()) << (0 if is_deep else 8)
    return next(bits for bits in DEPTHS if most < 2**bits)


def to_8_bits(image: Image.Image, bits: int = 16) -> Image.Image:
    """Return an image of 8 bits a value: values of files of 16 bits are divided by the largest number of ``bits`` bits.

    Raises:
        ValueError: if the range of the values is not known, or Pillow has dropped most of their bits.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range; `space` Fields reads measurements")
    needed = needed_bits(image)
    if needed is None:
        return image
    bits = max(bits, needed)
    if not image.mode.startswith("I;16"):
        if bits < 16:
            raise ValueError(f"its colours have {bits} bits in a file of 16; save them with 8 bits, or pass `bits` 16")
        return image
    values = np.asarray(image).astype(np.uint32) * 255 // (2**bits - 1)
    grey = Image.fromarray(values.astype(np.uint8))
    grey.info |= image.info
    return grey


def over_white(image: Image.Image) -> Image.Image:
    """Return an image of any mode in RGB, its transparent parts over white."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def seek_visible(image: Image.Image) -> None:
    """Seek the first of some frames of an animation that has more than one colour: others show nothing yet.

    Call before the image is decoded. The first frame is kept if there is no such frame, or it cannot be read.
    """
    if image.format not in ANIMATED or not getattr(image, "is_animated", False):
        return
    with suppress(EOFError):  # there are no more frames
        for number in range(MOST_FRAMES):
            image.seek(number)
            if np.ptp(np.asarray(over_white(image)), axis=(0, 1)).any():
                return
    image.seek(0)


def decoded(image: Image.Image, side: int | None = None, bits: int = 16) -> Image.Image:
    """Return an image upright, with 8 bits a value, in the colours of sRGB; if it has transparency, in RGBA.

    Args:
        image: image of any mode and size, not decoded yet.
        side: side below which the image is not reduced while it is decoded [px]; None to decode all of it.
        bits: number of bits of the values in files of 16 bits.
    """
    if side is not None:
        image.draft("RGB", (side, side))  # JPEG then decodes at a fraction of its size; others ignore it
    seek_visible(image)
    declared = profile_of(image)
    image = to_8_bits(image, bits)
    with suppress(*BAD_EXIF):
        ImageOps.exif_transpose(image, in_place=True)
    image = to_srgb(image, declared)
    return image.convert("RGBA") if image.has_transparency_data else image


def is_grey(image: Image.Image) -> bool:
    """Return whether a decoded image has no colours, up to the rounding of its format."""
    if image.mode in ("1", "L", "LA"):
        return True
    red, green, blue = (np.asarray(over_white(image).getchannel(name), np.int16) for name in "RGB")
    most = max(int(np.abs(one - other).max()) for one, other in ((red, green), (green, blue), (red, blue)))
    return most <= GREY_TOLERANCE


def is_wholly_transparent(image: Image.Image) -> bool:
    """Return whether no pixel of a decoded image can be seen."""
    return image.mode == "RGBA" and image.getchannel("A").getextrema()[1] == 0


def is_hazy(image: Image.Image) -> bool:
    """Return whether most pixels of a decoded image are partly transparent, as if alpha had another meaning."""
    if image.mode != "RGBA":
        return False
    counts = image.getchannel("A").histogram()
    return 2 * sum(counts[HAZE]) > sum(counts)


def has_frames(image: Image.Image) -> bool:
    """Return whether the file of an image that is not decoded yet has further pages or frames of its size."""
    if image.format == "MPO" or not getattr(image, "is_animated", False):  # phones save a second one as MPO
        return False
    if image.format != "TIFF":
        return True
    with suppress(Exception):  # decoders raise exceptions of many types
        image.seek(1)
        is_smaller = bool(getattr(image, "tag_v2", {}).get(SUBFILE, 0) & SMALLER)
        image.seek(0)
        return not is_smaller
    return True


def framed(
    image: Image.Image, size: tuple[int, int], *, mode: str = "RGB", pad: bool = False, resize: str = "lanczos"
) -> Image.Image:
    """Return a decoded image in a mode, resized and cropped or padded to ``size``.

    Without alpha, transparent parts become white. With alpha, fully transparent pixels become white, so that a network
    learns no colours that nobody sees. Pillow resizes RGBA with premultiplied alpha, so these leave no halo.

    Args:
        image: result of :func:`decoded`.
        size: width and height [px].
        mode: ``RGB``, ``RGBA`` or ``L``.
        pad: show the whole image, padded with white, instead of cropping its centre.
        resize: name of Pillow's filter.
    """
    image = image.convert("RGBA") if mode == "RGBA" else over_white(image).convert(mode)
    how = Image.Resampling[resize.upper()]
    if pad:  # an odd margin is wider at the right and at the bottom
        white = {"L": 255, "RGB": (255, 255, 255), "RGBA": (255, 255, 255, 0)}[mode]
        image = ImageOps.pad(image, size, how, white, (0.49999, 0.49999))  # type: ignore[arg-type]
    else:
        image = ImageOps.fit(image, size, how)
    if mode != "RGBA":
        return image
    pixels = np.array(image)
    pixels[pixels[..., 3] == 0, :3] = 255
    return Image.fromarray(pixels)


def fit(image: Image.Image, size: tuple[int, int], *, mode: str = "RGB", pad: bool = False) -> Image.Image:
    """Return an image that is not decoded yet in a mode, resized and cropped or padded to ``size``."""
    return framed(decoded(image, 2 * max(size)), size, mode=mode, pad=pad)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height that an undecoded image has once its orientation is applied [px]."""
    turned = False
    with suppress(*BAD_EXIF):
        turned = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in TURNED
    return (image.height, image.width) if turned else image.size


@dataclass(frozen=True)
class Legend:
    """The meaning of the colours of rendered measurements."""

    colours: Tensor
    """Colours from the least value to the greatest, uint8 ``[n, 3]``."""
    least: str
    greatest: str
    name: str = ""


def to_grid(
    images: Tensor,
    columns: int | None = None,
    texts: Sequence[str] | None = None,
    legend: Legend | None = None,
    *,
    text_lines: int = TEXT_LINES,
) -> Grid:
    """Arrange uint8 images ``[n, c, h, w]`` side by side in one ``[H, W, c]``, by default nearly a square.

    Small images with texts of some lines below them are enlarged by a whole number. The legend is drawn below the grid.
    """
    from torchvision.utils import make_grid  # takes seconds to load

    if texts is not None:
        factor = -(-MIN_WIDTH // images.shape[-1])
        images = images.cpu().repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)
        strips = [text_picture(text, images.shape[-1], TEXT_SIZE, text_lines) for text in texts]
        images = torch.cat((images, torch.stack(strips)), dim=-2)
    columns = columns or max(1, round(len(images) ** 0.5))
    grid: Tensor = make_grid(images, nrow=columns, padding=2, pad_value=255).cpu()
    if legend is not None:
        grid = torch.nn.functional.pad(grid, (0, max(0, MIN_WIDTH - grid.shape[-1])), value=255)
        width = grid.shape[-1]
        places = torch.linspace(0, len(legend.colours) - 1, width).round().long()
        bar = legend.colours.cpu()[places].T[:, None].expand(-1, BAR_HEIGHT, -1)
        values = text_picture(f"{legend.least} to {legend.greatest} {legend.name}", width, TEXT_SIZE, 1)
        grid = torch.cat((grid, bar, values), dim=1)
    return grid.permute(1, 2, 0).numpy()


def encode_picture(pixels: Grid, suffix: str = ".png", **options: object) -> bytes:
    """Return the bytes of a file with ``pixels`` ``[h, w, c]``, RGB or RGBA, in the format of its suffix."""
    content = BytesIO()
    Image.fromarray(pixels).save(content, format=suffix[1:], **options)
    return content.getvalue()


def read_pixels(content: bytes) -> Grid:
    """Return the pixels ``[h, w, 3]`` of the file of an RGB picture."""
    return np.asarray(Image.open(BytesIO(content)))


def write_picture(path: Path, pixels: Grid, **options: object) -> Path:
    """Write ``pixels`` ``[h, w, c]``, RGB or RGBA, whole or not at all, in the format of its suffix."""
    with writing(path):
        write_output(path, encode_picture(pixels, path.suffix, **options), durable=False)
    return path


Line = Mapping[int, float] | Mapping[float, float]  # points of a curve: a mapping from x to y


@dataclass(frozen=True)
class Panel:
    """Named lines in one coordinate system."""

    lines: Mapping[str, Line]
    title: str
    x_label: str
    y_label: str
    log_y: bool = False


def draw_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Plot panels one below the other into the PNG file ``path``."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(8, 0.5 + 4 * len(panels)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        for name, points in panel.lines.items():
            axes.plot([*points], [*points.values()], label=name, marker="." if len(points) < 40 else None)
        if panel.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            low, high = axes.get_ylim()
            if high < 100 * low:  # else the labels would overlap
                axes.yaxis.set_minor_formatter("{x:g}")
        if len(panel.lines) > 1:
            axes.legend()
        axes.grid(alpha=0.3, which="both")
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_output(path, content.getvalue())


PACKET = """<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/" xmp:CreatorTool="rectified-flow-trainer"
 xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
 Iptc4xmpExt:DigitalSourceType="http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
 xmlns:flow="urn:rectified-flow-trainer:1" flow:Settings="SETTINGS"/>
</rdf:RDF></x:xmpmeta>
<?xpacket end="r"?>"""
"""The packet, in which ``SETTINGS`` is to be replaced; the exported page does so, too."""


@dataclass(frozen=True)
class Provenance:
    """The settings of a generated picture, under the names of the flags of sample.py; a grid has no number."""

    model: str
    """SHA-256 of the weights, as :func:`rectified_flow.save_pretrained` writes them."""
    seed: int
    steps: int
    number: Annotated[int, Interval(ge=0, le=10**8)] | None = None
    conditions: dict[str, str | None] = field(default_factory=dict)
    """Values as written; None is "none", and a condition that is missing was drawn."""
    solver: str | None = None
    time_grid: str = "uniform"
    guidance_scale: float = 1.0
    guidance: dict[str, float] = field(default_factory=dict)
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    autoguidance: float = 1.0
    mixed_precision: str = "no"
    from_picture: bool = False
    """Whether the sampling started from another picture, which is not recorded."""


def metadata_options(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments with which Pillow saves a generated picture; formats without XMP ignore them."""
    packet, chunks = PACKET.replace("SETTINGS", escape(json.dumps(settings))), PngImagePlugin.PngInfo()
    chunks.add_itxt("XML:com.adobe.xmp", packet)
    return {"pnginfo": chunks, "xmp": packet.encode()}


def read_provenance(path: Path) -> Provenance:
    """Return the settings of a generated picture."""
    with reading(path):
        packet = open_picture(path).info.get("xmp", b"")
    found = re.search(rb'flow:Settings="([^"]*)"', packet)
    if found is None:
        raise UsageError(f"`like` {path} does not say how it was generated: pass a picture of sample.py")
    return parse_document(unescape(found[1].decode(errors="replace")), Provenance, path)


class GeneratedPicture(Image.Image):
    """A picture that writes its settings into the files it is saved to."""

    provenance: Provenance

    @classmethod
    def mark(cls, image: Image.Image, provenance: Provenance) -> None:
        """Give an image its settings."""
        image.__class__, image.provenance = cls, provenance  # type: ignore[attr-defined]

    def save(self, fp: "StrOrBytesPath | IO[bytes]", format: str | None = None, **params: object) -> None:  # noqa: A002  Pillow's name
        """Save as Pillow does, with metadata."""
        super().save(fp, format, **metadata_options(asdict(self.provenance)) | params)
