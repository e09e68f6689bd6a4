"""Pictures of packages whose licences permit publishing weights made from them, with their authors.

The sources are read from packages that are unpacked into one folder:

    apt-get download endless-sky-data gcompris-qt-data ukui-wallpapers openclipart-png gnome-backgrounds \
        mate-backgrounds plasma-workspace-wallpapers 0ad-data && for each in *.deb; do dpkg -x $each packages; done

The packages above are from Debian 12, the following ones from Debian sid (November 2026), unpacked into a subfolder:

    apt-get download budgie-backgrounds redeclipse-data supertuxkart-data ukui-wallpapers \
        && for each in *.deb; do dpkg -x $each packages/sid; done
    for each in packages/sid/usr/share/backgrounds/budgie/*.jxl; do djxl $each ${each%.jxl}.png; done

One package is from PyPI, and is unpacked into packages/pypi/scikit-image:

    pip download scikit-image==0.16.2 --no-deps --only-binary=:all: --python-version 3.7 --abi cp37m \
        --platform manylinux1_x86_64 && unzip scikit_image-*.whl -d packages/pypi/scikit-image
"""

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Literal

import datasets
from PIL import Image

from studies.autoencoder_data import draw

Kind = Literal["photograph", "drawing", "emoji", "render"]
KINDS: tuple[Kind, ...] = ("photograph", "drawing", "emoji", "render")
FREE = re.compile(
    r"(public-domain|CC0(-1\.0)?|CC-BY(-SA)?-\d\.\d\+?|Expat|MIT|zlib)( and (CC0-1\.0|CC-BY-\d\.\d))*", re.IGNORECASE
)
"""Licences whose pictures are used: no GPL, no GFDL, no terms against commercial use or changes."""
UNSURE = "unsplash"
"""Pictures that came from there are left out: its licence changed in June 2017, and their dates are not recorded."""
DRAWN = 5_000
SPRITES = 6
"""One in so many of the asteroids of endless-sky is used: they are frames of rotations."""
LEAST = 128
"""Smaller textures of games are left out [px]."""
MAPS = re.compile(r"norm|spec|(^|[/_])ao([/_.]|$)|_n\.|grid|blend", re.IGNORECASE)
"""Textures of 0ad that are no pictures."""
WALLS = re.compile(
    r"wicked/(?!.*(crystal|cloudlayer|glass|barrel)).*([^nsz]|highqualitybrick)\.jpg"
    r"|jojo/(grass|sand|snow|redrock|debris)\d\d\.png"
    r"|dziq/\w+(?<!_[bns])\.jpg"
    r"|trak/trak4/(brick|concrete|plaster|rust|tile)\d[^_]*\.jpg"
)
"""Textures of Red Eclipse that show stone, earth, wood or walls, without the maps that go with them."""
DRAWN_TEXTURES = re.compile(
    r"_nm|glossy|normals|alpha|screenshot|sshot|ibl|sky|[Pp]ainting|sign|_tree|palmtree|sakura|lantern|konqi|stkBook|cow|antlers|egypt"
    r"|astro_turf|backeffect|back-text|startFlag|cottage|city_asphalt|curbs|stadium|house|cannonBall|postTooth|xx-61"
    r"|abyss|stk_enterprise|intro|fortmagma/(roof|track)|ravenbridge|black_forest/(s1|door|mossy|roadto|stktex|\w*Towel)|/garagedoor"
)
"""Textures of SuperTuxKart that are drawn, maps of normals and the like, or parts of one object."""
UKUI = re.compile(
    r"2004default|calla|city|desert|firstgeneration|fluent-color|focal-ubuntukylin|goldfish|rhythm|rollpaper|string"
    r"|the-mouse"
)
"""Wallpapers of UKUI that are drawn. Other packages have theirs in the same folder."""
BUDGIE = re.compile(r"(?!.*midnight|ocean-waves).*")
"""Wallpapers of Budgie that are photographs."""
KYLIN = re.compile(
    r"bluebird|bridgecity2?|flamingos|horse|house|look|mountain(2|-range)?|sea|sky|snowy-mountains|still-life|sunf"
)
"""Wallpapers of UKUI that are photographs; version 20.04.4 brought them."""


