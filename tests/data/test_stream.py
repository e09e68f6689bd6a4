"""The order of images: every epoch whole, every position found alone, however the batch is cut."""

import itertools
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rectified_flow.data.image_store import ImageDataset
from rectified_flow.data.stream import GlobalBatch, StreamSampler, collate, image_indices, permuted


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
    """Where images land is independent of where they were, and neighbours are torn apart."""
    order = permuted(np.arange(10_000), 10_000, key=7)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04
    assert np.abs(np.diff(order)).mean() == pytest.approx(10_000 / 3, rel=0.05)


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
        assert np.array_equal(rows, image_indices(range(16 * step, 16 * (step + 1)), 46, seed=0))


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_loader_processes_deliver_the_same_batches(flowers: ImageDataset, context: str) -> None:
    sampler = StreamSampler(len(flowers), 0, GlobalBatch(8), position=8)

    def batches(**settings: object) -> list[dict[str, torch.Tensor]]:
        loader = DataLoader(flowers, batch_sampler=sampler, collate_fn=collate, **settings)  # type: ignore[arg-type]
        return list(itertools.islice(loader, 8))

    here = batches()
    there = batches(num_workers=2, multiprocessing_context=context)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a["images"], b["images"])
        assert torch.equal(a["labels"], b["labels"])


def test_datasets_of_other_people() -> None:
    images, labels = torch.rand(4, 3, 2, 2), torch.arange(4)
    pairs = collate([TensorDataset(images, labels)[i] for i in range(4)])
    assert torch.equal(pairs["images"], images)
    assert torch.equal(pairs["labels"], labels)
    assert torch.equal(collate(list(images))["images"], images)
    assert list(collate([{"images": images[0], "depth": labels[0]}])) == ["images", "depth"]
