"""The metadata of a generated picture: that a model generated the picture, and the settings to generate it again.

Both are an XMP packet, which PNG, WebP and JPEG files carry: the IPTC property ``DigitalSourceType`` with the value
``trainedAlgorithmicMedia``, and the settings as JSON.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape, unescape
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from rectified_flow.errors import UsageError, first_line
from rectified_flow.system.files import parse_document
from rectified_flow.system.pictures import open_picture

PNG_KEYWORD = "XML:com.adobe.xmp"
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
    number: int | None = None
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


def packet_of(settings: Mapping[str, Any]) -> bytes:
    """Return the XMP packet of a generated picture."""
    return PACKET.replace("SETTINGS", escape(json.dumps(settings))).encode()


def metadata_options(picture_format: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which Pillow saves a generated picture; formats without XMP have none."""
    if picture_format == "PNG":
        chunks = PngImagePlugin.PngInfo()
        chunks.add_itxt(PNG_KEYWORD, packet_of(settings).decode())
        return {"pnginfo": chunks}
    return {"xmp": packet_of(settings)} if picture_format in ("WEBP", "JPEG") else {}


def read_provenance(path: Path) -> Provenance:
    """Return the settings of a generated picture.

    Raises:
        UsageError: if the file has none.
    """
    try:
        packet = open_picture(path).info.get("xmp", b"")
    except Exception as error:  # every decoder fails in its own way
        raise UsageError(f"--like {path} cannot be read ({first_line(error)}): pass a generated picture") from error
    found = re.search(rb'flow:Settings="([^"]*)"', packet)
    if found is None:
        raise UsageError(f"--like {path} does not say how it was generated: pass a picture of sample.py")
    return parse_document(unescape(found[1].decode(errors="replace")), Provenance, path)


class GeneratedPicture(Image.Image):
    """A picture that writes its settings into the files it is saved to."""

    provenance: Provenance

    @classmethod
    def of(cls, image: Image.Image, provenance: Provenance) -> "GeneratedPicture":
        """Return ``image`` with its settings."""
        image.__class__ = cls
        assert isinstance(image, cls)  # for mypy
        image.provenance = provenance
        return image

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:  # noqa: A002  Pillow's name
        """Save as Pillow does, with metadata."""
        suffix = Path(getattr(fp, "name", fp) if format is None else "").suffix.lower()
        kind = format.upper() if format else Image.registered_extensions().get(suffix, "")
        super().save(fp, format, **metadata_options(kind, asdict(self.provenance)) | params)
