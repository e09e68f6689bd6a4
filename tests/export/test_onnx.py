"""Tests of the format onnx: the exported program returns what the flow returns."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rectified_flow.condition import LARGEST, AugmentationLabels, Labels, Number, Picture, with_map
from rectified_flow.errors import RunError, UsageError
from rectified_flow.export import onnx
from rectified_flow.export.call import MODEL_FILE
from rectified_flow.export.onnx import load_program
from rectified_flow.exportable import Exportable
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.latents.space import Latents
from rectified_flow.load import model_hash
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.artifact import OUTPUTS_MANIFEST
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.extension.own_autoencoder import Haar
from tests.programs import call
from tests.text.tiny_encoder import tiny_encoder
from tests.tiny_flows import FLOWS, Additive, unet_with, write

ROOT = Path(__file__).resolve().parents[2]

X_AND_T = {"x": {"type": "float32", "shape": ["b", 3, 8, 8]}, "t": {"type": "float32", "shape": ["b"]}}


def written(
    flow: Flow, folder: Path, *flags: str, degrade: str | None = None
) -> tuple[Callable[..., Tensor], dict[str, object]]:
    """The program that export.py writes of ``flow``, and its description."""
    write(flow, folder, degrade=degrade)
    call("export.py", "--checkpoint", folder, *flags)
    content = (folder / "exported" / MODEL_FILE).read_bytes()
    for path in (ROOT, sys.prefix):
        assert str(path).encode() not in content, "a path of this machine"
    loaded = load_program(content)
    return lambda **inputs: loaded(inputs)[0], json.loads((folder / "exported/model.json").read_text())


def test_latents_have_a_decoder_beside_the_network(tmp_path: Path) -> None:
    space = Latents(Haar(1), 8, mean=[0.5] * 12, std=[2.0] * 12)
    flow = RectifiedFlow(Additive({}, channels=12), space=space)
    _, description = written(flow, tmp_path, "--format", "page")
    assert description["hash"] == model_hash(flow), "which a download of the page names"
    assert description["decoder"] == {"file": "decoder.onnx", "shape": [3, 8, 8]}
    decode = load_program((tmp_path / "exported/decoder.onnx").read_bytes())
    x = torch.randn(3, 12, 4, 4)
    [pictures] = decode({"x": x})
    assert torch.allclose(pictures.add(1).div(2).clamp(0, 1), space.decode(x), atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_a_rectified_flow_with_labels_as_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program returns the velocity of a network that predicts the clean picture, also near the data."""
    network = unet_with(labels=Labels(2, ("cat", "dog")), attention_sides=(8,))
    flow = RectifiedFlow(network, prediction="clean", space=Pixels((3, 8, 8)))
    run, said = written(flow, tmp_path)
    x, t = torch.randn(5, 3, 8, 8), torch.tensor([1.0, 0.7, 0.3, 0.04, 0.01])
    labels = torch.tensor([0, 1, 2, 1, 0])
    expected = flow.eval().exact_velocity(x, t, labels=labels)
    assert (run(x=x, t=t, labels=labels) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert said["inputs"] == {**X_AND_T, "labels": {"type": "int64", "shape": ["b"]}}
    assert (said["kind"], said["steps"], said["solver"], said["time_grid"]) == ("rectified", 16, "ab2", "uniform")
    assert (said["channels"], said["range"], said["output"], said["source"]) == (3, [-1, 1], "velocity", None)
    assert "difference at most" in capsys.readouterr().out


@torch.no_grad()
@pytest.mark.slow
def test_a_map_in_half_as_onnx(tmp_path: Path) -> None:
    flow = FLOWS["mean"]()
    assert isinstance(flow, FlowMap)
    run, said = written(flow, tmp_path, "--half")
    whole = sum(parameter.nbytes for parameter in flow.parameters())
    file = tmp_path / "exported/model.onnx"
    stored = sum(2 * p.numel() if p.ndim > 1 else 4 * p.numel() for p in flow.parameters())
    assert stored < 0.6 * whole
    assert file.stat().st_size < stored + 100_000
    x, t, r, labels = torch.randn(4, 3, 8, 8), torch.ones(4), torch.rand(4), torch.tensor([0, 1, 2, 1])
    expected = flow.eval().average_velocity(x, t, r, labels=labels)
    difference = (run(x=x, t=t, r=r, labels=labels) - expected).abs().max() / expected.abs().max()
    assert 1e-6 < difference < 2e-2
    assert (said["kind"], said["output"]) == ("map", "average velocity")
    assert (said["steps"], said["solver"], said["time_grid"]) == (1, None, "uniform")


@torch.no_grad()
def test_a_source_as_a_condition_beside_labels(tmp_path: Path) -> None:
    """The source has two inputs without NaN: pixels, and the map of unknown pixels. One row is half known."""
    network = Additive({"labels": Labels(2, ("cat", "dog")), "source": Picture((3, 8, 8))})
    flow = RectifiedFlow(network, space=Pixels((3, 8, 8)))
    run, said = written(flow, tmp_path, degrade="mask:brush")
    assert said["inputs"] == {
        **X_AND_T,
        "labels": {"type": "int64", "shape": ["b"]},
        "source": {"type": "float32", "shape": ["b", 3, 8, 8]},
        "unknown": {"type": "float32", "shape": ["b", 1, 8, 8]},
    }
    degradation = {"kind": "Mask", "shape": "brush"}
    assert said["source"] == {"as": "condition", "noise": 0.0, "degradation": degradation, "paints": True}
    x, t, labels = torch.randn(3, 3, 8, 8), torch.rand(3), torch.tensor([0, 2, 1])
    source = torch.rand(3, 3, 8, 8) * 2 - 1
    source[0, :, :4], source[2] = torch.nan, torch.nan
    expected = flow.eval().exact_velocity(x, t, labels=labels, source=source)
    pixels, unknown = with_map(source).split((3, 1), dim=1)
    found = run(x=x, t=t, labels=labels, source=pixels, unknown=unknown)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found - run(x=x, t=t, labels=labels, source=-pixels, unknown=unknown)).abs().max() > 1e-3, "it matters"


