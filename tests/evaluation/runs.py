"""Runs to evaluate, made without training."""

from pathlib import Path

import numpy as np
from PIL import Image

from rectified_flow.data.description import PictureData
from rectified_flow.data.open import Pictures, open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.flows.flow import Flow
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import describe_run
from rectified_flow.runs.training_config import TrainingConfig

COUNT = 21


def save_run(folder: Path, flow: Flow, *, holdout: float = 0.0, seed: int = 0) -> Path:
    """Save a checkpoint of a flow on random pictures of 7 cats and 14 dogs, as if it were trained on them."""
    random = np.random.default_rng(0)
    for i in range(COUNT):
        picture = folder / "pictures" / ("cat" if i < 7 else "dog") / f"{i}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(picture)
    pictures = pictures_of(folder)
    assert isinstance(pictures.described, Pictures)
    data = PictureData(pictures.described, holdout=holdout, seed=seed)
    config = describe_run(TrainingConfig(seed=seed), describe(flow), pictures, describe(data))
    files = {checkpoint.MODEL_FILE: flow.network.state_dict()}
    documents = {checkpoint.FLOW_FILE: describe(flow), checkpoint.CONFIG_FILE: config}
    checkpoint.save(folder / "checkpoints", 1, files, documents)
    return folder


def pictures_of(run: Path) -> ImageDataset:
    return open_dataset("unused", run / "pictures", image_size=8, cache_dir=run / "cache")
