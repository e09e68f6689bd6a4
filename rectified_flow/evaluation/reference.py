"""Features of the training pictures, computed once and kept beside the store."""

from collections.abc import Callable
from contextlib import suppress
from io import BytesIO

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from rectified_flow.data import ImageDataset
from rectified_flow.evaluation.features import Features
from rectified_flow.files import replace_file
from rectified_flow.processes.collectives import any_rank, gather_interleaved


def reference_features(
    dataset: ImageDataset,
    features: Features,
    state: PartialState,
    *,
    progress: Callable[[int], object] = lambda _count: None,
    batch_size: int = 64,
) -> Tensor:
    """Features ``[n, d]`` of all pictures of ``dataset``, on the CPU of the main process; each extracts its share.

    They are read from the store's folder if they are there, and written there by the main process if it can write.

    Args:
        dataset: the pictures.
        features: what to extract.
        state: of the processes.
        progress: told how many pictures are done.
        batch_size: pictures at once.
    """
    path = dataset.path / f"features-{features.name}.npy"
    known = None
    with suppress(OSError, ValueError, EOFError):
        known = np.load(path, mmap_mode="r")
    if not any_rank(state, known is None or len(known) != len(dataset)) and known is not None:
        return torch.from_numpy(np.array(known)) if state.is_main_process else torch.empty(0)
    rank, world_size, total = state.process_index, state.num_processes, len(dataset)
    mine = [(rank + world_size * i) % total for i in range(-(-total // world_size))]
    parts = []
    for start in range(0, len(mine), batch_size):
        images = dataset.__getitems__(mine[start : start + batch_size])["images"]
        with torch.no_grad(), torch.autocast(state.device.type, enabled=False):
            parts.append(features.extract(images.to(state.device)).cpu())
        progress(len(images))
    everything = gather_interleaved(torch.cat(parts), total)
    if state.is_main_process:
        content = BytesIO()
        np.save(content, everything.numpy())
        with suppress(OSError):  # a store that cannot be written to is read again next time
            replace_file(path, content.getvalue())
    return everything if state.is_main_process else torch.empty(0)
