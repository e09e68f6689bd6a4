"""The noise of an exported page is that of sample.py, number by number."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rectified_flow import randomness
from rectified_flow.randomness import Samples, deterministic
from tests.patience import PATIENCE

NOISE = Path(randomness.__file__).parent / "page/noise.js"
DRAWS = [(0, 0, 16), (1, 3, 50), (2**32 - 1, 15, 3 * 8 * 8), (7, 0, 3 * 32 * 32), (12345, 9, 20001)]
"""Seed, number and size."""
PROGRAM = """
import { blake2b64, sampleLabel, sampleNoise, slerp } from FILE;
const draws = DRAWS.map(([seed, number, size]) => [...sampleNoise(seed, number, size)]);
const labels = DRAWS.map(([seed, number]) => sampleLabel(seed, "species", number, 7));
const texts = ["", "a".repeat(128), "b".repeat(129), "c".repeat(300)].map((text) => String(blake2b64(text)));
const quarter = slerp(new Float32Array([1, 0]), new Float32Array([0, 1]), 0.5);
console.log(JSON.stringify({ draws, labels, texts, quarter: [...quarter] }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_noise_labels_and_hashes_are_those_of_python() -> None:
    import hashlib

    source = PROGRAM.replace("FILE", json.dumps(NOISE.as_uri())).replace("DRAWS", json.dumps(DRAWS))
    command = ["node", "--input-type=module", "-e", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for (seed, number, size), values, label in zip(DRAWS, found["draws"], found["labels"], strict=True):
        with deterministic(Samples(seed, [number])):
            expected = randomness.randn("sample noise", (1, size), "cpu")[0]
            assert label == randomness.randint("sample species", 7, (1,), "cpu").item()
        assert (torch.tensor(values) - expected).abs().max() < 1e-5
    for text, digest in zip(["", "a" * 128, "b" * 129, "c" * 300], found["texts"], strict=True):
        assert int(digest) == int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    assert found["quarter"] == pytest.approx([0.5**0.5, 0.5**0.5])
