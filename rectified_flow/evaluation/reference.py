"""Features of the training pictures, computed once and kept beside the store."""

from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import numpy as np
import torch
from torch import Tensor

from rectified_flow.data import ImageDataset
from rectified_flow.evaluation.features import Features
from rectified_flow.files import replace_file

Gather = Callable[[Tensor, int], Tensor]


def reference_features(
    dataset: ImageDataset,
    features: Features,
    device: torch.device,
    *,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = lambda share, _total: share,
    progress: Callable[[int], object] = lambda _count: None,
    batch_size: int = 64,
) -> Tensor:
    """Features ``[n, d]`` of all pictures of ``dataset``, on the CPU; each of the ranks extracts its share.

    They are read from the store's folder if they are there, and written there by rank 0 if it can be written.

    Args:
        dataset: the pictures.
        features: what to extract.
        device: of the network.
        rank: of this process.
        world_size: number of processes.
        gather: joins interleaved shares of all ranks into ``total`` rows.
        progress: told how many pictures are done.
        batch_size: pictures at once.
    """
    path = dataset.path / f"features-{features.name}.npy"
    known = None
    with suppress(OSError, ValueError, EOFError):
        known = torch.from_numpy(np.load(path))
    # Every rank must take the same way.
    everybody_knows = gather(torch.tensor([known is not None and len(known) == len(dataset)]).float(), world_size)
    if known is not None and bool(everybody_knows.all()):
        return known
    total = len(dataset)
    mine = [(rank + world_size * i) % total for i in range(-(-total // world_size))]
    parts = []
    for start in range(0, len(mine), batch_size):
        images = dataset.__getitems__(mine[start : start + batch_size])["images"]
        with torch.no_grad():
            parts.append(features.extract(images.to(device)).cpu())
        progress(len(images))
    everything = gather(torch.cat(parts), total)
    if rank == 0:
        content = BytesIO()
        np.save(content, everything.numpy())
        with suppress(OSError):  # a store that cannot be written to is read again next time
            replace_file(path, content.getvalue())
    return everything
