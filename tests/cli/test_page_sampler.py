"""The sampler of an exported page takes noise and a picture to what flow.sample makes of them."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.cli.network_call import NetworkCall, describe
from rectified_flow.condition import Condition, Labels, Picture, with_map
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.degradations import Degradation, Downsample, Grey, Mask
from rectified_flow.spaces.pixels import Pixels
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
SAMPLER = Path(randomness.__file__).parent / "page/sampler.js"
SHAPE = (3, 8, 8)
NUMBERS = [0, 5]
SAMPLE = """
const { model, job } = JSON.parse(GIVEN);
job.picture = Float32Array.from(job.picture);
job.unknown = job.unknown && Uint8Array.from(job.unknown);
const size = job.picture.length;
const area = size / 3;
const call = async ({ x, t, r, labels, source, unknown }) => x.map((value, i) => {
  const pixel = Math.floor(i / size) * area + (i % area);
  const known = source ? 0.7 * source[i] - 0.4 * unknown[pixel] : 0;
  return 0.6 * value + 0.5 * t - 0.3 * (r ?? t) + 0.2 * labels[Math.floor(i / size)] + known;
});
const watched = [];
const x = await sampler.sample(model, job, call, (interval) => { watched.push(interval); });
return { x: [...x], watched, pixels: job.numbers.map((_, row) => [...sampler.pixels(x, row, [3, 8, 8])]) };
"""


class Linear(nn.Module):
    """The network that the program in JavaScript calls, too."""

    def __init__(self, **conditions: Condition) -> None:
        super().__init__()
        self.conditions = {"labels": Labels(2)} | conditions

    def forward(
        self, x: Tensor, t: Tensor, r: Tensor | None = None, *, labels: Tensor, source: Tensor | None = None
    ) -> Tensor:
        times, earlier, numbers = (each.reshape(-1, 1, 1, 1) for each in (t, t if r is None else r, labels))
        value = 0.6 * x + 0.5 * times - 0.3 * earlier + 0.2 * numbers
        if source is None:
            return value
        pixels, unknown = with_map(source).split((3, 1), dim=1)
        return value + 0.7 * pixels - 0.4 * unknown


def run(body: str, **given: Any) -> Any:
    """Run a program in JavaScript, in which ``sampler`` is the module of the page, and return its result."""
    body = body.replace("GIVEN", json.dumps(json.dumps(given)))
    source = f"import * as sampler from {json.dumps(SAMPLER.as_uri())};\nconst main = async () => {{{body}}};\n"
    source += "console.log(JSON.stringify(await main()));"
    command = ["node", "--input-type=module", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def flow_of(kind: type[Flow], source: str | None, degradation: Degradation | None = None) -> Flow:
    network = Linear(source=Picture(SHAPE)) if source == "condition" else Linear()
    start: dict[str, Any] = {"from_source": True, "source_noise": 0.25} if source == "start" else {}
    return kind(network, space=Pixels(SHAPE), degradation=degradation, **start)


@pytest.mark.parametrize("painted", [False, True])
@pytest.mark.parametrize("source", [None, "start", "condition"])
@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_a_picture_becomes_what_it_becomes_in_python(kind: type[Flow], source: str | None, painted: bool) -> None:
    flow = flow_of(kind, source, Mask() if source else None)
    model: dict[str, Any] = describe(NetworkCall(flow))
    images = torch.randint(256, (1, *SHAPE), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., 2:6, 3:] = painted
    picture, level, is_map = flow.space.encode(images), 0.4, kind is MeanFlow
    job = {"numbers": NUMBERS, "from": 7, "to": 8, "mix": 0, "conditions": {"labels": 1}, "steps": 3, "level": level}
    job |= {"guidance": 1 if is_map else 2.5, "picture": picture.flatten().tolist()}
    found = run(SAMPLE, model=model, job=job | {"unknown": mask.int().flatten().tolist() if painted else None})

    options: dict[str, Any] = {"steps": 3} if is_map else {"steps": 3, "guidance": Guidance(2.5)}
    rows = len(NUMBERS)
    if source:
        options["source"] = picture.masked_fill(mask, torch.nan).expand(rows, *SHAPE)
    else:
        options |= {"start": images.expand(rows, *SHAPE)}
        options |= {"mask": mask.expand(rows, -1, -1, -1)} if painted else {"noise_level": level}
    with deterministic(Samples(7, NUMBERS), torch.device("cpu")):
        expected = flow.sample(rows, labels=torch.ones(rows, dtype=torch.long), **options)
    rendered = flow.space.render(expected)
    if painted:  # as sample.py has it
        rendered = torch.where(mask, rendered, images)
        expected = torch.where(mask, expected, flow.space.decode(picture))
    made = flow.space.decode(torch.tensor(found["x"]).reshape(rows, *SHAPE))
    assert (made - expected).abs().max() < 1e-5
    pixels = torch.tensor(found["pixels"]).reshape(rows, 8, 8, 4)[..., :3].permute(0, 3, 1, 2)
    assert (pixels - rendered.int()).abs().max() <= 1
    if painted:
        assert not (pixels - images.int()).masked_fill(mask, 0).any(), "to the bit"
        assert (pixels[0] - pixels[1]).abs()[:, mask[0, 0]].max() > 0, "another number, other noise"
    assert found["watched"] == [0, 1, 2, 3]


@pytest.mark.parametrize("degradation", [Downsample(2), Downsample(4), Grey(), Mask(), None])
def test_pictures_are_degraded_as_in_python(degradation: Degradation | None) -> None:
    """Only by projections: a mask is painted by the visitor."""
    model: dict[str, Any] = describe(NetworkCall(flow_of(RectifiedFlow, "start", degradation)))
    x = torch.rand(1, *SHAPE) * 2 - 1
    body = "const { model, x } = JSON.parse(GIVEN); return [...sampler.degraded(model, Float32Array.from(x))];"
    found = torch.tensor(run(body, model=model, x=x.flatten().tolist())).reshape(x.shape)
    expected = degradation(x) if degradation is not None and degradation.is_projection else x
    assert (found - expected).abs().max() < 1e-6


def test_a_stroke_covers_the_pixels_near_its_way() -> None:
    body = """
    const dot = new Uint8Array(64), line = new Uint8Array(64);
    sampler.stroke(dot, [8, 8], [4, 4], [4, 4], 1);
    sampler.stroke(line, [8, 8], [1.5, 2.5], [5.5, 2.5], 0.6);
    return [[...dot], [...line]];
    """
    dot, line = (torch.tensor(each).reshape(8, 8).bool() for each in run(body))
    assert dot.nonzero().tolist() == [[3, 3], [3, 4], [4, 3], [4, 4]]
    assert line.nonzero().tolist() == [[2, column] for column in range(1, 6)]


def test_every_value_of_a_pixel_comes_back_to_the_bit() -> None:
    body = """
    const rgba = new Uint8ClampedArray(1024).map((_, i) => (i % 4 === 3 ? 255 : Math.floor(i / 4)));
    return [...sampler.pixels(sampler.fromPixels(rgba, 3), 0, [3, 16, 16])];
    """
    assert torch.equal(torch.tensor(run(body)).reshape(256, 4)[:, :3], torch.arange(256)[:, None].expand(-1, 3))
