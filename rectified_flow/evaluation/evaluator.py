"""Compare the samples of a flow with its training data, on all processes together."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.distributed import join_processes, map_over_ranks, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.evaluation.distances import Metric, RealFeatures, nearest, nearness
from rectified_flow.evaluation.features import (
    Features,
    RealData,
    average_colours,
    in_batches,
    load_features,
    reference_features,
    stored_batch,
)
from rectified_flow.flows.flow import SOURCE, Flow, sample_batches
from rectified_flow.registry import Document, before_lookup, find, names
from rectified_flow.spaces.medium import Medium

METRICS = ("frechet", "kernel", "copies")  # the metrics that cost little
SHOWN, NEIGHBOURS_SHOWN = 8, 5
AT_ONCE = 64  # number of sources that are read at once
before_lookup(partial(import_module, "rectified_flow.evaluation.scores"))  # it imports this module


class Evaluator:
    """A comparison of the samples of a flow with its training data, by the features of both.

    Every process must call the same methods in the same order.

    Args:
        dataset: the training data: pictures, or the items of another dataset as :class:`RenderedItems
            <rectified_flow.evaluation.features.RenderedItems>`, which the flow's space renders.
        feature_network: the network whose features are compared.
        num_samples: samples to generate for each comparison.
        seed: seed of the samples, and of the subsets of the kernel distance.
        batch_size: samples that each process generates at once.
        held_out: data of the same kind that were not trained on, if there are any.
        metrics: names of registered metrics (:mod:`rectified_flow.evaluation.distances`) and of :data:`Score`.
        medium: medium of the flows; to find copies, its autoencoder, if any, encodes and decodes the data.

    Raises:
        UsageError: if the feature network is unavailable, or a metric is not registered.
    """

    def __init__(
        self,
        dataset: RealData,
        feature_network: FeatureNetwork,
        *,
        num_samples: int,
        seed: int = 0,
        batch_size: int = 64,
        held_out: RealData | None = None,
        metrics: Sequence[str] = METRICS,
        medium: Medium | None = None,
    ) -> None:

        self.dataset, self.held_out, self.state = dataset, held_out, join_processes()
        self.num_samples, self.seed, self.batch_size = num_samples, seed, batch_size
        known, of_scores = dict.fromkeys(metrics), names("score")
        self.scores: list[Score] = [find("metric", "score", name) for name in known if name in of_scores]
        others = [name for name in known if name not in of_scores]
        self.metrics: list[Metric] = [find("metric", "metric", name, of_scores) for name in others]
        self.medium = medium
        self._given = WeakKeyDictionary[Flow, dict[str, Tensor]]()
        self._network = feature_network
        if self.metrics:
            _ = self.features  # a network that is unavailable ends a run before it begins

    @cached_property
    def features(self) -> list[Features]:
        """The feature networks; scores that need none do not load them."""
        return [load_features(self._network, self.state.device), average_colours()]

    @property
    def settings(self) -> Document:
        """Settings that must match for two results to be comparable; the feature network, once it is loaded."""
        info, network = self.dataset.info, self.features[0] if "features" in vars(self) else None
        return {
            **({} if network is None else {"feature_network": network.name, "resize": network.resize}),
            "dataset": info.source,
            "split": getattr(getattr(self.dataset, "described", None), "split", "train"),
            "image_size": info.image_size,
            "num_real": len(self.dataset),
            "num_samples": self.num_samples,
            "seed": self.seed,
            **({} if info.framing is None else {"framing": asdict(info.framing)}),
        }

    @property
    def headline(self) -> str:
        """The name of the number by which flows are ranked, the smallest first."""
        return self.features[0].frechet_name

    def prepare(self) -> None:
        """Extract the features of the real data, which may take long the first time of all. Collective."""
        _ = self.real

    @cached_property
    def real(self) -> RealFeatures:
        """Features of the real data; extracted by all processes, kept by the main one."""
        training, held_out = self._features_of(self.dataset), self._features_of(self.held_out)
        seen, unseen = list[Tensor](), held_out
        if self.medium is not None and self.medium.codec:
            seen, unseen = (self._features_of(data, self.medium) for data in (self.dataset, self.held_out))
        return RealFeatures(self.features, training, next(iter(held_out), None), self.seed, seen, unseen)

    def _features_of(self, data: RealData | None, medium: Medium | None = None) -> list[Tensor]:
        """Return the features of some data by network; none without data. Collective."""
        if data is None:
            return []
        return [reference_features(data, each, self.batch_size, medium) for each in self.features]

    def generate(self, flow: Flow, **how: object) -> Tensor:
        """Generate all samples, and return their features as :meth:`sample_features` does. Collective.

        Their conditions are those of :meth:`given`.

        Raises:
            Interrupted: on every process, if a stop was requested on one.
        """
        self.prepare()
        return map_over_ranks(self.state, self.num_samples, lambda numbers: self.sample_features(flow, numbers, **how))

    def sample_features(self, flow: Flow, numbers: Sequence[int], **how: object) -> Tensor:
        """Generate some samples, and return their features by all networks side by side, ``[n, d_1 + d_2]``.

        Args:
            flow: the flow to sample from.
            numbers: the numbers of the samples.
            how: options of ``flow.sample``; without ``conditions``, these are those of :meth:`given`.

        Raises:
            Interrupted: if a stop was requested meanwhile.
        """
        return torch.cat([self.extract(images) for images in self.sampled(flow, numbers, **how)])

    def extract(self, images: Tensor) -> Tensor:
        """Return the features of images by all networks side by side, on the CPU."""
        return torch.cat([each.of(images.to(self.state.device)) for each in self.features], dim=1)

    def sampled(self, flow: Flow, numbers: Sequence[int], **how: Any) -> Iterator[Tensor]:
        """Generate some samples, and yield batches of them as :func:`sample_batches` does with these options."""
        how = {"steps": flow.default_steps, **how}
        if "conditions" not in how:
            how["conditions"] = self.given(flow)[2]
        doing = f"evaluating {how['steps']} step{'s' * (how['steps'] > 1)}"
        for some in in_batches(numbers, self.batch_size, doing):
            [(_, data)] = sample_batches(flow, some, seed=self.seed, batch_size=self.batch_size, **how)
            yield data

    def measure(self, comparison: "Comparison", *, required: Collection[str] = ()) -> dict[str, float]:
        """Return all metrics and scores by name. Only the main process returns metrics on features. Collective.

        Args:
            comparison: the comparison.
            required: scores that must apply to the flow.

        Raises:
            UsageError: if a required score gives no number.
        """
        scores: dict[str, float] = {}
        for score in self.scores:  # before the metrics, since one that does not apply needs no samples
            found, name = score(comparison), score.__name__
            if name in required and not on_main(self.state, partial(len, found)):
                raise UsageError(f"`metric` {name} does not apply to this run, and gives no number: leave it out")
            scores |= found
        if not self.metrics:
            return scores
        generated = comparison.generated
        return (self.compute(generated) if self.state.is_main_process else {}) | scores

    def compute(self, generated: Tensor) -> dict[str, float]:
        """Compute the metrics of features, by name, from the features of samples. Main process only."""
        features = self.by_network(generated)
        return {name: number for metric in self.metrics for name, number in metric(self.real, features).items()}

    def beside_neighbours(self, comparison: "Comparison") -> Tensor:
        """Render the samples that are most like copies, each before the training images that are nearest to it.

        Main process only. The samples are generated again, with the same result.

        Returns:
            Images, uint8 ``[n, 1 + k, c, h, w]``.
        """
        features, real = self.by_network(comparison.generated), self.real.copied
        worst = nearness(features, real).argsort()[:SHOWN]
        options = {"seed": self.seed, "conditions": self.given(comparison.flow)[2], **comparison.options}
        [(_, sampled)] = sample_batches(comparison.flow, worst.tolist(), batch_size=SHOWN, **options)
        return beside_nearest(sampled.cpu(), features[0][worst], real[0], self.dataset)

    def by_network(self, features: Tensor) -> list[Tensor]:
        """Split concatenated features into those of each network, ``[n, d]``."""
        widths = [each.shape[1] for each in self.real.features]
        return [part.contiguous() for part in features.cpu().split(widths, dim=1)]

    def order(self, data: RealData, most: int) -> list[int]:
        """Return the numbers of some data, the first ``most`` in a random order."""
        order = torch.randperm(len(data), generator=randomness.generator("cpu", self.seed, "labels"))
        return order[:most].tolist()

    def given(self, flow: Flow) -> tuple[RealData, list[int], dict[str, Tensor]]:
        """Return the data whose conditions samples get, the numbers of these data, and their conditions.

        Conditions are those of training data, whose copies samples may be. Sources are those of held-out data, if there
        are any, since training showed the targets of the training data. The order is random, so that any number of rows
        has their shares.
        """
        translates = getattr(flow, "takes_source", False)  # other modules than flows can be sampled, too
        data: RealData = self.held_out if translates and self.held_out is not None else self.dataset
        rows = self.order(data, self.num_samples)
        if flow not in self._given:
            self._given[flow] = conditions_of(flow, data, rows)
        return data, rows, self._given[flow]


def knows_targets(flow: Flow, data: RealData) -> bool:
    """Return whether each of some data is the target of a source from which the flow makes a sample."""
    return flow.takes_source and not getattr(data, "is_unpaired", False)


def suited(metrics: Sequence[str], flow: Flow, training: RealData, held_out: RealData | None) -> list[str]:
    """Return the metrics, without ``copies`` if the target of a sample is a training picture."""
    if held_out is None and knows_targets(flow, training):
        return [name for name in metrics if name != "copies"]
    return [*metrics]


def beside_nearest(images: Tensor, features: Tensor, real: Tensor, data: RealData) -> Tensor:
    """Return images, each followed by the training images with the nearest features.

    Args:
        images: the images, uint8 ``[n, c, h, w]``.
        features: their features ``[n, d]``.
        real: the features of the training images.
        data: the training images.

    Returns:
        Images, uint8 ``[n, 1 + k, c, h, w]``.
    """
    near = nearest(features, real, NEIGHBOURS_SHOWN)
    shown = data.read_pictures(near.flatten().tolist()).unflatten(0, near.shape)
    return torch.cat((images[:, None], shown), dim=1)


@dataclass
class Comparison:
    """One flow under an evaluation; its samples are generated when a metric first needs them.

    Args:
        evaluator: the evaluator.
        flow: the flow.
        options: options of ``flow.sample``.
        samples: the result of :meth:`Evaluator.generate` with these options, if it is known.
    """

    evaluator: Evaluator
    flow: Flow
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: Tensor | None = None

    @cached_property
    def generated(self) -> Tensor:
        """The result of :meth:`Evaluator.generate` with these options. Collective."""
        return self.evaluator.generate(self.flow, **self.options) if self.samples is None else self.samples


Score = Callable[[Comparison], Mapping[str, float]]
"""Numbers by name, of the main process, from a flow itself. Collective, so that it can generate or measure more.

It is registered with ``@register(role="score")``, and is empty for a flow that it does not apply to.
"""


def conditions_of(flow: Flow, data: Any, numbers: Sequence[int]) -> dict[str, Tensor]:
    """Return the conditions and sources of some items by name, ``[n, ...]`` on the CPU, for ``flow.sample``."""
    if not getattr(flow, "takes_source", False):  # other modules than flows can be sampled, too
        values = data.condition_values(numbers)
        return {name: each for name, each in values.items() if name in flow.conditions}
    parts: list[dict[str, Tensor]] = []
    for first in range(0, len(numbers), AT_ONCE):
        batch = stored_batch(data, numbers[first : first + AT_ONCE], flow)
        parts.append({name: batch[name].cpu() for name in {**flow.conditions, SOURCE: None} if name in batch})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def render_sources(flow: Flow, sources: Tensor) -> Tensor:
    """Render sources as uint8 pictures ``[n, 3, h, w]`` on the CPU, with grey in place of unknown pixels."""
    space = flow.space
    parts = [space.source_space.encode(some.to(flow.device)).nan_to_num(0) for some in sources.split(AT_ONCE)]
    return torch.cat([space.medium.render(space.decode(part)).cpu() for part in parts])
