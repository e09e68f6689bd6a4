"""Tests of the files of an exported page, of its check and of serving it."""

import hashlib
import json
import re
from pathlib import Path
from urllib.request import urlopen
from webbrowser import BackgroundBrowser, GenericBrowser

import pytest

from rectified_flow.data.description import PictureData
from rectified_flow.data.open import Pictures
from rectified_flow.errors import UsageError
from rectified_flow.export.call import NetworkCall
from rectified_flow.export.web_page import check_page, newest_samples, page, page_sources
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.load import model_hash, read_trained
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.checkpoint import CONFIG_FILE, FLOW_FILE
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.extension.own_adapter import Adapted
from tests.patience import PATIENCE
from tests.programs import call, stand_in
from tests.tiny_flows import unet_with, write


def export_page(folder: Path, *flags: str) -> None:
    """Export a page with a placeholder program, since the page and its upload do not depend on the program."""
    write(RectifiedFlow(unet_with(), space=Pixels((3, 8, 8))), folder)
    with stand_in():
        call("export.py", "--checkpoint", folder, "--format", "page", *flags)


def test_a_page_needs_a_control_for_each_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    network = unet_with(text=Caption(BagOfWords(("red",)), 1, 0, ("red",)))
    call = NetworkCall(RectifiedFlow(network, space=Pixels((3, 8, 8))))
    check_page(call)
    monkeypatch.setattr(BagOfWords, "exported", lambda _encoder: None)
    with pytest.raises(UsageError, match="a page has no control for the condition text: choose the format onnx"):
        check_page(call)


def test_a_page_has_the_pinned_packages_unpacked_and_their_licences() -> None:
    files = page_sources()
    for folder, package, licence, notices in (
        ("ort", "onnxruntime-web", "MIT License", ["ThirdPartyNotices.txt"]),
        ("tokenizers", "@huggingface/tokenizers", "Apache License", []),
    ):
        unpacked = {Path(name).name: content for name, content in files.items() if name.startswith(f"{folder}/")}
        version, *pinned = unpacked["VERSION"].decode().splitlines()
        hashes = {name: digest for digest, name in (line.split() for line in pinned)}
        assert version.startswith(f"{package} ")
        assert unpacked.keys() == {"LICENSE", "VERSION", *notices, *hashes}
        for name, digest in hashes.items():
            assert hashlib.sha256(unpacked[name]).hexdigest() == digest
        assert licence in unpacked["LICENSE"].decode()
    assert len(files["ort/ThirdPartyNotices.txt"]) > 300_000


def test_servers_know_the_type_of_every_module_of_a_page() -> None:
    """Stock nginx sends .mjs as application/octet-stream, which browsers refuse as a module."""
    files = page_sources()
    assert not [name for name in files if name.endswith(".mjs")]
    for name, content in files.items():
        imports = re.findall(rb"""(?:from |import\(?|src=|module: )"(\./[^"]+|[\w-]+\.js)\"""", content)
        folder = Path(name).parent if name.count("/") == 0 else Path()
        assert {str(folder / each.decode().removeprefix("./")) for each in imports} <= files.keys(), name


def test_the_newest_samples_are_the_thumbnail_of_a_page(tmp_path: Path) -> None:
    assert newest_samples(tmp_path) is None
    assert b"og:title" in page_sources()["index.html"]
    assert b"thumbnail" not in page_sources()["index.html"]
    (tmp_path / "samples").mkdir()
    for step in (900, 1000):
        (tmp_path / f"samples/step_{step:08d}.png").write_text(f"samples of step {step}")
    files = page_sources(newest_samples(tmp_path))
    assert files["thumbnail.png"] == b"samples of step 1000"
    assert b'<meta property="og:image" content="thumbnail.png">' in files["index.html"]


def test_an_export_shows_its_progress_and_a_page_has_a_version(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    export_page(tmp_path)
    said = capfd.readouterr().err
    assert "converting the flow" in said
    exported = tmp_path / "exported"
    assert (exported / "offline.js").read_text().startswith('const VERSION = "')
    sizes = json.loads((exported / "model.json").read_text())["sizes"]
    assert {"model.onnx", "ort/ort-wasm-simd-threaded.wasm"} < sizes.keys()
    assert all((exported / name).stat().st_size == size for name, size in sizes.items())


def test_a_page_is_not_mixed_with_an_export_in_another_format(tmp_path: Path) -> None:
    """Its service worker would keep the weights of the page for returning visitors."""
    with stand_in():
        write(RectifiedFlow(unet_with(), space=Pixels((3, 8, 8))), tmp_path)
        flags = ("export.py", "--checkpoint", tmp_path, "--format")
        call(*flags, "onnx")
        assert "hash" not in json.loads((tmp_path / "exported/model.json").read_text())
        call(*flags, "page")
        described = (tmp_path / "exported/model.json").read_text()
        assert "hash" in json.loads(described)
        with pytest.raises(UsageError, match=f"--output_dir {tmp_path}/exported holds an exported page"):
            call(*flags, "onnx")
        assert (tmp_path / "exported/model.json").read_text() == described
        call(*flags, "onnx", "--output_dir", tmp_path / "program")
        call(*flags, "page")
        (tmp_path / "exported/index.html").unlink()
        call(*flags, "onnx")
        assert not (tmp_path / "exported/index.html").exists()


@pytest.mark.parametrize("format_", ["page", "onnx"])
def test_the_description_has_the_framing_of_the_training(format_: str, tmp_path: Path) -> None:
    flow = RectifiedFlow(unet_with(), space=Pixels((3, 8, 8)))
    data = PictureData(Pictures("synthetic-flowers", image_size=8, crop="none", resize="nearest"))
    documents = {FLOW_FILE: describe(flow), CONFIG_FILE: {"data": describe(data), "training": {"seed": 0}}}
    checkpoint.save(tmp_path / "checkpoints", 1, {checkpoint.MODEL_FILE: flow.network.state_dict()}, documents)
    with stand_in():
        call("export.py", "--checkpoint", tmp_path, "--format", format_)
    described = json.loads((tmp_path / "exported/model.json").read_text())
    assert described["framing"] == {"pad": True, "resize": "nearest"}


def test_the_hash_is_that_of_samples_also_with_frozen_weights(tmp_path: Path) -> None:
    """Weights that the network itself loads are not hashed; a page needs no gradients and freezes the others."""
    trained = read_trained(write(RectifiedFlow(Adapted(8), space=Pixels((3, 8, 8))), tmp_path))
    before = model_hash(trained.flow)
    assert json.loads(page(trained).finish({})["model.json"])["hash"] == before


@pytest.mark.parametrize(("kind", "is_opened"), [(BackgroundBrowser, True), (GenericBrowser, False), (None, False)])
def test_the_page_is_served_and_opened_in_a_window(
    kind: type[BackgroundBrowser] | None,
    is_opened: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A browser in the terminal would occupy the program; the page is served before any browser asks for it."""
    contents: list[bytes] = []

    def open_page(_browser: BackgroundBrowser, address: str) -> None:
        contents.append(urlopen(f"{address}model.json", timeout=PATIENCE).read())

    monkeypatch.setattr("webbrowser.BackgroundBrowser.open", open_page)
    monkeypatch.setattr("webbrowser._tryorder", ["own"] if kind else [])
    monkeypatch.setattr("webbrowser._browsers", {"own": [None, kind("own")]} if kind else {})
    monkeypatch.setattr("signal.pause", lambda: None)
    export_page(tmp_path, "--open")
    assert contents == [(tmp_path / "exported/model.json").read_bytes()] * is_opened
    assert "/ until Ctrl-C" in capsys.readouterr().out
