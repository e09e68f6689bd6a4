"""Tests of the order of images, of batches from any dataset, and of fingerprints of datasets."""

import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rectified_flow.data import GlobalBatch
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import (
    PROBES,
    Batches,
    StreamSampler,
    collate,
    fingerprint_of,
    image_indices,
    permuted,
    spread,
)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 46, 1000, 4097])
def test_every_epoch_visits_every_image_once(length: int) -> None:
    indices = image_indices(range(3 * length), length, seed=0)
    for epoch in np.split(indices, 3):
        assert sorted(epoch) == list(range(length))


def test_epochs_and_seeds_differ() -> None:
    first, second = np.split(image_indices(range(2000), 1000, seed=0), 2)
    other_seed = image_indices(range(1000), 1000, seed=1)
    for a, b in itertools.combinations([first, second, other_seed, np.arange(1000)], 2):
        assert (a == b).mean() < 0.01


def test_the_order_looks_random() -> None:
    """The new place of an image is independent of the old place, and neighbours are far apart."""
    order = permuted(np.arange(10_000), 10_000, [7])
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04
    assert np.abs(np.diff(order)).mean() == pytest.approx(10_000 / 3, rel=0.05)


@pytest.mark.parametrize("period", [2, 12, 64])
@pytest.mark.parametrize("limit", [256, 300, 1024])
def test_a_spread_choice_has_all_classes_in_order_or_alternating(period: int, limit: int) -> None:
    chosen = np.array(spread(range(4096), limit))
    assert len({*chosen.tolist()}) == limit
    assert (np.diff(chosen) > 0).all()
    # Random choices of 4 of a class on average lack 2% of the classes.
    assert len(np.unique(chosen % period)) >= 0.9 * period
    assert np.ptp(np.bincount(chosen // 256)) <= 1


def test_a_spread_choice_grows() -> None:
    choices = [{*spread(range(77), most)} for most in range(90)]
    assert [*map(len, choices)] == [min(most, 77) for most in range(90)]
    assert all(fewer <= more for fewer, more in itertools.pairwise(choices))
    assert spread([5, 3, 9], 7) == [5, 3, 9]
    assert spread([], 7) == []


def test_a_position_is_found_without_those_before_it() -> None:
    whole = image_indices(range(200), 46, seed=3)
    assert np.array_equal(image_indices([150, 3, 99], 46, seed=3), whole[[150, 3, 99]])


def test_big_data_needs_no_table() -> None:
    began = time.process_time()
    indices = image_indices(range(10**12, 10**12 + 4096), 15_000_000, seed=0)
    assert time.process_time() - began < 0.5
    assert len(set(indices.tolist())) == 4096


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_ranks_and_accumulation_share_one_global_batch(world_size: int, accumulation: int) -> None:
    batch = GlobalBatch(16 // (world_size * accumulation), world_size, accumulation)
    streams = [iter(StreamSampler(46, 0, batch, rank, position=32)) for rank in range(world_size)]
    for step in range(2, 6):
        rows = np.full(16, -1)
        for micro_batch in range(accumulation):
            for rank, stream in enumerate(streams):
                rows[batch.rows(rank, micro_batch)] = next(stream)
        positions = np.arange(16 * step, 16 * (step + 1))
        assert np.array_equal(rows % 46, image_indices(positions, 46, seed=0))
        assert np.array_equal(rows // 46, positions // 46), "the epoch"


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_deliver_the_same_batches(flowers: ImageDataset, context: str) -> None:
    how: Any = {"batch_sampler": StreamSampler(len(flowers), 0, GlobalBatch(8), position=8), "collate_fn": dict}
    here = DataLoader(Batches(flowers), **how)
    there = DataLoader(Batches(flowers), **how, num_workers=2, multiprocessing_context=context)
    for a, b in itertools.islice(zip(here, there, strict=True), 8):
        assert a["images"].shape == (8, 3, 8, 8)
        assert torch.equal(a["images"], b["images"])
        assert torch.equal(a["labels"], b["labels"])


def test_datasets_of_other_people() -> None:
    images, labels = torch.rand(4, 3, 2, 2), torch.arange(4)
    pairs = collate([TensorDataset(images, labels)[i] for i in range(4)])
    assert torch.equal(pairs["images"], images)
    assert torch.equal(pairs["labels"], labels)
    assert torch.equal(collate(list(images))["images"], images)
    assert list(collate([{"images": images[0], "depth": labels[0]}])) == ["images", "depth"]


def test_latents_in_float16_are_stacked_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert collate([torch.zeros(2).half()] * 3)["images"].dtype == torch.float16


def test_torchs_own_loader_makes_the_same_batches(flowers: ImageDataset) -> None:
    """The loader has its default collate function."""
    batches = list(DataLoader(flowers, batch_size=4, num_workers=2))
    assert [len(batch["images"]) for batch in batches] == [4] * 11 + [2]
    for first, batch in zip(range(0, 46, 4), batches, strict=True):
        expected = flowers.read_batch(range(first, min(first + 4, 46)))
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


class Items(Dataset[Any]):
    """Somebody's dataset, which counts how it is read."""

    def __init__(self) -> None:
        self.reads: list[object] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return {"images": torch.full((3, 2, 2), index), "captions": f"number {index}"}


class ListsOfItems(Items):
    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        items = [self[index] for index in indices]
        self.reads = [list(indices)]
        return items


class WholeBatches(ListsOfItems):
    def read_batch(self, indices: Sequence[int]) -> dict[str, Any]:
        batch = collate(self.__getitems__(indices))
        self.reads = [tuple(indices)]
        return batch


@pytest.mark.parametrize(("kind", "reads"), [(Items, [4, 1]), (ListsOfItems, [[4, 1]]), (WholeBatches, [(4, 1)])])
def test_a_batch_is_read_in_as_few_calls_as_the_dataset_allows(kind: type[Items], reads: list[object]) -> None:
    dataset = kind()
    batch = Batches(dataset).__getitems__([4, 1])
    assert dataset.reads == reads
    assert batch["images"].flatten(1).float().mean(1).tolist() == [4, 1]
    assert batch["captions"] == ["number 4", "number 1"]


COUNT = 40


class Listed(Dataset[Any]):
    """A dataset of somebody's own: items in a list, changed by a function when they are read."""

    def __init__(self, items: Sequence[Any], change: Callable[[Any], Any] = lambda item: item) -> None:
        self.items, self.change = items, change

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.change(self.items[index])


def pictures(count: int = COUNT) -> list[Tensor]:
    return list(torch.randint(256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))


def test_equal_data_have_equal_fingerprints_and_a_changed_pixel_changes_it() -> None:
    expected = fingerprint_of(Listed(pictures()))
    plain: Any = pictures()
    assert fingerprint_of(plain) == expected, "a plain list will do"
    for index in (0, 17, COUNT - 1):
        changed = pictures()
        changed[index][1, 2, 3] ^= 1
        assert fingerprint_of(Listed(changed)) != expected


def test_length_type_shape_label_and_name_each_matter() -> None:
    images, labels = torch.stack(pictures()), torch.arange(COUNT)
    found = [
        fingerprint_of(dataset)
        for dataset in (
            Listed(pictures()),
            Listed(pictures(COUNT - 1)),
            Listed(pictures(), lambda item: item.to(torch.int16)),
            Listed(pictures(), lambda item: item.reshape(3, 2, 8)),
            Listed(pictures(), lambda item: {"pictures": item}),
            TensorDataset(images, labels),
            TensorDataset(images, labels.flip(0)),
            Listed(pictures(), lambda item: {"images": item, "captions": "a cat"}),
            Listed(pictures(), lambda item: {"images": item, "captions": "a dog"}),
        )
    ]
    assert len(set(found)) == len(found)


def test_a_dataset_that_knows_its_fingerprint_is_not_read(flowers: ImageDataset) -> None:
    dataset = Listed([])
    dataset.fingerprint = "mine"  # type: ignore[attr-defined]
    assert fingerprint_of(dataset) == "mine"
    assert fingerprint_of(flowers) == flowers.info.content


def test_few_of_many_items_are_read() -> None:
    read: list[int] = []

    def note(item: int) -> Tensor:
        read.append(item)
        return torch.tensor([item])

    fingerprint_of(Listed(range(100_000), note))
    assert len(read) == 2 * PROBES
    assert (min(read), max(read)) == (0, 99_999)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda image: image.flip(-1) if torch.rand(()) < 0.5 else image + torch.randint(9, (), dtype=torch.uint8),
    "numpy": lambda image: image + int(np.random.randint(9)),
    "python": lambda image: image + random.randrange(9),
}


@pytest.mark.parametrize("change", CHANGES)
def test_random_items_have_a_stable_fingerprint_and_leave_generators_as_they_were(change: str) -> None:
    def states() -> tuple[list[int], str, str]:
        return torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state(legacy=False))

    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = states()
        found.append(fingerprint_of(Listed(pictures(), CHANGES[change])))
        assert states() == before
    assert found[0] == found[1] != f"{COUNT} items"
    changed = pictures()
    changed[5] += 1
    assert fingerprint_of(Listed(changed, CHANGES[change])) != found[0]


def test_of_items_that_never_repeat_only_the_length_counts() -> None:
    dataset = Listed(pictures(), lambda image: image + os.urandom(1)[0])
    assert fingerprint_of(dataset) == f"{COUNT} items"