SAMPLES = (
    ("astronaut.png", "NASA", "public-domain"),
    ("hubble_deep_field.jpg", "NASA", "public-domain"),
    ("rocket.jpg", "SpaceX", "public-domain"),
    ("chelsea.png", "Stefan van der Walt", "CC0-1.0"),
    ("coffee.png", "Rachel Michetti", "CC0-1.0"),
    ("brick.png", "CC0Textures", "CC0-1.0"),
    ("gravel.png", "CC0Textures", "CC0-1.0"),
    ("grass.png", "linolafett", "CC0-1.0"),
)
"""Photographs of scikit-image, with their authors and licences as skimage/data/__init__.py states them."""


@dataclass(frozen=True)
class Picture:
    """A picture, and what must be said about it."""

    name: str
    authors: str
    licence: str
    content: Path | bytes | int
    """Its file, its bytes, or the seed of a picture drawn by program."""
    is_opaque: bool = False
    """Whether its alpha channel is something other than opacity."""

    def open(self) -> Image.Image:
        """Return the picture as RGB, or as RGBA if it has transparent parts."""
        if isinstance(self.content, int):
            import numpy as np

            return draw(np.random.default_rng(self.content))
        image = Image.open(io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content)
        return image.convert("RGBA" if image.has_transparency_data and not self.is_opaque else "RGB")


@dataclass(frozen=True)
class Terms:
    """A paragraph of a Debian copyright file: patterns of files, their authors and their licence."""

    files: re.Pattern[str]
    authors: str
    licence: str
    text: str

    @property
    def is_free(self) -> bool:
        """Whether pictures under these terms are used."""
        return FREE.fullmatch(self.licence) is not None and UNSURE not in self.text.lower()


def read_terms(copyright_file: Path) -> list[Terms]:
    """Return the paragraphs on files of a machine-readable copyright file (Debian's format 1.0), in their order.

    Patterns match pictures of any format, because packages convert pictures to other formats.
    """
    found = []
    for block in re.split(r"\n[ \t]*\n", copyright_file.read_text()):
        fields = dict[str, str]()
        name = ""
        for line in block.splitlines():
            text = line
            if line[:1] not in " \t":
                name, _, text = line.partition(":")
            fields[name] = f"{fields.get(name, '')}\n{text.strip()}".strip()
        if "Files" in fields:
            patterns = [without_format(each) for each in fields["Files"].split()]
            people = without_addresses("; ".join(fields["Copyright"].splitlines()))
            licence = fields["License"].splitlines()[0]
            found.append(Terms(re.compile("|".join(map(translate, patterns))), people, licence, block))
    return found


def without_addresses(authors: str) -> str:
    """Return names of authors without their e-mail addresses, unless there is nothing else."""
    return re.sub(r"\s*[<(]\S+@\S+[>)]", "", authors) or authors


def without_format(name: str) -> str:
    """Return a name, or a pattern of names, without the format of a picture."""
    return re.sub(r"\.(png|jpe?g|webp)$", ".picture", name)


def terms_of(name: str, terms: list[Terms]) -> Terms | None:
    """Return the terms of a file, the last ones that match its name, if they are free."""
    matching = [each for each in terms if each.files.match(without_format(name))]
    return matching[-1] if matching and matching[-1].is_free else None


def read_resources(file: Path) -> Iterator[tuple[str, bytes]]:
    """Return the names and contents of a resource file of Qt (format of ``rcc --binary``, versions 1 to 3)."""
    data = file.read_bytes()
    magic, version, tree, contents, names = struct.unpack_from(">4sIIII", data)
    if magic != b"qres":
        raise ValueError(f"{file} is not a resource file of Qt")
    size = 14 if version == 1 else 22
    folder, compressed = 2, 1

    def walk(number: int, path: str) -> Iterator[tuple[str, bytes]]:
        at = tree + size * number
        name, flags = struct.unpack_from(">IH", data, at)
        length = struct.unpack_from(">H", data, names + name)[0] if number else 0  # the root has no name
        letters = data[names + name + 6 : names + name + 6 + 2 * length].decode("utf-16-be")
        path = f"{path}/{letters}" if number else ""
        if flags & folder:
            count, first = struct.unpack_from(">II", data, at + 6)
            for child in range(first, first + count):
                yield from walk(child, path)
            return
        start = contents + struct.unpack_from(">I", data, at + 10)[0]
        content = data[start + 4 : start + 4 + struct.unpack_from(">I", data, start)[0]]
        if flags == compressed:
            content = zlib.decompress(content[4:])
        if flags in (0, compressed):
            yield path, content

    return walk(0, "")


