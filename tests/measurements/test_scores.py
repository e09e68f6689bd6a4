"""Tests of scores of fields on waves, noise and shifts, whose scores are known in closed form."""

from collections.abc import Callable
from math import isfinite, log10, nan, pi

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from scipy.stats import wasserstein_distance as distance_of_scipy
from torch import Tensor

from rectified_flow.measurements.scores import (
    correlations,
    field_scores,
    spectrum,
    wasserstein_distance,
    wave_numbers,
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wave(height: int, width: int, rows: int, columns: int) -> Tensor:
    """A wave of amplitude 3 and mean 280 with this number of cycles in each direction, ``[1, 1, h, w]``."""
    phase = rows * torch.arange(height)[:, None] / height + columns * torch.arange(width) / width
    return (280 + 3 * (2 * pi * phase + 0.4).cos())[None, None]


@pytest.mark.parametrize(
    ("size", "cycles", "shell"),
    [
        ((16, 16), (0, 5), 5),
        ((16, 16), (3, 4), 5),
        ((16, 16), (2, 3), 4),  # 3.6 cycles
        ((16, 16), (-2, 6), 6),  # 6.3 cycles
        ((16, 32), (0, 10), 5),  # 10 cycles along the longer side, whose length is twice the unit
        ((32, 16), (6, 4), 5),
        ((9, 9), (4, 0), 4),
    ],
)
def test_a_wave_is_in_one_shell(size: tuple[int, int], cycles: tuple[int, int], shell: int) -> None:
    """The variance 4.5 of the wave is the mean power over all modes of the field."""
    power = spectrum(wave(*size, *cycles))[0]
    assert power.shape == (min(size) // 2,)
    modes = ((wave_numbers(*size) + 0.5).long() == shell).sum()
    expected = torch.zeros_like(power)
    expected[shell - 1] = 4.5 * size[0] * size[1] / modes
    torch.testing.assert_close(power, expected, rtol=1e-5, atol=1e-5)


def test_waves_in_the_corner_are_in_no_shell() -> None:
    """7 and 7 cycles are 9.9, above the 8 of a side of 16."""
    assert spectrum(wave(16, 16, 7, 7)).max() < 1e-6


def test_parseval() -> None:
    """The mean power over all modes, the corners and the mean of the field among them, is the variance."""
    field = wave(12, 20, 1, 2) + wave(12, 20, 3, -4) + wave(12, 20, 0, 7)
    shells = (wave_numbers(12, 20) + 0.5).long()
    modes = torch.stack([(shells == shell).sum() for shell in range(1, 7)])
    total = (spectrum(field)[0] * modes).sum() / (12 * 20)
    torch.testing.assert_close(total, field.double().var(correction=0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [(16, 16), (12, 24), (25, 15)])
@pytest.mark.parametrize("known", [1.0, 0.4])
def test_white_noise_is_flat(size: tuple[int, int], known: float) -> None:
    """The spectrum is the variance minus (1 - known) / n, the share of the mean over n known pixels."""
    fields = 7 + torch.tensor([2.0, 0.1])[:, None, None] * random(1000, 2, *size)
    fields[torch.rand(fields.shape, generator=torch.Generator().manual_seed(1)) > known] = nan
    power = spectrum(fields) / torch.tensor([4.0, 0.01])[:, None]
    shells = (wave_numbers(*size) + 0.5).long()
    modes = torch.stack([(shells == shell).sum() for shell in range(1, min(size) // 2 + 1)])
    height = 1 - (1 - known) / (known * size[0] * size[1])
    deviations = (power - height) / (2 / (1000 * modes)).sqrt()  # each mode is a degree of freedom of chi-square
    assert 0.0005 < chi2.cdf(deviations.square().sum(), deviations.numel()) < 0.9995


def test_the_mean_over_fields_with_gaps_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = random(7, 2, 8, 8)
    together = spectrum(fields)
    torch.testing.assert_close(together, torch.stack([spectrum(each[None]) for each in fields]).mean(dim=0))
    monkeypatch.setattr("rectified_flow.measurements.scores.AT_ONCE", 3 * fields[0].numel())
    torch.testing.assert_close(spectrum(fields), together, msg="many fields are transformed in parts")
    unknown = torch.full((2, 2, 8, 8), nan)
    torch.testing.assert_close(spectrum(torch.cat((fields, unknown))), together, msg="unknown fields count not")
    moved = fields + 1000 * torch.arange(7)[:, None, None, None]
    torch.testing.assert_close(spectrum(moved), together, rtol=1e-3, atol=1e-3, msg="the mean has no power")
    constant = torch.full((1, 1, 8, 8), 280.1)
    constant[..., :3] = nan
    assert spectrum(constant).max() < 1e-20, "gaps are at the mean"


def test_distances_of_distributions() -> None:
    values, others = random(300), 2 * random(170, seed=1) + 1
    expected = distance_of_scipy(values.double(), others.double())
    assert wasserstein_distance(values, others) == pytest.approx(expected, rel=1e-12)
    gaps = torch.cat((others, torch.tensor([nan, nan])))
    assert wasserstein_distance(values, gaps) == pytest.approx(expected, rel=1e-12)
    assert wasserstein_distance(torch.tensor([0.0]), torch.tensor([1.0, 3.0])) == 2
    assert wasserstein_distance(values, values.flip(0)) == 0


def scores_of(change: Callable[[Tensor], Tensor], channels: int = 1) -> dict[str, float]:
    real = random(20, channels, 16, 16)
    return field_scores(change(real.double()), real, random(20, channels, 16, 16, seed=1))


def test_a_shift_of_the_mean_and_another_amplitude() -> None:
    scale = random(20, 1, 16, 16).double().std(correction=0).item()
    scores = scores_of(lambda real: real + 0.5)
    assert scores["channel_1_wasserstein"] == pytest.approx(0.5 / scale, rel=1e-9)
    assert scores["channel_1_spectrum_error"] == pytest.approx(0, abs=1e-9)
    for factor in (2, 0.5):
        scores = scores_of(lambda real, factor=factor: factor * real)  # type: ignore[misc]
        assert scores["channel_1_spectrum_error"] == pytest.approx(log10(4), rel=1e-9)


def test_errors_of_single_shells_are_averaged_as_squares() -> None:
    """Give one of the 8 shells of a field of side 16 ten times its power."""

    def amplify(real: Tensor) -> Tensor:
        numbers = wave_numbers(16, 16)
        ring = (numbers >= 2.5) & (numbers < 3.5)
        return torch.fft.ifft2(torch.fft.fft2(real) * torch.where(ring, 10**0.5, 1.0)).real

    assert scores_of(amplify)["channel_1_spectrum_error"] == pytest.approx((1 / 8) ** 0.5, rel=1e-6)


def test_shuffled_pixels_change_the_spectrum_alone() -> None:
    smooth = torch.cat([wave(16, 16, 1, cycles) for cycles in range(4)])
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    scores = field_scores(smooth.flatten(2)[..., order].view_as(smooth), smooth, smooth)
    assert scores["channel_1_wasserstein"] == 0
    assert scores["channel_1_spectrum_error"] > 1
    assert scores["channel_1_spectrum_error_of_real"] == scores["channel_1_wasserstein_of_real"] == 0


def test_correlations() -> None:
    one, two = random(2, 500, 1, 16, 16)
    fields = torch.cat((one, 280 + 5 * (0.6 * one + 0.8 * two), -one), dim=1)
    torch.testing.assert_close(correlations(fields), torch.tensor([0.6, -1, -0.6]).double(), rtol=0, atol=0.01)
    expected = np.corrcoef(fields.double().transpose(0, 1).flatten(1))
    torch.testing.assert_close(correlations(fields).numpy(), expected[[0, 0, 1], [1, 2, 2]])
    scores = field_scores(torch.cat((fields[:, :2], one), dim=1), fields, fields)
    assert scores["correlation_error"] == pytest.approx(2, abs=1e-9), "1 in place of -1 is the largest difference"
    assert scores["correlation_error_of_real"] == 0
    assert field_scores(-fields[:, :2] * torch.tensor([1, -1])[:, None, None], fields[:, :2], fields[:, :2])[
        "correlation_error"
    ] == pytest.approx(1.2, abs=0.02), "a smaller coefficient is an error, too"
    fields[:, 0, :8] = nan
    fields[:, 1, :, 8:] = nan
    both = fields[:, :2, 8:, :8].double().transpose(0, 1).flatten(1)
    assert correlations(fields)[0].item() == pytest.approx(np.corrcoef(both)[0, 1])


def test_scores_of_real_fields() -> None:
    """Scores of real fields compare two sets of real fields, and no samples."""
    real, other = random(30, 2, 8, 8), random(30, 2, 8, 8, seed=1)
    scores, worse = field_scores(other, real, other), field_scores(3 * other, real, other)
    names = ["channel_1_wasserstein", "channel_2_spectrum_error", "correlation_error"]
    assert {*names} <= scores.keys()
    assert len(scores) == 10
    for name in names:
        assert 0 < scores[name] == scores[f"{name}_of_real"] == worse[f"{name}_of_real"] < 0.2


def test_constant_samples() -> None:
    """The power of constant samples counts as 1e-12 of the variance, so that the error is finite."""
    samples, real = torch.full((6, 1, 16, 16), 280.1), 280.1 + random(6, 1, 16, 16)
    scores = field_scores(samples, real, real)
    assert scores["channel_1_spectrum_error"] == pytest.approx(12, abs=0.1)
    assert scores["channel_1_wasserstein"] == pytest.approx((2 / pi) ** 0.5, abs=0.05)
    without = field_scores(torch.full_like(real, nan), real, real)
    assert without.keys() == {"channel_1_wasserstein_of_real", "channel_1_spectrum_error_of_real"}


@pytest.mark.parametrize("size", [(1, 6), (2, 3), (5, 4)])
def test_one_small_field(size: tuple[int, int]) -> None:
    samples, real, other = (random(1, 2, *size, seed=seed) for seed in range(3))
    assert all(map(isfinite, field_scores(samples, real, other).values()))
