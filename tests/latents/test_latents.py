"""Tests of autoencoders, and of the space of latents: draws from a stored distribution, and decoding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rectified_flow.data.sources.synthetic_flowers import SPECIES, draw_flower
from rectified_flow.errors import UsageError
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import time_grid
from rectified_flow.hub import load_pretrained, save_pretrained
from rectified_flow.latents import autoencoders
from rectified_flow.latents import space as latents_module
from rectified_flow.latents.autoencoders import PretrainedAutoencoder, Small
from rectified_flow.latents.space import Latents
from rectified_flow.load import load_flow
from rectified_flow.networks.unet import Unet
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.registry import build, describe
from tests.extension.own_autoencoder import Haar
from tests.latents.tiny_autoencoders import TINY, save_tiny
from tests.tiny_flows import write


def space_of_two() -> Latents:
    """Return a space of 12 channels and 2 x 2; the first channel has mean 3 and deviation 2."""
    return Latents(Haar(1), 4, mean=[3.0] + [0.0] * 11, std=[2.0] + [1.0] * 11)


def test_decoding_is_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 64 pictures of 512 px would not fit into a GPU at once."""
    sizes = list[int]()
    decode = Haar.decode

    def watched(haar: Haar, latents: torch.Tensor) -> torch.Tensor:
        sizes.append(len(latents))
        return decode(haar, latents)

    monkeypatch.setattr(Haar, "decode", watched)
    monkeypatch.setattr(latents_module, "PIXELS_AT_ONCE", 2 * 4 * 4)
    space, x = Latents(Haar(1), 4, (12, 2, 2)), torch.randn(5, 12, 2, 2)
    together = space.decode(x)
    assert sizes == [2, 2, 1]
    assert torch.equal(together[4:], space.decode(x[4:]))


def test_a_variant_and_latents_are_drawn_of_each_row() -> None:
    count = 4000
    stored = torch.zeros(count, 2, 2, 12, 2, 2, dtype=torch.float16)
    stored[:, 1, 0] = 10
    stored[:, :, 1] = 0.5
    space = Latents(Haar(1), 4)
    with deterministic(BatchRows(0, 7, count, slice(None))):
        drawn = space.augment(stored)[0]
        again = space.augment(stored)[0]
    assert drawn.shape == (count, 1, 1, 12, 2, 2)
    assert torch.equal(drawn, again), "a function of seed and step"
    mirrored = drawn.flatten(1).mean(dim=1) > 5
    assert mirrored.float().mean() == pytest.approx(0.5, abs=0.03)
    for rows, mean in ((mirrored, 10.0), (~mirrored, 0.0)):
        assert drawn[rows].mean() == pytest.approx(mean, abs=0.01)
        assert drawn[rows].std() == pytest.approx(0.5, abs=0.01)
    with deterministic(BatchRows(0, 8, count, slice(None))):
        assert not torch.equal(drawn, space.augment(stored)[0])
    with deterministic(BatchRows(0, 7, count, slice(1, None, 2))):
        assert torch.equal(drawn[1::2], space.augment(stored[1::2])[0]), "whichever rows are present"


def test_it_is_described() -> None:
    space = space_of_two()
    again = build(json.loads(json.dumps(describe(space))))
    assert (again.shape, again.mean, again.std) == ((12, 2, 2), space.mean, space.std)
    assert again.medium.noun == "4 px by haar"