@torch.no_grad()
def test_a_path_that_starts_from_a_source_needs_no_further_input(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"from_source": True, "source_noise": 0.25}
    flow = MeanFlow(Additive({"labels": Labels(2)}), space=Pixels((3, 8, 8)), **settings)
    run, said = written(flow, tmp_path, degrade="downsample:2")
    assert list(said["inputs"]) == ["x", "t", "r", "labels"]  # type: ignore[call-overload]
    degradation = {"kind": "Downsample", "factor": 2}
    assert said["source"] == {"as": "start", "noise": 0.25, "degradation": degradation, "paints": False}
    source, noise, labels = torch.rand(4, 3, 8, 8) * 2 - 1, torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    source[0, :, 2:5] = torch.nan
    x, _ = flow.draw_start(4, {"source": source, "labels": labels}, noise=noise)
    found = flow.space.decode(x - run(x=x, t=torch.ones(4), r=torch.zeros(4), labels=labels))
    expected = flow.sample(source=source, labels=labels, noise=noise, steps=1)
    assert (found - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_captions_numbers_and_labels_are_inputs_under_their_names(tmp_path: Path) -> None:
    """A missing value is NaN for the flow, and 1e30 for the program. Augmentation is no input: it is zero."""
    names = {"species": "class", "size": "größe"}
    encoder = BagOfWords(("red", "flower", "two"))
    conditions: dict[str, Any] = {
        "text": Caption(encoder, 3, 0, ("a red flower", "two")),
        names["size"]: Number((0.0, 1.5, 8.0)),
        names["species"]: Labels(2, ("cat", "dog")),
    }
    network = Additive({**conditions, "augmentation": AugmentationLabels(9)})
    flow = RectifiedFlow(network, prediction="noise", space=Pixels((3, 8, 8), augmentation=0.1))
    run, said = written(flow, tmp_path)
    assert said["inputs"] == {
        **X_AND_T,
        "text": {"type": "float32", "shape": ["b", 1, 3]},
        names["size"]: {"type": "float32", "shape": ["b"]},
        names["species"]: {"type": "int64", "shape": ["b"]},
    }
    words = {"kind": "words", "words": ["red", "flower", "two"]}
    caption = {"kind": "caption", "size": 3, "tokens": 0, "examples": ["a red flower", "two"], "encoder": words}
    assert said["conditions"] == [
        {"name": "text"} | caption,
        {"name": names["size"], "kind": "number", "quantiles": [0.0, 1.5, 8.0]},
        {"name": names["species"], "kind": "label", "names": ["cat", "dog"], "none": 2},
    ]
    values = {
        "text": conditions["text"].parse(["Two red flowers", "a flower!", "", ""]),
        names["size"]: torch.tensor([9.0, torch.nan, 0.7, torch.nan]),
        names["species"]: torch.tensor([0, 2, 1, 2]),
    }
    x, t = torch.randn(4, 3, 8, 8), torch.rand(4)
    unaugmented = torch.zeros(4, 9)
    expected = flow.eval().exact_velocity(x, t, **values, augmentation=unaugmented)
    found = run(x=x, t=t, **{name: each.nan_to_num(nan=LARGEST) for name, each in values.items()})
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    differences = (expected - flow.exact_velocity(x, t, augmentation=unaugmented)).abs().amax(dim=(1, 2, 3))
    assert (differences > 1e-3).tolist() == [True, True, True, False], "they matter"


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_a_text_encoder_is_exported_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], half: bool
) -> None:
    encoder = tiny_encoder(tmp_path / "encoder")
    caption = Caption(encoder, encoder.size, 3, ("a red flower",))
    flow = RectifiedFlow(unet_with(text=caption), space=Pixels((3, 8, 8)))
    run, said = written(flow, tmp_path, *["--half"] * half)
    assert "text_encoder.onnx, 0." in capsys.readouterr().out
    files = {"file": "text_encoder.onnx", "tokenizer": "tokenizer.json"}
    described: dict[str, Any] = said["conditions"][0]  # type: ignore[index]
    assert described["encoder"] == {"kind": "program", **files, "most_tokens": 12, "pools": False}
    texts = ["Two red flowers, and a cat", "cat"]
    encode = load_program((tmp_path / "exported/text_encoder.onnx").read_bytes())
    vectors, hidden = encode(encoder.tokenize(texts))
    expected = encoder.encode(texts, hidden.shape[1])
    largest = 2e-2 if half else 1e-5
    assert (vectors - expected[:, 0]).abs().max() < largest
    assert (hidden - expected[:, 1:]).abs().nan_to_num(0).max() < largest * 5
    kept = json.loads((tmp_path / "exported/tokenizer.json").read_text())
    assert (kept["truncation"], kept["padding"]) == (None, None)
    x, t, text = torch.randn(2, 3, 8, 8), torch.rand(2), caption.parse(["a red flower", ""])
    velocity = flow.eval().exact_velocity(x, t, text=text)
    found = run(x=x, t=t, text=text.nan_to_num(nan=LARGEST))
    assert (found - velocity).abs().max() <= largest * velocity.abs().max()


