"""The program in docs/export.md generates in Node what flow.sample generates from the same noise.

``NODE_PATH`` is the folder in which ``npm install onnxruntime-node`` has installed the runtime, ``node_modules``.
"""

import json
import os
import shutil
import subprocess
from math import cos, log, pi, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from rectified_flow.flows.flow import Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.text.caption import Caption
from rectified_flow.text.encoders import BagOfWords
from tests.patience import PATIENCE
from tests.programs import call
from tests.test_docs import blocks_of
from tests.test_load import FLOWS, write

pytestmark = pytest.mark.page
GUIDE = Path(__file__).resolve().parents[2] / "docs/export.md"
RANDOM = "let state = 1; Math.random = () => (state = (state * 16807) % 2147483647) / 2147483647;"


def noise(*shape: int) -> Tensor:
    """The noise of the program, whose random numbers are those of ``RANDOM``."""
    state, values = 1, []
    for _ in range(torch.Size(shape).numel()):
        radius, angle = ((state := state * 16807 % 2147483647) / 2147483647 for _ in range(2))
        values.append(sqrt(-2 * log(1 - radius)) * cos(2 * pi * angle))
    return torch.tensor(values).reshape(shape)


def grey_with_captions() -> Flow:
    torch.manual_seed(0)
    kinds = {"caption": Caption(BagOfWords(("red", "blue")), 2, tokens=3)}
    network = Unet(8, (1,), channels=1, conditions=kinds, image_size=8, attention_sides=(8,), blocks_per_level=1)
    return RectifiedFlow(network, space=Pixels((1, 8, 8)))


@pytest.mark.parametrize(
    ("flow", "chosen", "options"),
    [
        (FLOWS["rectified"], {"labels": 1}, {"labels": torch.tensor([1]), "solver": "euler"}),
        (FLOWS["mean"], {}, {"labels": torch.tensor([2])}),
        (grey_with_captions, {}, {"solver": "euler"}),
    ],
)
def test_a_picture(flow: Any, chosen: dict[str, int], options: dict[str, Any], tmp_path: Path) -> None:
    folders = [Path(each) for each in os.environ.get("NODE_PATH", "").split(os.pathsep) if each]
    found = [each for each in folders if (each / "onnxruntime-node").is_dir()]
    if not found or shutil.which("node") is None:
        pytest.skip("NODE_PATH has no onnxruntime-node, or node is not installed")
    write(flow(), tmp_path)
    call("export.py", "--checkpoint", tmp_path, "--format", "onnx")
    folder = tmp_path / "exported"
    (folder / "node_modules").symlink_to(found[0])  # an import statement does not look into NODE_PATH
    [code] = [block.text for block in blocks_of(GUIDE.read_text()) if block.language == "js"]
    (folder / "generate.mjs").write_text(code)
    (folder / "random.mjs").write_text(RANDOM)
    command = ["node", "--import", "./random.mjs", "generate.mjs", json.dumps(chosen)]
    subprocess.run(command, cwd=folder, timeout=PATIENCE, check=True)
    model = flow()
    data = model.sample(noise=noise(1, *model.space.shape), steps=model.default_steps, **options)
    expected = model.space.render(data)[0].int()
    assert (pil_to_tensor(Image.open(folder / "picture.ppm")).int() - expected).abs().max() <= 1
    assert expected.float().std() > 1
