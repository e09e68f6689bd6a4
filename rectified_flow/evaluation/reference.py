"""Features of the training images, computed once and saved in the store's folder."""

import re
from contextlib import suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.data.store import FEATURES, ImageDataset
from rectified_flow.distributed.collectives import gather_interleaved, interleaved_share, on_main
from rectified_flow.evaluation.features import Features
from rectified_flow.files import hash_file, remove, replace_file
from rectified_flow.progress import progress_bar


def reference_features(
    dataset: ImageDataset,
    features: Features,
    state: PartialState,
    *,
    batch_size: int = 64,
) -> Tensor:
    """Features ``[n, d]`` of all images of ``dataset``, on the CPU of the main process.

    Each process extracts its share of the whole store. Saved features are loaded from the store's folder. New features
    are saved there by the main process if the folder is writable.

    Args:
        dataset: the images.
        features: the features to extract.
        state: Accelerate's state of the processes.
        batch_size: images per batch.
    """
    if dataset.rows is not None:
        whole = reference_features(dataset.whole, features, state, batch_size=batch_size)
        return whole[dataset.rows] if state.is_main_process else whole
    known = on_main(state, lambda: _find_saved(dataset, features.name))
    if known is not None:
        return torch.from_numpy(np.load(known)) if state.is_main_process else torch.empty(0)
    rank, world_size, total = state.process_index, state.num_processes, len(dataset)
    mine = interleaved_share(total, rank, world_size)
    parts = []
    doing = f"features of {dataset.info.source}, {features.name}"
    with progress_bar(total=len(mine), desc=doing, unit="img", leave=None, disable=not state.is_main_process) as bar:
        for start in range(0, len(mine), batch_size):
            images = dataset.read_pictures(mine[start : start + batch_size])
            with torch.no_grad(), torch.autocast(state.device.type, enabled=False):
                parts.append(features.extract(images.to(state.device)).cpu())
            bar.update(len(images))
    everything = gather_interleaved(torch.cat(parts), total)
    if state.is_main_process:
        content = BytesIO()
        np.save(content, everything.numpy())
        with suppress(OSError):  # if the folder is not writable, features are extracted again next time
            path = dataset.path / f"{FEATURES}{features.name}.{sha256(content.getvalue()).hexdigest()}.npy"
            replace_file(path, content.getvalue())
    return everything if state.is_main_process else torch.empty(0)


def _find_saved(dataset: ImageDataset, name: str) -> Path | None:
    """The file of features that are as they were saved: its name has the hash of what is in it."""
    pattern = re.compile(rf"{FEATURES}{re.escape(name)}\.([0-9a-f]{{64}})\.npy")
    for path in sorted(dataset.path.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if match[1] == hash_file(path):
            return path
        tqdm.write(f"warning: {path} was altered; extracting the features of {dataset.info.source} again")
        with suppress(OSError):
            remove(path)
    return None