@pytest.mark.parametrize("returned", [1.0, float("nan")])
def test_a_program_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: float
) -> None:
    write(RectifiedFlow(unet_with(), space=Pixels((3, 8, 8))), tmp_path)
    monkeypatch.setattr(onnx, "to_onnx", lambda *_arguments, **_flags: b"")
    monkeypatch.setattr(onnx, "load_program", lambda _content: lambda inputs: [returned * inputs["x"]])
    with pytest.raises(RunError, match=r"the program differs from the flow by .* more than 0.0001"):
        call("export.py", "--checkpoint", tmp_path)
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {OUTPUTS_MANIFEST, ".manifest.lock"}


class OfTwo(nn.Module):
    """A network whose batches have two items."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x * t.view(2, 1, 1, 1)


def test_a_network_with_a_fixed_batch_is_refused(tmp_path: Path) -> None:
    flow = RectifiedFlow(OfTwo(), space=Pixels((3, 8, 8)))
    inputs = {"x": torch.zeros(2, 3, 8, 8), "t": torch.zeros(2)}
    for checks in ([], [{name: each[:1] for name, each in inputs.items()}]):  # in the export, and before it
        exported = Exportable(MODEL_FILE, flow.network, inputs, [("batch", None)], checks)
        with pytest.raises(UsageError, match=r"^the flow cannot be written as ONNX \(.*\): its forward must accept"):
            onnx.converted("flow", exported, half=False)
