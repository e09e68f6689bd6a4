"""Tests of the space of latents: draws from a stored distribution, and decoding."""

import json

import pytest
import torch

from rectified_flow.latents import space as latents_module
from rectified_flow.latents.space import Latents
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.registry import build, describe
from tests.extension.own_autoencoder import Haar


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
    assert again.noun == "4 px by haar"
    with pytest.raises(ValueError, match="2 means and 12 deviations for 12 channels"):
        Latents(Haar(1), 4, mean=[0.0, 0.0])


def test_what_looks_wrong_is_told() -> None:
    space = space_of_two()
    assert space.problem_with(torch.zeros(1, 1, 1, 12, 2, 2)) is None
    assert "(4, 8, 8), and those of the autoencoder (12, 2, 2)" in str(
        space.problem_with(torch.zeros(1, 1, 1, 4, 8, 8))
    )
    assert "not finite" in str(space.problem_with(torch.full((1, 1, 1, 12, 2, 2), torch.nan)))