KINDS = pytest.mark.parametrize("kind", list(TINY))
KL: dict[str, Any] = {"_class_name": "AutoencoderKL", "down_block_types": ["DownEncoderBlock2D"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random tiny autoencoder, each saved once."""
    base = tmp_path_factory.mktemp("autoencoders")
    return lambda kind: base / kind if (base / kind).exists() else save_tiny(kind, base / kind)


@KINDS
def test_a_pretrained_one_encodes_and_decodes_as_diffusers_does(folder: Callable[[str], Path], kind: str) -> None:
    autoencoder = PretrainedAutoencoder(str(folder(kind)))
    pictures = torch.rand(2, 3, 32, 32) * 2 - 1
    mean, spread = autoencoder.encode(pictures)
    module: Any = type(TINY[kind]()).from_pretrained(folder(kind)).eval()
    with torch.no_grad():
        encoded = module.encode(pictures[:, :, None] if kind == "AutoencoderKLWan" else pictures)
        distribution = getattr(encoded, "latent_dist", None)
        expected = encoded[0] if distribution is None else distribution.mean
        decoded = module.decode(expected).sample
    assert (spread is None) == (distribution is None)
    if distribution is not None and spread is not None:
        torch.testing.assert_close(spread, distribution.std.reshape(spread.shape))
    torch.testing.assert_close(mean, expected.reshape(mean.shape))
    torch.testing.assert_close(autoencoder.decode(mean), decoded.reshape(2, 3, 32, 32))
    assert autoencoder.shape_of(32) == (1 if spread is None else 2, *mean.shape[1:])


def test_it_is_described_with_the_fingerprint_of_its_weights(folder: Callable[[str], Path], tmp_path: Path) -> None:
    autoencoder = PretrainedAutoencoder(str(folder("AutoencoderKL")))
    description = json.loads(json.dumps(describe(autoencoder)))
    assert build(description).fingerprint == autoencoder.fingerprint
    other = save_tiny("AutoencoderKL", tmp_path / "other", seed=1)
    assert PretrainedAutoencoder(str(other)).fingerprint != autoencoder.fingerprint
    copied = save_tiny("AutoencoderKL", tmp_path / "copy")
    assert PretrainedAutoencoder(str(copied)).fingerprint == autoencoder.fingerprint, "wherever it is"
    with pytest.raises(UsageError, match="differs from the one used in training"):
        build(description | {"source": str(other)}).prepare(torch.device("cpu"))


def test_that_of_a_pipeline_is_found(tmp_path: Path) -> None:
    save_tiny("AutoencoderKL", tmp_path / "pipeline/vae")
    (tmp_path / "pipeline/model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    assert PretrainedAutoencoder(str(tmp_path / "pipeline")).shape_of(16) == (2, 4, 8, 8)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": 5}, "is not an autoencoder of diffusers"),
        ({"_class_name": "UNet2DModel"}, "is not an autoencoder of diffusers, but of the class UNet2DModel"),
        ({"_class_name": "AutoencoderKL"}, "cannot be loaded"),
        (KL | {"block_out_channels": "wide"}, "cannot be loaded"),
        ({}, "is not an autoencoder of diffusers"),
        (None, "cannot be found"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, config: dict[str, Any] | None, sentence: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    autoencoder = PretrainedAutoencoder(str(tmp_path))

    def use() -> None:
        autoencoder.shape_of(16)
        autoencoder.prepare(torch.device("cpu"))

    with pytest.raises(UsageError, match=f"`autoencoder` {tmp_path} {sentence}") as told:
        use()
    assert "\n" not in str(told.value)


def test_a_size_that_it_cannot_halve_is_refused(folder: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"`image_size` 30 cannot be halved .*: pass 32"):
        PretrainedAutoencoder(str(folder("AutoencoderKLWan"))).shape_of(30)
    with pytest.raises(UsageError, match=r"`image_size` 30 cannot be halved as often as `autoencoder` haar does"):
        Haar().shape_of(30)


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
    with pytest.raises(UsageError, match="`image_size` 36 cannot be halved as often as `autoencoder` small does"):
        Small().shape_of(36)


@pytest.mark.parametrize(
    ("height", "width", "size"), [(36, 36, 40), (66, 88, 72), (88, 66, 72), (4, 4, 8), (9, 16, 72), (1001, 1001, 1000)]
)
def test_the_nearest_size_that_fits_is_named(height: int, width: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"`image_size` {min(height, width)} cannot be halved .*: pass {size}$"):
        Small().shape_of(height, width)


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


def test_the_exported_decoder_of_grey_pictures_has_one_channel() -> None:
    """The page reads as many channels as the model says."""
    space = Latents(Small(), 16, grey=True)
    assert space.shape is not None
    made = space.medium.decoders()["decoder"](torch.zeros(2, *space.shape))
    assert made.shape[1:] == space.medium.picture_shape == (1, 16, 16)


def test_latents_are_sampled_at_the_times_of_edm_by_default() -> None:
    """Pixels are sampled at uniform times."""
    network, seen = Unet(8, (1,), channels=8, image_size=4, attention_sides=()), list[float]()
    flow = RectifiedFlow(network, space=Latents(Small(), 32, (8, 4, 4)))
    flow.sample(1, steps=3, watch=lambda t, _x: seen.append(t), decode=False)
    assert seen == time_grid(3, "edm")
    assert RectifiedFlow(network).default_grid == "uniform"


def test_a_flow_of_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the flow is loaded: after an upgrade of the package, other weights would decode without a word."""
    flow = RectifiedFlow(Unet(8, (1,), channels=8, image_size=4, attention_sides=()), space=Latents(Small(), 32))
    write(flow, tmp_path / "run")
    save_pretrained(flow, tmp_path / "model")
    assert load_flow(tmp_path / "run").sample(1, steps=1).shape == (1, 3, 32, 32)
    monkeypatch.setattr(autoencoders, "_small_fingerprint", lambda: "another")
    for load, folder in ((load_flow, tmp_path / "run"), (load_pretrained, tmp_path / "model")):
        with pytest.raises(UsageError, match="`autoencoder` small has other weights than in training: install the"):
            load(folder)


@pytest.mark.parametrize("content", [b"", b"damaged" * 9, None])
def test_damaged_weights_of_the_package_are_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoencoders, "WEIGHTS", tmp_path / "small.safetensors")
    if content is not None:
        (tmp_path / "small.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"small\.safetensors is damaged \(.*: install this package again"):
        autoencoders._small.__wrapped__(torch.device("cpu"))
