"""Scores of image-to-image translation, beside those of two baselines: the source itself, and a training picture.

A distance between distributions does not measure whether a result matches its source. If the targets of the sources
are known, results are compared with them. If not, the score measures how much structure of the source is kept.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rectified_flow.evaluation.distances import FIELDS, frechet_distance, kernel_distance
from rectified_flow.evaluation.evaluator import Comparison, Evaluator, render_sources
from rectified_flow.evaluation.features import in_batches
from rectified_flow.flows.flow import SOURCE
from rectified_flow.registry import register

NEAREST, MAX_VARIANTS = 10, 4
"""Number k of the top-k accuracy of retrieval, and largest number of results for each source that are compared."""


@register(role="score")
@torch.no_grad()
def translation(comparison: Comparison) -> dict[str, float]:
    """Score the translations of held-out pictures, or else of training pictures, for a flow that takes sources.

    Returns:
        ``copy_DISTANCE``: the Fréchet distance and the kernel distance of the sources. With known partners,
        ``partner_distance``: the mean squared distance to the partner in the features of the evaluator;
        ``best_of_K_partner_distance``: that of the nearest of K results for each source, if there are as many;
        ``partner_found``: the share of results whose partner is among the 10 nearest of all partners. Without partners,
        ``structure_found``: the share of results whose source is among the 10 nearest of all sources, by
        :func:`structure_of`. ``copy_`` and ``neighbour_`` before such a name: the score of the source itself, and of
        the training picture that is nearest to the source.
    """
    evaluator, flow = comparison.evaluator, comparison.flow
    if not flow.takes_source:
        return {}
    generated = comparison.generated
    if not evaluator.state.is_main_process:
        return {}
    data, rows, conditions = evaluator.given(flow)
    real = evaluator.real.features[0]
    results = generated[:, : real.shape[1]].cpu()
    count = min(len(rows), len(results))

    def copied(numbers: Sequence[int]) -> Tensor:
        return render_sources(flow, conditions[SOURCE][list(numbers)])

    copies = features_of(evaluator, 0, count, copied)
    names = evaluator.headline, evaluator.features[0].kernel_name
    distances = frechet_distance(real, copies), kernel_distance(real, copies, evaluator.seed)[0]
    scores = {f"copy_{name}": distance for name, distance in zip(names, distances, strict=True)}
    neighbours = torch.cdist(copies, real).argmin(dim=1)
    if getattr(data, "is_unpaired", False):
        wanted = structure_of(features_of(evaluator, -1, count, copied))
        own = {"": generated[:count, real.shape[1] :].cpu(), "neighbour_": evaluator.real.features[-1][neighbours]}
        return scores | {f"{name}structure_found": found(structure_of(each), wanted) for name, each in own.items()}
    partners = features_of(evaluator, 0, count, lambda numbers: data.read_pictures([rows[i] for i in numbers]))
    for name, each in {"": results[:count], "copy_": copies, "neighbour_": real[neighbours]}.items():
        scores[f"{name}partner_distance"] = (each - partners).square().sum(dim=1).mean().item()
        scores[f"{name}partner_found"] = found(each, partners)
    variants = min(len(results) // count, MAX_VARIANTS)
    if variants > 1:
        squares = (results[: variants * count].unflatten(0, (variants, count)) - partners).square().sum(dim=2)
        scores[f"best_of_{variants}_partner_distance"] = squares.amin(dim=0).mean().item()
    return scores


def features_of(evaluator: Evaluator, network: int, count: int, read: Callable[[Sequence[int]], Tensor]) -> Tensor:
    """Return the features ``[count, d]`` of pictures by a network of the evaluator, on the CPU.

    Args:
        evaluator: the evaluator.
        network: number of the network.
        count: number of pictures.
        read: returns the pictures of some numbers, uint8 ``[n, 3, h, w]``.
    """
    features, device = evaluator.features[network], evaluator.state.device
    batches = in_batches(range(count), evaluator.batch_size, f"features by {features.name}")
    return torch.cat([features.of(read(some).to(device)) for some in batches])


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
