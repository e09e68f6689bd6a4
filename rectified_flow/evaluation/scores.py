"""Scores of a flow: how well samples match their sources or conditions, and the likelihood of pictures.

A distance between distributions measures neither whether a translation matches its source, nor whether a sample meets
its conditions. Such scores stand beside the same scores of real pictures.

*Likelihood.* Along the flow's ODE from data to noise, the density changes at a known rate (the instantaneous change of
variables, Chen et al. 2018, arXiv:1806.07366; Song et al. 2020, arXiv:2011.13456, section 4.3):
``log p(x_0) = log N(x_1) + integral from 0 to 1 of div v(x_t, t) dt``. The divergence is estimated as ``e . (J e)``
with random signs ``e``, which are the same along a path (Grathwohl et al. 2018, arXiv:1810.01367). The estimate is
unbiased, and costs one vector-Jacobian product.

A picture has 256 levels, and the density is that of continuous values, so each value is drawn uniformly within its
level (Theis et al. 2015, arXiv:1511.01844). The mean over such draws is at most the logarithm of the probability that
the flow gives to the 8-bit picture. Its negative is therefore an upper bound, in the unit of published figures.
:func:`rectified_flow.spaces.space.dequantised` draws within levels, and returns the change of volume.
Floating-point pictures are treated like those of 256 levels. For floating-point measurements, the density itself is
used.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import log, pi
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.condition import Values, WrittenCondition, written
from rectified_flow.distributed import map_over_ranks, on_main
from rectified_flow.errors import RunError, UsageError
from rectified_flow.evaluation.distances import FIELDS, frechet_distance, kernel_distance
from rectified_flow.evaluation.evaluator import AT_ONCE, Comparison, conditions_of, knows_targets, render_sources
from rectified_flow.evaluation.features import RealData, in_batches, stored_batch
from rectified_flow.evaluation.heldout import MIN_HELD_OUT
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Velocity, take_steps
from rectified_flow.registry import register
from rectified_flow.spaces.space import dequantised

NEAREST = 10  # number k of the top-k accuracy of retrieval


@register(role="score")
@torch.no_grad()
def translation(comparison: Comparison) -> dict[str, float]:
    """Score the translations of held-out pictures, or else of training pictures, for a flow that takes sources.

    Returns:
        ``copy_DISTANCE``: the Fréchet distance and the kernel distance of the sources. With known partners,
        ``partner_distance``: the mean squared distance to the partner in the features of the evaluator;
        ``partner_found``: the share of results whose partner is among the 10 nearest of all partners. Without partners,
        ``structure_found``: the share of results whose source is among the 10 nearest of all sources, by
        :func:`structure_of`. ``copy_`` and ``neighbour_`` before such a name: the score of the source itself, and of
        the training picture that is nearest to the source, apart from its own target.
    """
    evaluator, flow = comparison.evaluator, comparison.flow
    if not flow.takes_source:
        return {}
    generated = comparison.generated
    if not evaluator.state.is_main_process:
        return {}
    data, rows, conditions = evaluator.given(flow)
    count = min(len(rows), len(generated))
    results, colours = evaluator.by_network(generated[:count])
    real, real_colours = evaluator.real.features

    def features_of(read: Callable[[Sequence[int]], Tensor]) -> list[Tensor]:
        # Only the main process runs this: a requested stop must not interrupt it, as the other processes wait for it.
        batches = (range(first, min(first + AT_ONCE, count)) for first in range(0, count, AT_ONCE))
        return evaluator.by_network(torch.cat([evaluator.extract(read(some)) for some in batches]))

    copies, copied_colours = features_of(lambda numbers: render_sources(flow, conditions[SOURCE][list(numbers)]))
    network = evaluator.features[0]
    scores = {
        f"copy_{network.frechet_name}": frechet_distance(real, copies),
        f"copy_{network.kernel_name}": kernel_distance(real, copies, evaluator.seed)[0],
    }
    distances = torch.cdist(copies, real)
    if data is evaluator.dataset and knows_targets(flow, data):  # the own target is one of the training pictures
        distances[range(count), rows[:count]] = torch.inf
    neighbours = distances.argmin(dim=1)
    if not knows_targets(flow, data):
        wanted, own = structure_of(copied_colours), {"": colours, "neighbour_": real_colours[neighbours]}
        return scores | {f"{name}structure_found": found(structure_of(each), wanted) for name, each in own.items()}
    partners, _ = features_of(lambda numbers: data.read_pictures([rows[number] for number in numbers]))
    for name, each in {"": results, "copy_": copies, "neighbour_": real[neighbours]}.items():
        scores[f"{name}partner_distance"] = (each - partners).square().sum(dim=1).mean().item()
        scores[f"{name}partner_found"] = found(each, partners)
    return scores


def structure_of(colours: Tensor) -> Tensor:
    """Return the size of each change of brightness between neighbouring fields, from the colours of 8 x 8 fields.

    Args:
        colours: features of :func:`average_colours <rectified_flow.evaluation.features.average_colours>`,
            ``[n, 3 * 8 * 8]``.
    """
    grey = colours.unflatten(1, (-1, FIELDS, FIELDS)).mean(dim=1)
    return torch.cat([grey.diff(dim=side).abs().flatten(1) for side in (1, 2)], dim=1)


def found(queries: Tensor, answers: Tensor, nearest: int = NEAREST) -> float:
    """Return the share of queries ``[..., n, d]`` whose own answer, of ``[..., n, d]``, is among the nearest ones."""
    distances = torch.cdist(queries, answers)
    nearer = (distances < distances.diagonal(dim1=-2, dim2=-1)[..., None]).sum(dim=-1)
    return (nearer < nearest).float().mean().item()


MAX_SAMPLES, MAX_FITTED, FOLDS = 500, 3000, 5
"""Largest numbers of samples to score and of real pictures to fit on, and number of folds of cross-validation."""
PENALTIES = 10.0 ** torch.arange(-4, 3)
"""Penalties to choose from, relative to the mean squared distance of the features from their mean."""


@register(role="score")
@torch.no_grad()
def agreement(comparison: Comparison) -> dict[str, float]:
    """Score how well samples meet their conditions; a condition with fewer than 8 known rows is left out. Collective.

    The conditions are those of held-out rows, for which further samples are generated. Without held-out rows, they are
    those of training rows, and a regression judges only rows that it was not fitted on, and their samples.

    Returns:
        On the main process: ``NAME_accuracy`` of labels, ``NAME_correlation`` between numbers and their predictions,
        both as shares of the training data below them (0 if one is constant), and these scores ``_of_real`` pictures;
        ``_by_chance``: the expected score of samples in random order. Other conditions have scores of their own.
    """
    evaluator, flow = comparison.evaluator, comparison.flow
    kinds = written(flow.conditions)
    if not kinds:
        return {}
    dataset, held_out, count = evaluator.dataset, evaluator.held_out, min(evaluator.num_samples, MAX_SAMPLES)
    data = dataset if held_out is None else held_out
    rows = evaluator.order(data, count)
    asked = conditions_of(flow, data, rows)
    if held_out is not None and not flow.takes_source:  # from sources, they were generated with these conditions
        how = {**comparison.options, "conditions": asked}
        generated = map_over_ranks(evaluator.state, count, lambda some: evaluator.sample_features(flow, some, **how))
    else:
        generated = comparison.generated
    if not evaluator.state.is_main_process:
        return {}
    fitted = evaluator.order(dataset, MAX_FITTED)  # begins with `rows` if nothing is held out
    real, unseen = evaluator.real.features[0][fitted], evaluator.real.held_out
    samples = generated[: count - count % len(rows), : real.shape[1]].cpu().unflatten(0, (-1, len(rows)))
    pictures = torch.cat(((real[: len(rows)] if unseen is None else unseen[rows])[None], samples))
    values, scores = dataset.condition_values(fitted), dict[str, float]()
    for name in [name for name in kinds if name in asked]:
        kind, known, fit = kinds[name], *(_known(kinds[name], each[name]) for each in (asked, values))
        own = kind.scores(asked[name][known], pictures[:, known])
        scores |= {f"{name}_{score}": value for score, value in own.items()}
        targets, all_asked = kind.targets(values[name]), kind.targets(asked[name])
        if targets is not None and all_asked is not None and min(len(known), len(fit)) >= MIN_HELD_OUT:
            folds = [(fit, known)]
            if held_out is None:
                folds = [(fit[~torch.isin(fit, part)], part) for part in (known[i::FOLDS] for i in range(FOLDS))]
            predicted = [ridge(real[some], targets[some], pictures[:, part]) for some, part in folds]
            wanted = all_asked[torch.cat([part for _, part in folds])]
            scores |= _compared(name, wanted, torch.cat(predicted, dim=1))
    return scores


def ridge(features: Tensor, targets: Tensor, queries: Tensor) -> Tensor:
    """Predict targets ``[..., k]`` by ridge regression; the penalty minimises the leave-one-out error."""
    mean, offset = features.double().mean(dim=0), targets.mean(dim=0)
    centred, wanted = features.double() - mean, targets - offset
    left, size, axes = torch.linalg.svd(centred, full_matrices=False)

    def error(penalty: Tensor) -> float:
        shrunk = left * (size**2 / (size**2 + penalty))
        leverage = 1 / len(left) + (shrunk * left).sum(dim=1, keepdim=True)
        return ((wanted - shrunk @ (left.T @ wanted)) / (1 - leverage)).square().sum().item()

    scale = centred.square().sum(dim=1).mean().clamp(min=torch.finfo(size.dtype).tiny)
    penalty = min(PENALTIES * scale, key=error)
    return offset + (queries.double() - mean) @ axes.T @ ((size / (size**2 + penalty))[:, None] * (left.T @ wanted))


def _compared(name: str, wanted: Tensor, predicted: Tensor) -> dict[str, float]:
    """Compare targets ``[n, k]`` with those that are predicted ``[1 + v, n, k]``, first from real pictures."""
    real, samples = predicted[:1], predicted[1:]
    if wanted.shape[1] > 1:  # labels
        own, of_real = ((each.argmax(dim=2) == wanted.argmax(dim=1)).double().mean() for each in (samples, real))
        chance = F.one_hot(samples.argmax(dim=2), wanted.shape[1]).double().mean(dim=(0, 1)) @ wanted.mean(dim=0)
        scores = {"accuracy": own, "accuracy_of_real": of_real, "accuracy_by_chance": chance}
    else:
        pairs = ((wanted.expand_as(each) - wanted.mean(), each - each.mean()) for each in (samples, real))
        own, of_real = (F.cosine_similarity(one.flatten(), other.flatten(), dim=0) for one, other in pairs)
        scores = {"correlation": own, "correlation_of_real": of_real}
    return {f"{name}_{score}": value.item() for score, value in scores.items()}


def _known(kind: WrittenCondition, values: Tensor) -> Tensor:
    """Return the numbers of the rows with a value."""
    return (~kind.is_none(values)).nonzero()[:, 0]


MAX_PICTURES = 128  # largest number of training pictures, and of held-out pictures, that are measured


@register(role="score")
def likelihood(comparison: Comparison) -> dict[str, float]:
    """Estimate the mean bits per dimension of training and of held-out pictures, with as many steps as samples have.

    Returns:
        ``bits_per_dimension`` and ``heldout_bits_per_dimension``, and the standard error ``_error`` of each mean.
    """
    evaluator, numbers = comparison.evaluator, dict[str, float]()
    for prefix, data in {"": evaluator.dataset, "heldout_": evaluator.held_out}.items():
        if data is None:
            continue
        rows = evaluator.order(data, MAX_PICTURES)
        bits = map_over_ranks(evaluator.state, len(rows), partial(estimates, comparison, data, rows))
        numbers |= on_main(evaluator.state, partial(_summary, f"{prefix}bits_per_dimension", bits))
    return numbers


def _summary(name: str, bits: Tensor) -> dict[str, float]:
    if not bits.isfinite().all():
        raise RunError("the ODE of the flow diverges for some of the pictures: raise `steps`")
    return {name: bits.mean().item(), f"{name}_error": bits.std().item() / len(bits) ** 0.5}


def _checked(flow: Flow) -> RectifiedFlow:
    """Return a flow with an ODE of the data alone, whose velocity exists at time 0."""
    whole = not flow.takes_source and not flow.space.has_missing
    if whole and isinstance(flow, RectifiedFlow) and flow.prediction != "clean":
        return flow
    needs = "a rectified flow from noise to data without unknown values, and a prediction of the velocity or the noise"
    raise UsageError(f"`metric` likelihood needs {needs}")


def estimates(comparison: Comparison, data: RealData, rows: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """Return the bits per dimension of some of the rows of a dataset, float64 ``[n]``, under their conditions."""
    evaluator, flow, parts = comparison.evaluator, _checked(comparison.flow), list[Tensor]()
    times = cubic_times(comparison.options["steps"])
    with torch.autocast(flow.device.type, enabled=False):
        for some in in_batches(numbers, evaluator.batch_size, "likelihood"):
            batch = stored_batch(data, [rows[number] for number in some], flow)
            conditions = {name: batch[name] for name in flow.conditions if name in batch}
            parts.append(bits_per_dimension(flow, batch[flow.space.key], conditions, times, evaluator.seed))
    return torch.cat(parts)


def cubic_times(steps: int) -> list[float]:
    """Return the cubes of ``steps + 1`` evenly spaced numbers: most of the change in density happens near time 0."""
    return [(step / steps) ** 3 for step in range(steps + 1)]


def bits_per_dimension(
    flow: RectifiedFlow, pictures: Tensor, conditions: Values, times: list[float], seed: int = 0
) -> Tensor:
    """Estimate the bits per dimension of pictures, each by one draw within its levels and one probe.

    The draws are a function of the seed and of the picture. So an estimate does not depend on the other pictures of the
    batch.

    Args:
        flow: a rectified flow.
        pictures: stored data ``[b, c, h, w]``.
        conditions: their conditions by name.
        times: the times that bound the steps, from 0 to 1.
        seed: seed of all draws.

    Returns:
        The estimates, float64 ``[b]`` on the CPU.
    """
    conditions, device = {name: each.to(flow.device) for name, each in conditions.items()}, flow.device
    with randomness.deterministic(randomness.Samples(seed, [crc32(each.numpy()) for each in pictures.cpu()]), device):
        x, log_volume = dequantised(flow.space, pictures.to(device))
        probe = 2.0 * randomness.randint("probe", 2, x.shape, device) - 1
        densities = log_density(flow, x, conditions, times, probe)
    return -densities / (x[0].numel() * log(2)) - log_volume


@torch.no_grad()
def log_density(flow: RectifiedFlow, x: Tensor, conditions: Values, times: list[float], probe: Tensor) -> Tensor:
    """Estimate the logarithm of the density at ``x``, by Runge-Kutta steps of order 4.

    Args:
        flow: a rectified flow whose velocity exists at time 0.
        x: data as the flow works on them ``[b, ...]``.
        conditions: their conditions by name.
        times: the times that bound the steps, from 0 to 1.
        probe: random signs ``[b, ...]``.

    Returns:
        The estimates in the units of ``x``, float64 ``[b]`` on the CPU.
    """

    def derivative(state: Tensor, t: float) -> Tensor:
        """Return the velocity and its divergence of states ``[b, d + 1]``: ``x``, and the integral so far."""
        now = state[:, :-1].reshape(x.shape).requires_grad_()
        with torch.enable_grad():
            velocity = flow.exact_velocity(now, now.new_full((len(now),), t), **conditions)
            [product] = torch.autograd.grad(velocity, now, probe)
        divergence = (product * probe).flatten(1).sum(dim=1, keepdim=True)
        return torch.cat((velocity.detach().flatten(1), divergence), dim=1)

    state = torch.cat((x.flatten(1), x.new_zeros(len(x), 1)), dim=1)
    with flow.evaluating():
        state = take_steps(partial(_runge_kutta, derivative), state, times).double().cpu()
    noise, integral = state[:, :-1], state[:, -1]
    return integral - 0.5 * (noise.square() + log(2 * pi)).sum(dim=1)


def _runge_kutta(velocity: Velocity, x: Tensor, t: float, t_next: float) -> Tensor:
    dt, middle = t_next - t, (t + t_next) / 2
    first = velocity(x, t)
    second = velocity(x + dt / 2 * first, middle)
    third = velocity(x + dt / 2 * second, middle)
    return x + dt / 6 * (first + 2 * second + 2 * third + velocity(x + dt * third, t_next))
