"""Tests of the split into training and held-out pictures, which share no near-duplicates."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rectified_flow.data.build import open_store
from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.evaluation.distances import count_near_duplicates, near_duplicates, perceptual_hashes
from rectified_flow.evaluation.features import average_colours
from rectified_flow.evaluation.heldout import hold_out, split_rows


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> ImageDataset:
    return ImageDataset(open_store(SyntheticFlowers(64, count=200), 32, cache_dir=tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def images(flowers: ImageDataset) -> Tensor:
    return flowers.read_batch(range(len(flowers)))["images"]


def colours(images: Tensor) -> Tensor:
    return average_colours().extract(images)


def recompressed(images: Tensor, quality: int) -> Tensor:
    """Enlarged, saved as JPEG and made small again, as pictures are that come from two places."""
    results = []
    for image in images:
        content = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize((128, 128)).save(content, "JPEG", quality=quality)
        results.append(torch.from_numpy(np.array(Image.open(content).resize((32, 32), Image.Resampling.LANCZOS))))
    return torch.stack(results).permute(0, 3, 1, 2)


def test_mirror_images_and_most_recompressed_copies_have_the_same_hash(images: Tensor) -> None:
    hashes = perceptual_hashes(colours(images))
    assert len(set(hashes)) > 150
    assert perceptual_hashes(colours(images.flip(-1))) == hashes
    again = perceptual_hashes(colours(recompressed(images, 70)))
    assert np.mean(np.equal(hashes, again)) > 0.7


def test_near_duplicates_are_copies_and_nothing_else(images: Tensor) -> None:
    others, copies = colours(images[50:]), colours(recompressed(images[:50], 70).flip(-1))
    assert near_duplicates(copies, colours(images[:50])).all()
    assert not near_duplicates(copies, others).any()
    assert count_near_duplicates(colours(images)) == 0
    assert count_near_duplicates(torch.cat((others, copies, others[:7]))) == 7


def test_more_pictures_move_none_to_the_other_side(images: Tensor) -> None:
    some, everything = (split_rows(colours(each), 0.3, seed=1) for each in (images[:100], images))
    assert set(some.training) == {row for row in everything.training if row < 100}
    assert set(some.held_out) == {row for row in everything.held_out if row < 100}
    assert sorted(everything.training + everything.held_out) == list(range(200))
    assert len(everything.held_out) == pytest.approx(60, abs=20)
    other = split_rows(colours(images), 0.3, seed=2)
    assert other.held_out != everything.held_out


def test_no_copy_of_a_training_picture_is_held_out(images: Tensor) -> None:
    """A held-out copy with another hash is left out, and no training picture moves."""
    both = torch.cat((images, recompressed(images, 70).flip(-1)))
    split = split_rows(colours(both), 0.3, seed=1)
    number = [row % 200 for row in split.training]
    assert not {row % 200 for row in split.held_out} & set(number)
    assert split.left_out
    assert all(row % 200 in number for row in split.left_out)
    alone = split_rows(colours(images), 0.3, seed=1)
    assert set(alone.training) == {row for row in split.training if row < 200}


def test_too_few_on_either_side(flowers: ImageDataset) -> None:
    few, all_of_them, enough = (hold_out(flowers, share, 0) for share in (0.005, 1.0, 0.3))
    assert few.problem == f"{few}; 8 held-out pictures and 2 others are needed"
    assert all_of_them.problem is not None
    assert all_of_them.problem.startswith("0 pictures to train on, 200 held out")
    assert enough.problem is None


def test_a_subset_reads_its_rows_and_has_a_fingerprint_of_its_own(flowers: ImageDataset) -> None:
    part = flowers.subset([5, 3, 150])
    assert torch.equal(part.read_batch([2, 0])["images"], flowers.read_batch([150, 5])["images"])
    assert torch.equal(part[1]["images"], flowers[3]["images"])
    assert len(part) == 3
    assert len({flowers.fingerprint, part.fingerprint, flowers.subset([3, 5, 150]).fingerprint}) == 3
    assert ImageDataset(part.path).fingerprint == flowers.fingerprint
    assert len(flowers) == 200, "the whole is not changed"
