"""Scores of fields of measurements: spectra, one-point distributions and correlations between channels.

Feature networks are trained on photographs, and do not suit measurements. These scores compare samples with real fields
in physical units ``[n, c, h, w]``, whose pixels are finite, or NaN if unknown. Each score stands beside the same score
of other real fields, which is not 0 either, because the number of fields is limited.
"""

from itertools import combinations
from math import isfinite, nan

import torch
from torch import Tensor

from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import Batches
from rectified_flow.distributed import map_over_ranks
from rectified_flow.evaluation.evaluator import Comparison
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.flows.flow import Flow
from rectified_flow.registry import register

FLOOR = 1e-12
"""Lower limit of the power, as a share of the variance of real fields: smaller powers are rounding of float32."""
AT_ONCE = 2**22  # number of pixels that are transformed at once; more if one field alone has more


@register(role="score")
@torch.no_grad()
def spectra(comparison: Comparison) -> dict[str, float]:
    """Return the :func:`field_scores` of samples and of as many training fields, in physical units.

    The other real fields are held-out fields, or half of the training fields if there are none.
    """
    evaluator, flow = comparison.evaluator, comparison.flow
    data, held_out = evaluator.dataset, evaluator.held_out
    count = min(evaluator.num_samples, len(data) if held_out is not None else len(data) // 2)
    order = evaluator.order(data, 2 * count)
    others = (data, order[count:]) if held_out is None else (held_out, evaluator.order(held_out, count))

    def sample(numbers: list[int]) -> Tensor:
        batches = evaluator.sampled(flow, numbers, render=False, **comparison.options)
        return torch.cat([data.cpu() for data in batches])

    samples = map_over_ranks(evaluator.state, evaluator.num_samples, sample)
    if not evaluator.state.is_main_process:
        return {}
    real, other = (_physical(flow, *each) for each in ((data, order[:count]), others))
    return field_scores(samples, real, other)


def _physical(flow: Flow, data: ImageDataset | RenderedItems, rows: list[int]) -> Tensor:
    """Return real fields as the flow generates them, float32 ``[n, c, h, w]`` in physical units."""
    stored = Batches(data).__getitems__(rows)
    return flow.space.decode(flow.space.encode(stored[flow.space.key]))


def wave_numbers(height: int, width: int) -> Tensor:
    """Return the wave number of each mode of the discrete Fourier transform, float64 ``[h, w]``.

    The unit is cycles per length of the shorter side, and pixels are square. So a wave has the same number in both
    directions, whatever the shape of the field.
    """
    rows, columns = (torch.fft.fftfreq(side, dtype=torch.float64) for side in (height, width))
    return min(height, width) * torch.hypot(rows[:, None], columns)


def shell_means(power: Tensor) -> Tensor:
    """Average the power of modes ``[c, h, w]`` over the directions of the wave, in shells 1 to ``min(h, w) // 2``.

    Shell k has the modes with wave numbers from k - 1/2 to k + 1/2. Modes in the corners, beyond the last shell, are
    left out.
    """
    last = min(power.shape[-2:]) // 2
    shells = (wave_numbers(*power.shape[-2:]) + 0.5).long().clamp(max=last + 1).flatten().to(power.device)
    sums = power.new_zeros(len(power), last + 2).index_add(1, shells, power.flatten(1))
    return (sums / shells.bincount(minlength=last + 2))[:, 1:-1]


def spectrum(fields: Tensor) -> Tensor:
    """Compute the power spectrum of each channel of fields ``[n, c, h, w]``, averaged over directions and fields.

    The power of a mode is |DFT|^2 / (number of known pixels), where the DFT is of the deviations from the mean over the
    known pixels of the field, and an unknown pixel has the deviation 0. The mean power of all h * w modes is the
    variance of the known pixels (Parseval's theorem). For white noise, the power of each shell is the variance, for any
    share of known pixels if these are many. Gaps smooth the spectrum of other fields (Hivon et al. 2002,
    arXiv:astro-ph/0105302).

    The result is in squared units of the channel, float64 ``[c, k]``, in the shells of :func:`shell_means`, and NaN for
    a channel without known pixels.
    """
    spectra = list[Tensor]()
    for some in fields.split(max(1, AT_ONCE // fields[0].numel())):
        known = ~some.isnan()
        deviations = torch.where(known, some - some.double().nanmean(dim=(2, 3), keepdim=True), 0)
        power = torch.fft.fft2(deviations).abs().square() / known.sum(dim=(2, 3), keepdim=True)
        spectra.append(shell_means(power.flatten(0, 1)).unflatten(0, some.shape[:2]))
    return torch.cat(spectra).nanmean(dim=0)


def correlations(fields: Tensor) -> Tensor:
    """Compute Pearson's correlation coefficient of each pair of channels, over all pixels that are known in both.

    The pairs are (1, 2), (1, 3), ..., (2, 3), ...; a coefficient is 0 where it is undefined.
    """
    values = [_correlation(fields[:, pair]) for pair in combinations(range(fields.shape[1]), 2)]
    return torch.tensor(values, dtype=torch.float64)


def _correlation(fields: Tensor) -> float:
    pairs = fields.double().transpose(0, 1).flatten(1)
    known = pairs[:, ~pairs.isnan().any(dim=0)]
    return torch.corrcoef(known)[0, 1].nan_to_num(0.0).item()


def wasserstein_distance(values: Tensor, others: Tensor) -> float:
    """Compute the 1-Wasserstein distance of the distributions of two sets of numbers, of any sizes.

    It is the integral of the absolute difference of the cumulative distribution functions (Ramdas et al. 2017,
    arXiv:1509.02237). NaN counts as unknown; without known numbers, the distance is NaN.
    """
    from scipy import stats  # slow to import

    known = [_known(each).cpu().numpy() for each in (values, others)]
    return float(stats.wasserstein_distance(*known)) if all(map(len, known)) else nan


def field_scores(samples: Tensor, real: Tensor, other: Tensor) -> dict[str, float]:
    """Compare samples with real fields, and other real fields with the same real fields.

    Args:
        samples: samples ``[n, c, h, w]``.
        real: real fields ``[m, c, h, w]``.
        other: other real fields, as many as ``real`` where possible: fewer have larger scores by chance.

    Returns:
        For each channel, counted from 1, ``channel_1_wasserstein``: the 1-Wasserstein distance of the values of pixels,
        in standard deviations of ``real``; ``channel_1_spectrum_error``: the root mean square over shells of
        log10(power of samples / power of real), in decades, which is a tenth of the log-spectral distance in dB (Gray
        and Markel 1976, doi:10.1109/TASSP.1976.1162849). For several channels, ``correlation_error``: the largest
        absolute difference of a correlation coefficient. ``_of_real``: the same scores of ``other``. All are 0 at best.
        Scores that are undefined are left out, such as those of a channel that is constant in ``real``.
    """
    scale = torch.stack([_known(channel).std(correction=0) for channel in real.unbind(dim=1)])
    scores, expected, coefficients = dict[str, float](), _relative_spectrum(real, scale), correlations(real)
    for end, fields in {"": samples, "_of_real": other}.items():
        errors = (_relative_spectrum(fields, scale) / expected).log10().square().mean(dim=1).sqrt().tolist()
        for channel, error in enumerate(errors):
            distance = wasserstein_distance(fields[:, channel], real[:, channel]) / scale[channel]
            scores[f"channel_{channel + 1}_wasserstein{end}"] = distance.item()
            scores[f"channel_{channel + 1}_spectrum_error{end}"] = error
        if len(scale) > 1:
            scores[f"correlation_error{end}"] = (correlations(fields) - coefficients).abs().max().item()
    return {name: scores[name] for name in sorted(scores) if isfinite(scores[name])}


def _known(values: Tensor) -> Tensor:
    """Return the numbers that are not NaN, float64 ``[n]``."""
    return values[~values.isnan()].double()


def _relative_spectrum(fields: Tensor, scale: Tensor) -> Tensor:
    """Return the spectrum over the squares of ``scale`` ``[c]``, at least :data:`FLOOR`, on the CPU ``[c, k]``."""
    return (spectrum(fields).cpu() / scale[:, None].square()).clamp(min=FLOOR)
