"""A dataset whose sources are degraded data, for a flow that learns to put back what is missing."""

import json
from collections.abc import Sequence
from copy import copy
from hashlib import blake2b
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow import randomness
from rectified_flow.data.stream import Batches, fingerprint_of
from rectified_flow.registry import describe
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.space import Space, with_shape


class Degraded(Dataset[dict[str, Any]]):
    """The items of a dataset, with what a degradation leaves of each as the entry ``source``.

    Sources are in the form of the data, as float32, and NaN where they are unknown. Random draws of the degradation are
    a function of the seed and of the number of the item, which differs in each epoch. All other attributes are those of
    the dataset.

    Args:
        dataset: map-style, with items that are dicts of tensors.
        degradation: the degradation.
        space: the space of the flow, in which the data are degraded.
        seed: seed of the random draws, which is no part of the fingerprint.
    """

    varies = True  # an item may have another source in each epoch

    def __init__(self, dataset: Dataset[Any], degradation: Degradation, space: Space, seed: int = 0) -> None:
        self.dataset, self.degradation, self.space_of_flow, self.seed_of_draws = dataset, degradation, space, seed

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while a copy or a pickle is made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self.read_batch([range(len(self))[index]]).items()}

    def read_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the items of ``indices``, numbers in the whole training, with a leading batch dimension."""
        batch = Batches(self.dataset).__getitems__(indices)
        data = batch[self.space_of_flow.key]
        with torch.no_grad(), randomness.deterministic(randomness.Samples(self.seed_of_draws, indices)):
            return batch | {"source": degraded(data, self.degradation, self.space_of_flow)}

    def subset(self, items: Any) -> Self:
        """Return some items."""
        return self._around(self.dataset.subset(items))  # type: ignore[attr-defined]

    def changed(self, **attributes: Any) -> Self:
        """Return the items of the dataset with other attributes."""
        return self._around(self.dataset.changed(**attributes))  # type: ignore[attr-defined]

    def _around(self, dataset: Dataset[Any]) -> Self:
        other = copy(self)
        other.dataset = dataset
        return other

    @property
    def fingerprint(self) -> str:
        """Hash of the dataset's own fingerprint and of the degradation."""
        parts = fingerprint_of(self.dataset), json.dumps(describe(self.degradation))
        return blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def degraded(data: Tensor, degradation: Degradation, space: Space) -> Tensor:
    """Degrade data as the space stores them, ``[b, ...]``; the result is float32, and NaN where it is unknown."""
    whole = with_shape(space, data.shape[1:])  # training crops sources and data alike, at random
    with torch.autocast(data.device.type, enabled=False):
        return whole.to_stored(degradation(whole.encode(data)), exact=True)
