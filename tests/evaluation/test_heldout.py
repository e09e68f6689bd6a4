"""Tests of held-out pictures: the split without near-duplicates, the loss, and the detection of memorisation."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rectified_flow.data.sources.synthetic_flowers import SyntheticFlowers
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.store_writer import open_store
from rectified_flow.evaluation.distances import near_duplicates, perceptual_hashes
from rectified_flow.evaluation.features import average_colours
from rectified_flow.evaluation.heldout import PATIENCE, TIMES, HeldOutLoss, HeldOutPictures, hold_out, judge, split_rows
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.spaces.pixels import Pixels
from tests.training.runs import tiny_dataset


class Scaled(nn.Module):
    """Predicts a multiple of ``x``."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, t: Tensor, r: Tensor | None = None) -> Tensor:
        return self.factor * x


@pytest.fixture(scope="module")
def flowers(tmp_path_factory: pytest.TempPathFactory) -> ImageDataset:
    return tiny_dataset(tmp_path_factory.mktemp("cache"))


def pictures(flowers: ImageDataset, seed: int = 0) -> HeldOutPictures:
    return HeldOutPictures(flowers.subset(range(20)), flowers.subset(range(20, 46)), seed)


@pytest.mark.parametrize("kind", [RectifiedFlow, MeanFlow])
def test_it_is_the_squared_error_of_the_velocity(flowers: ImageDataset, kind: Any) -> None:
    """``x_t = (1 - t) x_0 + t noise``: a prediction of ``k x_t`` misses ``noise - x_0`` by what is known for each."""
    compared, flow = pictures(flowers), kind(Scaled(0.5), space=Pixels(horizontal_flip=True))
    assert compared.count == 20
    losses = compared.losses(flow, range(40))
    x_0 = flow.space.encode(flowers.read_batch(range(46))["images"])
    power = x_0.square().flatten(1).mean(dim=1)
    t = (torch.arange(TIMES) + 0.5) / TIMES
    expected = ((0.5 * t - 1) ** 2).mean() + ((0.5 * (1 - t) + 1) ** 2).mean() * power  # cross terms vanish on average
    assert losses[20:].mean().item() == pytest.approx(expected[:20].mean().item(), rel=0.02)
    assert losses[:20].mean().item() == pytest.approx(expected[20:].mean().item(), rel=0.03)
    means = compared.means(losses)
    assert means["gap"] == pytest.approx(means["heldout_loss"] - means["seen_loss"])
    assert flow.training


def test_the_noise_is_always_the_same(flowers: ImageDataset) -> None:
    flow = RectifiedFlow(Scaled(0.5))
    losses = pictures(flowers).losses(flow, range(40))
    torch.manual_seed(5)
    torch.testing.assert_close(pictures(flowers).losses(flow, [33, 2, 7]), losses[[33, 2, 7]])
    assert not torch.allclose(pictures(flowers, seed=1).losses(flow, range(40)), losses)


def rows(*held_out: float, seen: tuple[float, ...] = (), noise: float = 0.02) -> list[HeldOutLoss]:
    """Measurements on 64 pictures that differ by 0.3 from each other, and by ``noise`` from one to the next."""
    random = np.random.default_rng(0)
    own = random.normal(0, 0.3, 64)
    result = []
    for step, (loss, other) in enumerate(zip(held_out, seen or range(0, -len(held_out), -1), strict=True)):
        losses = loss + own + random.normal(0, noise, 64)
        result.append(HeldOutLoss(step, losses.mean(), float(other), losses.mean() - float(other), losses.tolist(), 0))
    return result


def test_a_rise_beyond_its_noise_is_noticed_after_some_patience() -> None:
    """The noise is that of the rise, 0.02 / 8, and not that of the pictures, 0.3 / 8."""
    falls, rises = [1.0, 0.8, 0.7], [0.72, 0.73, 0.75]
    assert len(rises) == PATIENCE
    assert judge(rows(*falls, *rises[:-1])) == (judge(rows(*falls)).best, False)
    best, memorises = judge(rows(*falls, *rises))
    assert (best.step, memorises) == (2, True)
    assert not judge(rows(*falls, *rises, noise=0.3)).memorises, "not beyond its noise"
    assert not judge(rows(*falls, 0.72, 0.7, 0.75)).memorises, "not three in a row"


def test_a_loss_that_rises_everywhere_is_no_memorising() -> None:
    assert not judge(rows(0.7, 0.72, 0.73, 0.75, seen=(0.7, 0.72, 0.74, 0.75))).memorises
    assert judge(rows(0.7, 0.72, 0.73, 0.75, seen=(0.7, 0.68, 0.67, 0.66))).memorises


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> ImageDataset:
    return ImageDataset(open_store(SyntheticFlowers(64, count=200), 32, cache_dir=tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def images(drawn: ImageDataset) -> Tensor:
    return drawn.read_batch(range(len(drawn)))["images"]


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


def test_too_few_on_either_side(drawn: ImageDataset) -> None:
    few, all_of_them, enough = (hold_out(drawn, share, 0) for share in (0.005, 1.0, 0.3))
    assert few.problem == f"{few}; 8 held-out pictures and 2 others are needed"
    assert all_of_them.problem is not None
    assert all_of_them.problem.startswith("0 pictures to train on, 200 held out")
    assert enough.problem is None


def test_a_subset_reads_its_rows_and_has_a_fingerprint_of_its_own(drawn: ImageDataset) -> None:
    part = drawn.subset([5, 3, 150])
    assert torch.equal(part.read_batch([2, 0])["images"], drawn.read_batch([150, 5])["images"])
    assert torch.equal(part[1]["images"], drawn[3]["images"])
    assert len(part) == 3
    assert len({drawn.fingerprint, part.fingerprint, drawn.subset([3, 5, 150]).fingerprint}) == 3
    assert ImageDataset(part.path).fingerprint == drawn.fingerprint
    assert len(drawn) == 200, "the whole is not changed"
