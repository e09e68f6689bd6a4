"""Compare the pictures of a flow with its training pictures, on all processes together."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow import randomness
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.collectives import any_rank, gather_interleaved, interleaved_share
from rectified_flow.errors import require
from rectified_flow.evaluation import FeatureNetwork
from rectified_flow.evaluation.distances import (
    frechet_distance,
    kernel_distance,
    manifold_scores,
    nearest,
    nearness,
    share_of_copies,
)
from rectified_flow.evaluation.features import Features, average_colours, load_features, reference_features
from rectified_flow.evaluation.rendered import RenderedItems
from rectified_flow.flows.flow import Flow, sample_batches
from rectified_flow.system.signals import Interrupted, interruptible
from rectified_flow.system.terminal import progress_bar

SPLIT = "train"
SHOWN, NEIGHBOURS_SHOWN = 8, 5


Generated = Sequence[Tensor]
"""Features of generated pictures ``[n, d]``, by feature network."""


class Evaluator:
    """Measures how near the pictures of a flow are to its training pictures.

    Every process must call the same methods in the same order.

    Args:
        dataset: the training pictures.
        feature_network: the features that are compared.
        state: of the processes.
        num_samples: pictures to draw for each comparison.
        seed: of the pictures, and of the subsets of the kernel distance.
        batch_size: pictures drawn at once by each process.
        held_out: pictures of the same kind that were not trained on, if there are any.

    Raises:
        UsageError: if the feature network is unavailable, or there is a single picture.
    """

    def __init__(
        self,
        dataset: ImageDataset | RenderedItems,
        feature_network: FeatureNetwork,
        state: PartialState,
        *,
        num_samples: int,
        seed: int = 0,
        batch_size: int = 64,
        held_out: ImageDataset | None = None,
    ) -> None:
        require(len(dataset) >= 2, f"{dataset.info.source} has a single picture; a distance needs at least 2")
        self.dataset, self.held_out, self.state = dataset, held_out, state
        self.num_samples, self.seed, self.batch_size = num_samples, seed, batch_size
        self.features: list[Features] = [load_features(feature_network, state.device), average_colours()]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must match for two results to be comparable."""
        framing = self.dataset.info.framing
        return {
            "feature_network": self.features[0].name,
            "resize": self.features[0].resize,
            "dataset": self.dataset.info.source,
            "split": SPLIT,
            "image_size": self.dataset.info.image_size,
            "num_real": len(self.dataset),
            "num_samples": self.num_samples,
            "seed": self.seed,
            **({} if framing is None else {"framing": asdict(framing)}),
        }

    @property
    def headline(self) -> str:
        """The name of the distance by which flows are ranked, the smallest first."""
        return self.features[0].frechet_name

    def prepare(self) -> None:
        """Extract the features of the training pictures; it may take long the first time of all."""
        _ = self.real, self.unseen

    @cached_property
    def real(self) -> list[Tensor]:
        """Features of the training pictures, by feature network; extracted by all processes, kept by the main one."""
        return [
            reference_features(self.dataset, each, self.state, batch_size=self.batch_size) for each in self.features
        ]

    @cached_property
    def unseen(self) -> Tensor | None:
        """Features of the held-out pictures, if there are any, on the main process."""
        if self.held_out is None:
            return None
        return reference_features(self.held_out, self.features[0], self.state, batch_size=self.batch_size)

    def generate(self, flow: Flow, **how: Any) -> Generated:
        """Draw pictures and extract their features; ``how`` are options of ``flow.sample``.

        Raises:
            Interrupted: on every process, if a stop was requested on one.
        """
        self.prepare()
        total = self.num_samples
        mine = interleaved_share(total, self.state.process_index, self.state.num_processes)
        share: list[Tensor] | None = None
        request: object = None
        try:
            share = self._draw_share(flow, mine, how)
        except Interrupted as interrupted:
            request = interrupted
        if any_rank(self.state, share is None) or share is None:
            raise Interrupted(request or "on another process")
        return [gather_interleaved(part, total) for part in share]

    def distances(self, generated: Generated) -> dict[str, float]:
        """Fréchet and kernel distances by name, the share of copies, and the kernel distance to held-out pictures.

        Main process only, as what follows.
        """
        numbers: dict[str, float] = {}
        for each, theirs, ours in zip(self.features, self.real, generated, strict=True):
            numbers[each.frechet_name] = frechet_distance(theirs, ours)
            numbers[each.kernel_name], deviation = kernel_distance(theirs, ours, self.seed)
            if deviation is not None:
                numbers[f"{each.kernel_name}_std"] = deviation
        if self.unseen is not None:
            first = self.features[0].kernel_name
            numbers[f"heldout_{first}"], _ = kernel_distance(self.unseen, generated[0], self.seed)
        numbers["copies"] = share_of_copies(generated[0], *self.real)
        if self._copies_by_chance is not None:
            numbers["copies_by_chance"] = self._copies_by_chance
        return numbers

    @cached_property
    def _copies_by_chance(self) -> float | None:
        """The share of copies among held-out pictures, which are none."""
        return None if self.unseen is None else share_of_copies(self.unseen, *self.real)

    def scores(self, generated: Generated) -> dict[str, float]:
        """Precision, recall and the like; the work grows with the square of the number of training pictures."""
        return manifold_scores(self.real[0], generated[0])

    def beside_neighbours(self, flow: Flow, generated: Generated, **how: Any) -> Tensor:
        """The generated pictures that are most like copies, each before the training pictures that are nearest to it.

        uint8 ``[n, 1 + k, c, h, w]``; they are drawn again, as :meth:`generate` drew them.
        """
        features, real = generated[0], self.real[0]
        worst = nearness(features, *self.real).argsort()[:SHOWN]
        options = {"seed": self.seed, "batch_size": SHOWN, "conditions": self._conditions(flow), **how}
        [(_, drawn)] = sample_batches(flow, worst.tolist(), **options)
        near = nearest(features[worst], real, NEIGHBOURS_SHOWN)
        shown = self.dataset.read_pictures(near.flatten().tolist()).unflatten(0, near.shape)
        return torch.cat((drawn.cpu()[:, None], shown), dim=1)

    def _draw_share(self, flow: Flow, mine: Sequence[int], how: dict[str, Any]) -> list[Tensor]:
        parts: list[list[Tensor]] = [[] for _ in self.features]
        how = {"steps": flow.default_steps} | how
        batches = sample_batches(
            flow, mine, seed=self.seed, batch_size=self.batch_size, conditions=self._conditions(flow), **how
        )
        doing = f"evaluating {how['steps']} step{'s' * (how['steps'] > 1)}"
        main = self.state.is_main_process
        bar = progress_bar(total=len(mine), desc=doing, unit="img", leave=None, disable=not main)
        with bar, interruptible(flow):
            for numbers, pictures in batches:
                with torch.no_grad(), torch.autocast(self.state.device.type, enabled=False):
                    for part, each in zip(parts, self.features, strict=True):
                        part.append(each.extract(pictures).cpu())
                bar.update(len(numbers))
        return [torch.cat(part) for part in parts]

    def _conditions(self, flow: Flow) -> dict[str, Tensor]:
        """The training pictures' conditions in a random order, so that any number of rows has their shares."""
        if not flow.conditions:
            return {}
        order = torch.randperm(len(self.dataset), generator=randomness.generator("cpu", self.seed, "labels"))
        values = self.dataset.condition_values(order[: self.num_samples].tolist())
        return {name: each for name, each in values.items() if name in flow.conditions}
