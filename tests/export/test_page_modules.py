"""Tests of the modules of an exported page in Node: noise, words, samplers and metadata equal those of Python."""

import hashlib
import json
import shutil
import subprocess
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rectified_flow import randomness
from rectified_flow.condition import Condition, Labels, Picture, with_map
from rectified_flow.export.call import NetworkCall, model_json
from rectified_flow.export.web_page import page_sources
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.degradations import Degradation, Downsample, Grey, Mask
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.pictures import PACKET, Provenance, read_provenance
from rectified_flow.text.encoders import BagOfWords, words_of
from tests.patience import PATIENCE
from tests.text.tiny_encoder import tiny_encoder

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
SHAPE = (3, 8, 8)
MODULES = {name: f"{name}.js" for name in ("noise", "conditions", "sampler", "metadata", "picture")}
MODULES["tokenizers"] = "tokenizers/tokenizers.min.js"
EXAMPLES = ("a red flower", "two blue flowers, and a cat")
QUANTILES = (0.0, 1.5, 3.0, 8.0, 20.0)
WORDS = [
    "Two RED flowers, and 3 cats!",
    "Ärger im Café — ΟΔΟΣ",
    "snake_case don't x2",
    "日本 Ёлка ½",
    "赤い花、2本の青い花。々 𠀋 แมวสีแดง, ruby花x",
    "",
    "...",
    "İstanbul ß",
]
NUMBERS = [0, 5]
SAMPLE = """
const { model, job } = given;
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


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a page, unpacked."""
    folder = tmp_path_factory.mktemp("page")
    for name, content in page_sources().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


def run(folder: Path, body: str, **given: Any) -> Any:
    """Run a program in JavaScript, which has the modules of the page and ``given``, and return its result."""
    lines = [f"import * as {name} from {json.dumps((folder / file).as_uri())};" for name, file in MODULES.items()]
    lines.append(f"const given = JSON.parse({json.dumps(json.dumps(given))});")
    lines.append(f"console.log(JSON.stringify(await (async () => {{{body}}})()));")
    command = ["node", "--input-type=module", "-"]
    source = "\n".join(lines)
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


DRAWS = [(0, 0, 16), (1, 3, 50), (2**32 - 1, 15, 3 * 8 * 8), (7, 0, 3 * 32 * 32), (12345, 9, 20001)]
"""Seed, number and size."""
TEXTS = ["", "a" * 128, "b" * 129, "c" * 300]


def test_noise_labels_and_hashes_are_those_of_python(page_folder: Path) -> None:
    body = """
    const draws = given.draws.map(([seed, number, size]) => [...noise.sampleNoise(seed, number, size)]);
    const labels = given.draws.map(([seed, number]) => noise.sampleLabel(seed, "species", number, 7));
    const texts = given.texts.map((text) => String(noise.blake2b64(text)));
    const quarter = noise.slerp(new Float32Array([1, 0]), new Float32Array([0, 1]), 0.5);
    return { draws, labels, texts, quarter: [...quarter] };
    """
    found = run(page_folder, body, draws=DRAWS, texts=TEXTS)
    for (seed, number, size), values, label in zip(DRAWS, found["draws"], found["labels"], strict=True):
        with deterministic(Samples(seed, [number])):
            expected = randomness.randn("sample noise", (1, size), "cpu")[0]
            assert label == randomness.randint("sample species", 7, (1,), "cpu").item()
        assert (torch.tensor(values) - expected).abs().max() < 1e-5
    for text, digest in zip(TEXTS, found["texts"], strict=True):
        assert int(digest) == int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    assert found["quarter"] == pytest.approx([0.5**0.5, 0.5**0.5])


def test_words_and_their_vectors_are_those_of_python(page_folder: Path) -> None:
    encoder = BagOfWords.of(EXAMPLES)
    caption = {"size": encoder.size, "tokens": 0, "encoder": {"kind": "words", "words": encoder.words}}
    texts = [*EXAMPLES, "a cat and a cat and a RED dog", "nothing known", ""]
    body = """
    const encode = conditions.wordEncoder(given.caption);
    const values = (each) => { const found = encode(each); return found && [...found]; };
    const unknown = given.texts.map((each) => conditions.sorted(given.caption.encoder, each).unknown);
    return { words: given.words.map(conditions.wordsOf), vectors: given.texts.map(values), unknown };
    """
    found = run(page_folder, body, caption=caption, texts=texts, words=WORDS)
    assert found["words"] == [words_of(each) for each in WORDS]
    for vector, expected in zip(found["vectors"], encoder.encode(texts)[:, 0], strict=True):
        if vector is None:
            assert expected.isnan().all()
        else:
            assert (torch.tensor(vector) - expected).abs().max() < 1e-6
    assert found["unknown"] == [[], [], ["dog"], ["nothing", "known"], []]