def endless_sky(packages: Path, folders: tuple[str, ...]) -> list[Picture]:
    """Return free pictures of folders of endless-sky."""
    root = packages / "usr/share/games/endless-sky"
    terms = read_terms(packages / "usr/share/doc/endless-sky-data/copyright")
    files = sorted(each for folder in folders for each in (root / "images" / folder).rglob("*.[jp][pn]g"))
    found = []
    for number, file in enumerate(files):
        name = str(file.relative_to(root))
        known = terms_of(name, terms)
        if known and ("asteroid" not in name or number % SPRITES == 0):
            found.append(Picture(name, known.authors, known.licence, file))
    return found


def gcompris(packages: Path, activities: tuple[str, ...]) -> list[Picture]:
    """Return free pictures of activities of gcompris."""
    terms = read_terms(packages / "usr/share/doc/gcompris-qt-data/copyright")
    found = []
    for activity in activities:
        for path, content in read_resources(packages / f"usr/share/gcompris-qt/rcc/{activity}.rcc"):
            name = path.removeprefix("/gcompris/")
            known = terms_of(name, terms)
            is_picture = content[:4] in (b"RIFF", b"\x89PNG") or content[:3] == b"\xff\xd8\xff"
            if known and is_picture and not name.endswith(".wav"):
                found.append(Picture(name, known.authors, known.licence, content))
    return found


def plasma(packages: Path) -> list[Picture]:
    """Return the wallpapers of Plasma whose metadata name the licence CC-BY-SA-4.0."""
    found = []
    for about in sorted(packages.glob("usr/share/wallpapers/*/metadata.*")):
        text = about.read_text()
        if "CC-BY-SA-4.0" in text:
            pattern = r'"Name": "([^"]+)"' if about.suffix == ".json" else r"Author=(.+)"
            author = re.findall(pattern, text)[0]
            files = sorted(about.parent.glob("contents/images*/*"))
            found += [Picture(f"{about.parent.name}/{each.name}", author, "CC-BY-SA-4.0", each) for each in files]
    return found


def files_of(packages: Path, pattern: str, authors: str, licence: str, least: int = 0) -> list[Picture]:
    """Return the files of a pattern with more than ``least`` bytes, which all have the same terms."""
    files = sorted(each for each in (packages / "usr/share").glob(pattern) if each.stat().st_size > least)
    return [Picture(each.name, authors, licence, each) for each in files if each.is_file()]


def zero_ad(packages: Path, folder: str, is_opaque: bool) -> list[Picture]:
    """Return the textures of a folder of 0ad, without small ones and maps of normals and the like."""
    archive = zipfile.ZipFile(packages / "usr/share/games/0ad/mods/public/public.zip")
    found = []
    for name in sorted(archive.namelist()):
        if name.startswith(f"art/textures/{folder}/") and name.endswith(".dds") and not MAPS.search(name):
            content = archive.read(name)
            if min(struct.unpack_from("<II", content, 12)) >= LEAST:  # height and width
                found.append(Picture(name, "Wildfire Games", "CC-BY-SA-3.0", content, is_opaque))
    return found


def textures(packages: Path, game: str, pattern: str, wanted: Callable[[str], bool]) -> list[Picture]:
    """Return the distinct textures of a game with free licences and wanted names under ``data``."""
    root = packages / "usr/share/games" / game
    terms = read_terms(packages / f"usr/share/doc/{game}-data/copyright")
    found = dict[bytes, Picture]()
    for file in sorted((root / "data").glob(pattern)):
        name = str(file.relative_to(root))
        known = terms_of(name, terms)
        is_wanted = known and "??" not in known.authors and wanted(name.removeprefix("data/"))
        if known and is_wanted and min(Image.open(file).size) >= LEAST:
            found.setdefault(file.read_bytes(), Picture(name, known.authors, known.licence, file, is_opaque=True))
    return list(found.values())


