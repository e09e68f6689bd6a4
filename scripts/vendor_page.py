"""Fetch the pinned packages that an exported page runs from npm into rectified_flow/export/page, packed with xz.

An exported page needs them without a network, so they are part of the package. For another version change its entry in
PACKAGES and run this. Then replace ort/LICENSE and ort/ThirdPartyNotices.txt.xz by those of the same version of ONNX
Runtime, which its archive does not have.
"""

import argparse
import hashlib
import io
import lzma
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

REGISTRY = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org")  # as npm has it
PAGE = Path(__file__).resolve().parent.parent / "rectified_flow/export/page"


@dataclass(frozen=True)
class Package:
    """A package of npm, its pinned archive, and the files that a page loads from it."""

    name: str
    version: str
    sha256: str
    folder: str
    """Folder in the page."""
    files: tuple[str, ...]
    """Paths in the archive."""
    licences: tuple[str, ...] = ()
    """Paths of the licences in the archive, which are not packed."""


PACKAGES = (
    Package(
        "onnxruntime-web",
        "1.30.0",
        "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71",
        "ort",
        (
            "dist/ort.wasm.bundle.min.mjs",
            "dist/ort.webgpu.bundle.min.mjs",
            "dist/ort-wasm-simd-threaded.wasm",
            "dist/ort-wasm-simd-threaded.asyncify.wasm",
        ),
    ),
    Package(
        "@huggingface/tokenizers",
        "0.2.0",
        "2800014c83b8186b2e4210c20672f1fb65a12cef85d7e95e0f2003e022611b4a",
        "tokenizers",
        ("dist/tokenizers.min.mjs",),
        ("LICENSE",),
    ),
)


def main() -> None:
    """Replace the packed files, and each VERSION, which has the SHA-256 of each file as it is unpacked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", default=REGISTRY, help="npm registry to fetch from")
    registry = parser.parse_args().registry
    for package in PACKAGES:
        folder = PAGE / package.folder
        folder.mkdir(exist_ok=True)
        contents = unpack(package, fetch(package, registry))
        said = [f"{package.name} {package.version}"]
        for name in package.files:
            content = contents[name]
            if name.endswith(".mjs"):  # source maps are not vendored
                content = content.partition(b"//# sourceMappingURL=")[0]
            served = Path(name).name.replace(".mjs", ".js")  # stock nginx knows no .mjs, and browsers refuse its type
            (folder / f"{served}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
            said.append(f"{hashlib.sha256(content).hexdigest()}  {served}")
        for name in package.licences:
            (folder / Path(name).name).write_bytes(contents[name])
        (folder / "VERSION").write_text("\n".join(said) + "\n")


def fetch(package: Package, registry: str) -> bytes:
    """Download the archive of the pinned version.

    Raises:
        SystemExit: if its hash is not the pinned one.
    """
    archive_name = f"{package.name.rpartition('/')[2]}-{package.version}.tgz"
    with urlopen(f"{registry.rstrip('/')}/{package.name}/-/{archive_name}", timeout=300) as response:
        archive: bytes = response.read()
    found = hashlib.sha256(archive).hexdigest()
    if found != package.sha256:
        raise SystemExit(f"{archive_name} has the SHA-256 {found}, and not {package.sha256}")
    return archive


def unpack(package: Package, archive: bytes) -> dict[str, bytes]:
    """Return the files of a package by their paths in the archive."""
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        for name in (*package.files, *package.licences):
            member = packed.extractfile(f"package/{name}")
            assert member is not None, name
            contents[name] = member.read()
    return contents


if __name__ == "__main__":
    main()
