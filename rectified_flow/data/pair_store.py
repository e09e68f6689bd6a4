"""What a flow generated, with the noise of each row, or its path from the noise on."""

from collections.abc import Sequence

from torch import Tensor

from rectified_flow.data.store import NOISE_FILE, StoreDataset

PATH_FILE = "path.float16"


class PairDataset(StoreDataset):
    """The pairs or paths of a store.

    Items have what a flow generated, as its space stores it, and its ``noise``, float16 of the shape of ``x``, or its
    ``path``, float16 ``[points, ...]``: all points but the last, the noise first.
    """

    def read_batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = super().read_batch(indices)
        if len(self.info.shapes.get(NOISE_FILE, ())) > 3 and not self.info.rows:  # an earlier version's name
            batch["path"] = batch.pop("noise")
        return batch
