"""Features of the training pictures are kept, and computed again when they were altered."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rectified_flow.data.build import open_store
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation.features import Features, reference_features


def test_no_byte_of_saved_features_changes_unnoticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = ImageDataset(open_store(SyntheticFlowers(8, count=5), 4, cache_dir=tmp_path))
    seen = list[int]()

    def extract(images: Tensor) -> Tensor:
        seen.append(len(images))
        return images.float().mean(dim=(2, 3))

    features = Features("means-1.0", "", "", "", extract)
    expected = reference_features(dataset, features)
    assert torch.equal(reference_features(dataset, features), expected)
    assert seen == [5], "they were not kept"
    path = dataset.path.with_name(f"{dataset.path.name}-features-means-1.0") / "features.npy"
    whole = path.read_bytes()
    assert np.array_equal(np.load(path), expected.numpy())
    for place in (0, 70, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert torch.equal(reference_features(dataset, features), expected)
        assert (
            f"warning: the features {path.parent} is damaged (features.npy was altered) and is made again"
            in capsys.readouterr().out
        )
        assert path.read_bytes() == whole, "they were not kept again"
    assert seen == 5 * [5]