@pytest.mark.parametrize(
    ("quantiles", "bounds"),
    [
        (QUANTILES, (0, 20, 1, 3)),
        ((0.05, 1.25, 3.1, 20.0), (0, 20, 0.1, 3.1)),
        ((1899.0, 1950.0, 2024.0), (1899, 2024, 1, 1950)),
        ((-0.31234, 0.0, 0.69871), (-0.32, 0.7, 0.01, 0)),
        ((5.0, 5.0, 5.0), (5, 5, 1, 5)),
    ],
)
def test_sliders_have_round_ends_and_a_histogram(
    page_folder: Path, quantiles: tuple[float, ...], bounds: tuple[float, ...]
) -> None:
    body = """
    const range = conditions.rangeOf(given.quantiles);
    return { ...range, bars: conditions.histogram(given.quantiles, range.min, range.max, 10) };
    """
    found = run(page_folder, body, quantiles=quantiles)
    assert (found["min"], found["max"], found["step"], found["start"]) == bounds
    assert sum(found["bars"]) == pytest.approx(1)
    if quantiles is QUANTILES:  # a quarter of the data lies between two quantiles
        assert found["bars"][0] == pytest.approx(0.25 + 0.25 * 0.5 / 1.5)
        assert found["bars"][5:] == pytest.approx([0.25 / 6] * 5)


