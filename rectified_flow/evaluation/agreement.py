"""Scores of how well samples meet their conditions, beside the same scores of real pictures.

A distance between distributions does not measure whether a sample suits its own condition. These scores do: ridge
regression on the features of an evaluator is fitted on real pictures, and predicts the labels and numbers of samples.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rectified_flow.condition import WrittenCondition, written
from rectified_flow.distributed.collectives import map_over_ranks
from rectified_flow.evaluation.evaluator import Comparison, conditions_of
from rectified_flow.evaluation.heldout import MIN_HELD_OUT
from rectified_flow.registry import register

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
    asked = conditions_of(flow, data, rows, evaluator.seed)
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
