"""Fetch the pinned onnxruntime-web from npm into rectified_flow/page/ort, packed with xz.

An exported page needs it without a network, so it is part of the package. For another version change VERSION and
ARCHIVE_SHA256, run this, and replace LICENSE and ThirdPartyNotices.txt.xz by those of the same version of ONNX Runtime.
"""

import argparse
import hashlib
import io
import lzma
import os
import tarfile
from pathlib import Path
from urllib.request import urlopen

VERSION = "1.30.0"
ARCHIVE_SHA256 = "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71"
RUNTIMES = ("ort.wasm.bundle.min.mjs", "ort.webgpu.bundle.min.mjs")
PROGRAMS = ("ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.asyncify.wasm")
REGISTRY = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org")  # as npm has it
FOLDER = Path(__file__).resolve().parent.parent / "rectified_flow/page/ort"


def main() -> None:
    """Replace the packed files, and VERSION, which has the SHA-256 of each file as it is unpacked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", default=REGISTRY, help="npm registry to fetch from")
    archive = fetch(parser.parse_args().registry)
    said = [f"onnxruntime-web {VERSION}"]
    for name, content in unpack(archive).items():
        (FOLDER / f"{name}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        said.append(f"{hashlib.sha256(content).hexdigest()}  {name}")
    (FOLDER / "VERSION").write_text("\n".join(said) + "\n")


def fetch(registry: str) -> bytes:
    """Download the archive of the pinned version.

    Raises:
        SystemExit: if its hash is not the pinned one.
    """
    with urlopen(f"{registry.rstrip('/')}/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz", timeout=300) as response:
        archive: bytes = response.read()
    found = hashlib.sha256(archive).hexdigest()
    if found != ARCHIVE_SHA256:
        raise SystemExit(f"onnxruntime-web {VERSION} has the SHA-256 {found}, and not {ARCHIVE_SHA256}")
    return archive


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the files that a page loads. Modules lose the addresses of source maps, which are not vendored."""
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for name in (*RUNTIMES, *PROGRAMS):
            member = package.extractfile(f"package/dist/{name}")
            assert member is not None, name
            content = member.read()
            contents[name] = content.partition(b"//# sourceMappingURL=")[0] if name in RUNTIMES else content
    return contents


if __name__ == "__main__":
    main()
