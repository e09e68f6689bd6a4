"""The autoencoder of the package: any sides, near reconstructions, and weights that are small and the flow's own."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from rectified_flow.data.sources.synthetic_flowers import SPECIES, draw_flower
from rectified_flow.errors import UsageError
from rectified_flow.latents.autoencoders import open_autoencoder
from rectified_flow.latents.small import WEIGHTS, Small
from rectified_flow.registry import build, describe

PSNR = 26.0
"""Lower bound of the peak signal-to-noise ratio of drawn flowers [dB]."""


@pytest.mark.parametrize(("height", "width"), [(8, 8), (64, 64), (40, 72), (128, 24)])
def test_sides_are_any_multiples_of_eight(height: int, width: int) -> None:
    mean, std = Small().encode(torch.rand(2, 3, height, width) * 2 - 1)
    assert std is None
    assert mean.shape == (2, 8, height // 8, width // 8)
    assert Small().decode(mean).shape == (2, 3, height, width)


def test_the_shape_is_found_without_weights_and_other_sides_are_refused() -> None:
    assert Small().shape_of(128) == (1, 8, 16, 16)
    with pytest.raises(UsageError, match="--image_size 36 cannot be halved as often as --autoencoder small does"):
        Small().shape_of(36)


def test_reconstructions_of_drawn_pictures_are_nearer_than_those_of_a_reduction() -> None:
    """Compare with a bicubic reduction to as many values: 26 x 26 x 3 for latents of 16 x 16 x 8."""
    rng = np.random.default_rng(0)
    flowers = np.stack([draw_flower(species, 128, rng) for species in SPECIES[:8]])
    pictures = torch.from_numpy(flowers).permute(0, 3, 1, 2).float() / 127.5 - 1
    reduced = F.interpolate(pictures, (26, 26), mode="bicubic", antialias=True)
    enlarged = F.interpolate(reduced, (128, 128), mode="bicubic")
    decoded = Small().decode(Small().encode(pictures)[0])
    error, error_of_reduction = ((each - pictures).square().mean() for each in (decoded, enlarged))
    assert error < error_of_reduction
    assert 10 * torch.log10(4 / error) > PSNR


def test_latents_are_bounded() -> None:
    latents, _ = Small().encode(torch.rand(4, 3, 64, 64) * 2 - 1)
    assert latents.abs().max() <= 3


def test_its_weights_are_half_precision_and_at_most_two_million() -> None:
    weights = load_file(WEIGHTS)
    assert {each.dtype for each in weights.values()} == {torch.float16}
    assert sum(each.numel() for each in weights.values()) <= 2_000_000
    assert WEIGHTS.stat().st_size <= 4_000_000


def test_a_flow_of_other_weights_is_refused() -> None:
    description = json.loads(json.dumps(describe(open_autoencoder("small"))))
    build(description).prepare(torch.device("cpu"))
    with pytest.raises(UsageError, match="--autoencoder small has other weights than those that the flow"):
        build({**description, "fingerprint": "0"}).prepare(torch.device("cpu"))
