"""Scores of a flow from pictures to pictures, beside those of two baselines: the source itself, and a training picture.

A distance to the training pictures does not tell whether a result belongs to its source. With known partners, results
are compared with them. Without, the score tells how much of the structure of the source is kept.
"""

import torch
from torch import Tensor

from rectified_flow.evaluation.distances import FIELDS, frechet_distance
from rectified_flow.evaluation.evaluator import Evaluator, render_sources
from rectified_flow.flows.flow import Flow

NEAREST, MOST_VARIANTS = 10, 4
"""Number of nearest pictures among which the right one counts as found, and largest number of results to choose of."""


@torch.no_grad()
def translation_scores(evaluator: Evaluator, flow: Flow, generated: Tensor) -> dict[str, float]:
    """Score the results of an evaluation. Main process only.

    Args:
        evaluator: the evaluator, whose held-out pictures, or else training pictures, were translated.
        flow: a flow from pictures to pictures.
        generated: the result of ``evaluator.generate``, ``[n, d]``.

    Returns:
        ``copy_DISTANCE``: the Fréchet distance of the sources. With known partners, ``partner_distance``: the mean
        squared distance to the partner in the features of the evaluator; ``best_of_K_partner_distance``: that of the
        nearest of K results for each source, if there are as many; ``partner_found``: the share of results whose
        partner is among the 10 nearest of all partners. Without, ``structure_found``: the share of results whose source
        is among the 10 nearest of all sources, by :func:`structure_of`. ``copy_`` and ``neighbour_`` before such a
        name: the score of the source itself, and of the training picture that is nearest to the source.
    """
    data, rows, sources = evaluator.translated(flow)
    features, real = evaluator.features[0], evaluator.real.features[0]
    shown = render_sources(flow, sources)
    copies, width = features.of(shown), real.shape[1]
    results = generated[:, :width].cpu()
    count = min(len(rows), len(results))
    copies, shown = copies[:count], shown[:count]
    scores = {f"copy_{evaluator.headline}": frechet_distance(real, copies)}
    neighbours = torch.cdist(copies, real).argmin(dim=1)
    if getattr(data, "varies", False):
        colours = evaluator.features[-1].of(shown)
        own = {"": generated[:count, width:].cpu(), "neighbour_": evaluator.real.features[-1][neighbours]}
        wanted = structure_of(colours)
        return scores | {f"{name}structure_found": found(structure_of(each), wanted) for name, each in own.items()}
    partners = features.of(data.read_pictures(rows[:count]))
    for name, each in {"": results[:count], "copy_": copies, "neighbour_": real[neighbours]}.items():
        scores[f"{name}partner_distance"] = (each - partners).square().sum(dim=1).mean().item()
        scores[f"{name}partner_found"] = found(each, partners)
    variants = min(len(results) // count, MOST_VARIANTS)
    if variants > 1:
        distances = (results[: variants * count].unflatten(0, (variants, count)) - partners).square().sum(dim=2)
        scores[f"best_of_{variants}_partner_distance"] = distances.amin(dim=0).mean().item()
    return scores


def structure_of(colours: Tensor) -> Tensor:
    """Return the size of each change of brightness between neighbouring fields, from the colours of 8 x 8 fields.

    Args:
        colours: features of :func:`average_colours <rectified_flow.evaluation.features.average_colours>`,
            ``[n, 3 * 8 * 8]``.
    """
    grey = colours.unflatten(1, (-1, FIELDS, FIELDS)).mean(dim=1)
    return torch.cat([grey.diff(dim=side).abs().flatten(1) for side in (1, 2)], dim=1)


def found(queries: Tensor, answers: Tensor) -> float:
    """Return the share of queries ``[n, d]`` whose own answer, of ``[n, d]``, is among the nearest answers."""
    distances = torch.cdist(queries, answers)
    nearer = (distances < distances.diagonal()[:, None]).sum(dim=1)
    return (nearer < NEAREST).float().mean().item()
