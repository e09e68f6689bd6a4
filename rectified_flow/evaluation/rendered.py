"""The items of a dataset of one's own as pictures, so that samples can be compared with them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rectified_flow.data.stream import Batches, fingerprint_of
from rectified_flow.spaces.space import Space


class RenderedItems:
    """Pictures of a dataset's items as :class:`rectified_flow.Evaluator` reads them: rendered by the flow's space.

    Args:
        items: map-style, with items that are dicts of tensors.
        space: the space that encodes, decodes and renders them.
        name: the name of the dataset for reports.
    """

    rows = path = None

    def __init__(self, items: Dataset[Any], space: Space, name: str) -> None:
        self.items, self.space = items, space
        self.info = SimpleNamespace(source=name, image_size=None, framing=None)
        self.conditions: dict[str, Any] = getattr(items, "conditions", {})
        self.class_names: list[str] = list(getattr(self.conditions.get("labels"), "names", ()))
        self.fingerprint = fingerprint_of(items)

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def read_pictures(self, indices: Sequence[int]) -> Tensor:
        """Return rendered items, uint8 ``[n, 3, h, w]``."""
        data = Batches(self.items).__getitems__(list(indices))[self.space.key]
        with torch.no_grad():
            return self.space.render(self.space.decode(self.space.encode(data)))

    def condition_values(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the conditions of items by name."""
        batch = Batches(self.items).__getitems__(list(indices))
        return {name: batch[name] for name in self.conditions}