def wallpapers_of(packages: Path, pattern: str, authors: str, licence: str, names: re.Pattern[str]) -> list[Picture]:
    """Return the wallpapers of a pattern that have certain names, which all have the same terms."""
    found = files_of(packages, pattern, authors, licence)
    return [each for each in found if names.fullmatch(Path(each.name).stem)]


def samples(packages: Path) -> list[Picture]:
    """Return the photographs of scikit-image whose licences its functions state."""
    folder = packages / "pypi/scikit-image/skimage/data"
    return [Picture(name, authors, licence, folder / name) for name, authors, licence in SAMPLES]


def emoji_of(folder: Path) -> list[Picture]:
    """Return the pictures of Fluent Emoji, a dataset in the layout of the hub."""
    rows = datasets.load_dataset(str(folder), split="train").cast_column("image", datasets.Image(decode=False))
    return [Picture(f"{number}.png", "Microsoft", "MIT", row["bytes"]) for number, row in enumerate(rows["image"])]


def renders_of(folder: Path) -> list[Picture]:
    """Return the pictures that starter_renders.py has made so far."""
    failed = {f"{json.loads(line)['object']:06d}" for line in lines_of(folder) if json.loads(line).get("error")}
    files = sorted(each for each in folder.glob("??????-?.png") if each.name[:6] not in failed)
    return [Picture(each.name, "this project", "none", each) for each in files]


def lines_of(folder: Path) -> list[str]:
    """Return the lines on the objects of a folder of renders."""
    file = folder / "objects.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def open_sources(packages: Path, emoji: Path, renders: Path) -> Mapping[str, Callable[[], list[Picture]]]:
    """Return functions that list the pictures of each source."""
    gnome = ("Jakub Steiner", "CC-BY-SA-3.0")
    sid = packages / "sid"
    return {
        "openclipart": lambda: files_of(
            packages, "openclipart/png/**/*.png", "named in the package beside each file", "public-domain"
        ),
        "emoji": lambda: emoji_of(emoji),
        "drawn": lambda: [Picture(str(seed), "this project", "none", seed) for seed in range(DRAWN)],
        "plasma": lambda: plasma(packages),
        "gnome": lambda: files_of(packages, "backgrounds/gnome/*.webp", *gnome, least=1000),
        "mate": lambda: files_of(packages, "backgrounds/mate/desktop/Ubuntu-Mate-*", "Goce Mitevski", "CC-BY-SA-4.0"),
        "land": lambda: endless_sky(packages, ("land", "scene")),
        "things": lambda: gcompris(packages, ("categorization", "explore_world_animals")),
        "words": lambda: gcompris(packages, ("lang",)),
        "ukui": lambda: wallpapers_of(
            packages, "backgrounds/*.[jp][pn]g", "Ubuntu Kylin community", "CC-BY-SA-3.0", UKUI
        ),
        "sprites": lambda: endless_sky(packages, ("ship", "outfit", "planet", "asteroid")),
        "terrain": lambda: zero_ad(packages, "terrain/types", is_opaque=True),
        "skies": lambda: zero_ad(packages, "skies", is_opaque=True),
        "plants": lambda: zero_ad(packages, "skins/gaia", is_opaque=False),
        "walls": lambda: textures(sid, "redeclipse", "**/*.[jp][pn]g", lambda name: WALLS.fullmatch(name) is not None),
        "tracks": lambda: textures(
            sid, "supertuxkart", "[lt]*/**/*.jpg", lambda name: DRAWN_TEXTURES.search(name) is None
        ),
        "budgie": lambda: wallpapers_of(
            sid, "backgrounds/budgie/*.png", "Budgie Desktop Developers", "CC0-1.0", BUDGIE
        ),
        "kylin": lambda: wallpapers_of(sid, "backgrounds/*.jpg", "Ubuntu Kylin community", "CC-BY-SA-3.0", KYLIN),
        "samples": lambda: samples(packages),
        "renders": lambda: renders_of(renders),
    }
