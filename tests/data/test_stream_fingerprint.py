"""A dataset's fingerprint tells other data, and reading it leaves no trace."""

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import PROBES, fingerprint_of

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


def test_equal_data_have_equal_fingerprints() -> None:
    assert fingerprint_of(Listed(pictures())) == fingerprint_of(Listed(pictures()))


@pytest.mark.parametrize("index", [0, 17, COUNT - 1])
def test_a_changed_pixel_changes_it(index: int) -> None:
    changed = pictures()
    changed[index][1, 2, 3] ^= 1
    assert fingerprint_of(Listed(changed)) != fingerprint_of(Listed(pictures()))
    plain: Any = changed
    assert fingerprint_of(plain) == fingerprint_of(Listed(changed)), "a plain list will do"


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


def flipped_by_torch(image: Tensor) -> Tensor:
    return image.flip(-1) if torch.rand(()) < 0.5 else image + torch.randint(9, (), dtype=torch.uint8)


def flipped_by_numpy(image: Tensor) -> Tensor:
    return image + int(np.random.randint(9))


def flipped_by_python(image: Tensor) -> Tensor:
    return image + random.randrange(9)


@pytest.mark.parametrize("change", [flipped_by_torch, flipped_by_numpy, flipped_by_python])
def test_random_items_have_a_stable_fingerprint(change: Callable[[Tensor], Tensor]) -> None:
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        found.append(fingerprint_of(Listed(pictures(), change)))
    assert found[0] == found[1] != f"{COUNT} items"
    changed = pictures()
    changed[5] += 1
    assert fingerprint_of(Listed(changed, change)) != found[0]


def test_of_items_that_never_repeat_only_the_length_counts() -> None:
    dataset = Listed(pictures(), lambda image: image + os.urandom(1)[0])
    assert fingerprint_of(dataset) == f"{COUNT} items"


def fails(_item: Tensor) -> Tensor:
    torch.rand(1)
    raise OSError("a broken picture")


@pytest.mark.parametrize("change", [flipped_by_torch, flipped_by_numpy, flipped_by_python, fails])
def test_generators_are_left_as_they_were(change: Callable[[Tensor], Tensor]) -> None:
    def states() -> tuple[list[int], str, str]:
        return torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state(legacy=False))

    before = states()
    try:
        fingerprint_of(Listed(pictures(), change))
    except OSError:
        assert change is fails
    assert states() == before