def test_ids_of_tokens_are_those_of_python(page_folder: Path, tmp_path: Path) -> None:
    """Compare texts of any length, one of which is cut off."""
    encoder = tiny_encoder(tmp_path / "encoder")
    tokenizer = encoder.parts[0]
    texts = [*WORDS[:-2], *EXAMPLES, "flowers " * 20, "a red, blue cat.", "[SEP] the dog"]
    body = """
    const tokenizer = new tokenizers.Tokenizer(given.tokenizer, {});
    return given.texts.map((each) => conditions.idsOf(tokenizer, each, given.most));
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    found = run(page_folder, body, tokenizer=document, texts=texts, most=encoder.most_tokens)
    assert found == [encoder.tokenize([each])["input_ids"][0].tolist() for each in texts]


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


def flow_of(kind: type[Flow], source: str | None) -> Flow:
    network = Linear(source=Picture(SHAPE)) if source == "condition" else Linear()
    start: dict[str, Any] = {"from_source": True, "source_noise": 0.25} if source == "start" else {}
    return kind(network, space=Pixels(SHAPE), **start)


@pytest.mark.parametrize("painted", [False, True])
@pytest.mark.parametrize("source", [None, "start", "condition"])
@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_a_picture_becomes_what_it_becomes_in_python(
    page_folder: Path, kind: type[Flow], source: str | None, painted: bool
) -> None:
    flow = flow_of(kind, source)
    model: dict[str, Any] = model_json(NetworkCall(flow), Mask() if source else None)
    assert model["time_grid"] == "uniform"
    model["time_grid"] = grid = "uniform" if source else "edm"
    images = torch.randint(256, (1, *SHAPE), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., 2:6, 3:] = painted
    picture, level, is_map = flow.space.encode(images), 0.4, kind is MeanFlow
    job = {"numbers": NUMBERS, "from": 7, "to": 8, "mix": 0, "conditions": {"labels": 1}, "steps": 3, "level": level}
    job |= {"guidance": 1 if is_map else 2.5, "picture": picture.flatten().tolist()}
    found = run(
        page_folder, SAMPLE, model=model, job=job | {"unknown": mask.int().flatten().tolist() if painted else None}
    )

    options: dict[str, Any] = {"steps": 3} if is_map else {"steps": 3, "guidance": Guidance(2.5)}
    rows, options["grid"] = len(NUMBERS), grid
    if source:
        options["source"] = picture.masked_fill(mask, torch.nan).expand(rows, *SHAPE)
    else:
        options |= {"start": images.expand(rows, *SHAPE)}
        options |= {"mask": mask.expand(rows, -1, -1, -1)} if painted else {"strength": level}
    with deterministic(Samples(7, NUMBERS), torch.device("cpu")):
        expected = flow.sample(rows, labels=torch.ones(rows, dtype=torch.long), **options)
    rendered = flow.space.medium.render(expected)
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


@pytest.mark.parametrize("degradation", [Downsample(2), Downsample(3), Grey(), Mask(), None])
def test_pictures_are_degraded_as_in_python(page_folder: Path, degradation: Degradation | None) -> None:
    """The page applies projections only: the visitor paints a mask."""
    model: dict[str, Any] = model_json(NetworkCall(flow_of(RectifiedFlow, "start")), degradation)
    x = torch.rand(1, *SHAPE) * 2 - 1
    body = "const { model, x } = given; return [...sampler.degraded(model, Float32Array.from(x))];"
    found = torch.tensor(run(page_folder, body, model=model, x=x.flatten().tolist())).reshape(x.shape)
    expected = degradation(x) if degradation is not None and degradation.is_projection else x
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize("framing", [{}, {"bits": 16, "pad": True, "resize": "nearest"}])
def test_a_picture_is_framed_as_in_training(page_folder: Path, framing: dict[str, Any]) -> None:
    """A wide picture is cropped at both sides, or has margins above and below; the browser draws what is inside."""
    model: dict[str, Any] = model_json(NetworkCall(flow_of(RectifiedFlow, None)), None, framing)
    body = """
    const drawn = [], surface = {
      fillRect() {}, drawImage: (_picture, ...places) => drawn.push(...places), getImageData: () => ({ data: null }),
    };
    globalThis.OffscreenCanvas = class { getContext() { return surface; } };
    globalThis.createImageBitmap = async () => ({ width: 32, height: 16, close() {} });
    await picture.readPicture(null, [3, 8, 8], given.model.framing);
    return { drawn, smooth: surface.imageSmoothingEnabled, fill: surface.fillStyle };
    """
    found = run(page_folder, body, model=model)
    source = [0, -8, 32, 32] if framing else [8, 0, 16, 16]
    assert found == {"drawn": [*source, 0, 0, 8, 8], "smooth": not framing, "fill": "white"}


def test_a_stroke_covers_the_pixels_near_its_way(page_folder: Path) -> None:
    body = """
    const dot = new Uint8Array(64), line = new Uint8Array(64);
    sampler.stroke(dot, [8, 8], [4, 4], [4, 4], 1);
    sampler.stroke(line, [8, 8], [1.5, 2.5], [5.5, 2.5], 0.6);
    return [[...dot], [...line]];
    """
    dot, line = (torch.tensor(each).reshape(8, 8).bool() for each in run(page_folder, body))
    assert dot.nonzero().tolist() == [[3, 3], [3, 4], [4, 3], [4, 4]]
    assert line.nonzero().tolist() == [[2, column] for column in range(1, 6)]


@pytest.mark.parametrize(("number", "label"), [(0, None), (0, 1), (0, 2), (None, None)])
def test_a_download_says_what_python_says(
    page_folder: Path, tmp_path: Path, number: int | None, label: int | None
) -> None:
    written = BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(SHAPE[::-1])).save(written, format="PNG")
    conditions = [
        {"name": "text", "kind": "caption"},
        {"name": "size", "kind": "number"},
        {"name": "class", "kind": "label", "names": ["cat", "dog"], "none": 2},
    ]
    model = {"hash": "ab", "solver": "ab2", "conditions": conditions}
    values: dict[str, Any] = {"text": """<"red" & 'blue'>""", "size": None, "class": label}
    settings = {"from": 7, "number": number, "steps": 4, "guidance": 2.5, "conditions": values, "picture": None}
    body = """
    const png = new Blob([Uint8Array.from(given.png)], { type: "image/png" });
    const made = metadata.withMetadata(png, given.packet, metadata.provenanceOf(given.model, given.settings));
    return [...new Uint8Array(await made.arrayBuffer())];
    """
    found = run(page_folder, body, png=[*written.getvalue()], packet=PACKET, model=model, settings=settings)
    (tmp_path / "made.png").write_bytes(bytes(found))
    with deterministic(Samples(7, [0])):
        drawn = ["cat", "dog"][int(randomness.randint("sample class", 2, (1,), "cpu"))]
    name = {None: drawn, 1: "dog", 2: None}[label]
    known: dict[str, str | None] = {"text": values["text"], "size": None} | ({} if number is None else {"class": name})
    past = read_provenance(tmp_path / "made.png")
    assert asdict(past) == asdict(Provenance("ab", 7, 4, number, known, "ab2", guidance_scale=2.5))
    image = Image.open(tmp_path / "made.png")
    assert np.array_equal(np.asarray(image), np.arange(192).reshape(SHAPE[::-1]))
