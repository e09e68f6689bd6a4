"""Tests of a saved model as a pipeline of diffusers."""

import hashlib
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.hub.flow_pipeline import FlowPipeline
from rectified_flow.hub.pretrained import PIPELINE, save_pretrained
from rectified_flow.load import model_hash
from rectified_flow.measurements.space import Fields
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import Provenance, read_provenance
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.programs import call
from tests.tiny_flows import FLOWS, same, write

CAPTION = Caption(BagOfWords(("a", "red", "blue", "flower")), 4, examples=("a red flower", "a blue flower"))


def captioned() -> Flow:
    torch.manual_seed(0)
    network = Unet(8, (1,), channels=4, conditions={"caption": CAPTION}, image_size=8, blocks_per_level=1)
    for parameter in network.parameters():
        parameter.data += 0.1
    return RectifiedFlow(network, space=Pixels((4, 8, 8)))


def opened(flow: Flow, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pipeline of a folder, whose code diffusers copies into a cache."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(folder / "cache"))
    save_pretrained(flow, folder / "model")
    return DiffusionPipeline.from_pretrained(folder / "model", trust_remote_code=True).to("cpu")


@pytest.mark.parametrize(
    ("flow", "arguments", "flags"),
    [
        (
            FLOWS["rectified"],
            {"labels": ["dog", 0], "guidance_scale": 2, "num_inference_steps": 2},
            "--classes dog,0 --guidance_scale 2 --steps 2",
        ),
        (FLOWS["mean"], {"labels": "dog", "batch_size": 2}, "--classes dog"),
        (captioned, {"num_inference_steps": 2}, "--steps 2"),
        (captioned, {"num_inference_steps": 2, "caption": "red"}, "--steps 2 --prompt red"),
    ],
)
def test_pictures_are_those_of_sample(
    flow: Any, arguments: dict[str, Any], flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(flow(), tmp_path)
    call("sample.py", "--checkpoint", tmp_path, "--num_samples", 3, "--seed", 5, *flags.split())
    images = opened(flow(), tmp_path, monkeypatch)(3, seed=5, **arguments).images
    assert len(images) == 3
    for number, image in enumerate(images):
        expected = np.asarray(Image.open(tmp_path / f"generated/{number:05d}.png"), dtype=int)
        assert np.abs(np.asarray(image, dtype=int) - expected).max() <= 1
        assert expected.std() > 1


def test_a_saved_pipeline_is_whole_and_loads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = FLOWS["rectified"]()
    pipe = opened(flow, tmp_path, monkeypatch)
    pipe.save_pretrained(tmp_path / "again", safe_serialization=True)
    again = DiffusionPipeline.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        file.name for file in (tmp_path / "again").iterdir()
    }
    same(again.flow, flow)


def test_it_is_called_as_every_pipeline() -> None:
    pipe: Any = FlowPipeline(FLOWS["rectified"]())
    calls: dict[str, Any] = {"num_inference_steps": 1, "labels": "dog"}
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    one = pipe(2, generator=first, output_type="pt", **calls).images
    (two,) = pipe(2, generator=second, output_type="np", return_dict=False, **calls)
    assert (one.shape, two.shape) == ((2, 3, 8, 8), (2, 8, 8, 3))
    assert np.allclose(one.permute(0, 2, 3, 1), two)
    assert 0 <= one.min() < one.max() <= 1
    assert len(pipe(batch_size=2, **calls).images) == 2, "as the pipelines of diffusers without prompts"
    assert not torch.equal(pipe(2, generator=first, output_type="pt", **calls).images, one), "a generator moves on"


@pytest.mark.parametrize(
    "place", [{"args": [torch.float16]}, {"args": ["cpu", torch.bfloat16]}, {"dtype": torch.float16}]
)
def test_the_weights_stay_in_float32(place: dict[str, Any]) -> None:
    pipe: Any = FlowPipeline(FLOWS["rectified"]())
    with pytest.warns(UserWarning, match="the weights stay in float32"):
        moved = pipe.to(*place.pop("args", ()), **place)
    assert moved is pipe
    assert pipe.dtype == torch.float32
    assert len(pipe.to("cpu", torch.float32)(num_inference_steps=1).images) == 1
    with torch.autocast("cpu", torch.bfloat16):
        pipe(num_inference_steps=1)


def test_measurements_are_shown_in_colours() -> None:
    space = Fields((3, 8, 8), (250.0,) * 3, (320.0,) * 3, show="1,2,3")
    flow = RectifiedFlow(Unet(8, (1,), image_size=8, blocks_per_level=1), space=space)
    [(_, expected)] = sample_batches(flow, range(1), steps=2)
    pipe: Any = FlowPipeline(flow)
    [image] = pipe(1, num_inference_steps=2).images
    difference = np.asarray(image, int) - expected[0].permute(1, 2, 0).numpy()
    assert abs(difference).max() <= 1


@pytest.mark.parametrize(
    "labels", [torch.tensor([1, 0]), np.array([1, 0]), [torch.tensor(1), np.int64(0)], (1, "cat"), iter(["dog", "cat"])]
)
def test_values_may_be_tensors_and_arrays(labels: Any) -> None:
    pipe: Any = FlowPipeline(FLOWS["rectified"]())
    one, two = (pipe(2, labels=each, num_inference_steps=1, output_type="pt").images for each in (labels, [1, 0]))
    assert torch.equal(one, two)
    drawn, none = (pipe(2, num_inference_steps=1, output_type="pt", **each).images for each in ({}, {"labels": None}))
    assert torch.equal(drawn, none)


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_pictures_say_how_they_were_generated_once_they_are_saved(suffix: str, tmp_path: Path) -> None:
    flow = FLOWS["rectified"]()
    pipe: Any = FlowPipeline(flow)
    calls: dict[str, Any] = {"num_inference_steps": 2, "labels": ["dog", "cat"], "guidance_scale": 2, "seed": 5}
    path = tmp_path / f"picture.{suffix}"
    pipe(2, **calls).images[1].save(path)
    assert b"digitalsourcetype/trainedAlgorithmicMedia" in path.read_bytes()
    expected = Provenance(model_hash(flow), 5, 2, 1, {"labels": "cat"}, guidance_scale=2.0, solver="ab2")
    assert read_provenance(path) == expected
    save_pretrained(flow, tmp_path / "model")
    assert hashlib.sha256((tmp_path / "model/model.safetensors").read_bytes()).hexdigest() == expected.model
    pipe(2, metadata=False, **calls).images[1].save(path)
    assert b"trainedAlgorithmicMedia" not in path.read_bytes()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rectified_flow.hub.flow_pipeline", None)
    with pytest.raises(ImportError, match="needs a recent version of the package rectified-flow-trainer: install it"):
        runpy.run_path(str(PIPELINE))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("mean", {"guidance_scale": 2}, "guidance has no effect on a MeanFlow: leave it out"),
        ("mean", {"colour": "red"}, "colour is not a condition of this model: pass labels"),
        ("rectified", {"labels": "cow"}, "cow does not exist: pass names"),
        ("rectified", {"labels": []}, "`labels` has no values: pass some, or leave it out"),
        ("rectified", {"num_images": "a red rose"}, "`num_images` a red rose is not a positive integer"),
        ("rectified", {"num_images": 0}, "`num_images` 0 is not a positive integer"),
        ("rectified", {"generator": [torch.Generator()]}, "`generator` is not a torch.Generator: pass one"),
    ],
)
def test_what_is_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        FlowPipeline(FLOWS[name]())(**arguments)


def test_a_model_that_translates_pictures_is_refused() -> None:
    flow = FLOWS["rectified"]()
    flow.from_source = True
    with pytest.raises(UsageError, match=r"translates pictures: call pipe\.flow\.sample\(source=pictures\)"):
        FlowPipeline(flow)()
