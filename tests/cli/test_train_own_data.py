"""Tests of training on datasets of users: lists, tensors, dictionaries and datasets of the hub."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from rectified_flow.cli.open_data import open_data
from rectified_flow.cli.training_flags import DataConfig
from rectified_flow.condition import Labels
from rectified_flow.errors import UsageError
from rectified_flow.flows import Coupling
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import losses, tiny_config


def pictures(count: int = 40, seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return list(torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=source))


def train_on(dataset: Any, config: TrainingConfig, coupling: Coupling = "independent") -> tuple[str, int]:
    """Train on ``dataset``, and return the printed text and the last step."""
    torch.manual_seed(0)
    labelled = isinstance(dataset[0], dict) and "labels" in dataset[0]
    network = Unet(8, (1, 2), conditions={"labels": Labels(4)} if labelled else None, image_size=8)
    with redirect_stdout(io.StringIO()) as said:
        trainer = Trainer(RectifiedFlow(network, coupling=coupling), dataset, config)
        trainer.train()
    return said.getvalue(), trainer.state.step


def test_a_plain_list_of_pictures(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train_num_steps=None, num_epochs=1, lr_warmup_steps=2)
    [(said, step)] = run_on_ranks(1, train_on, pictures(), config)
    assert step == 3, "40 pictures in batches of 16"
    assert "data        40 items of a list\n" in said
    assert "run         3 steps = 48 images = 1.2 epochs\n" in said
    assert "oxford" not in said + (tmp_path / "config.json").read_text()
    assert "warning" not in said
    [(said, step)] = run_on_ranks(1, train_on, pictures(), replace(config, num_epochs=2))
    assert "resume      step 3" in said
    assert step == 5


@pytest.mark.parametrize(("scale", "offset", "told"), [(1.0, 0.0, 1), (2.0, -1.0, 0)])
def test_floats_in_another_range_are_told_once(tmp_path: Path, scale: float, offset: float, told: int) -> None:
    values = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    values[:, 0, 0, 0], values[:, 0, 0, 1] = 0.0, 1.0  # whichever pictures are in the first batch
    config = tiny_config(tmp_path, train_num_steps=3, lr_warmup_steps=2, num_samples=0)
    results = run_on_ranks(2, train_on, TensorDataset(scale * values + offset), config)
    said = "".join(text for text, _ in results)
    assert said.count("warning: ") == told
    assert said.count("reach from 0 to 1; scale floating-point images to [-1, 1]") == told


class Captioned(Dataset[dict[str, Any]]):
    """Pictures with labels, and with ``extra`` entries that no flow knows."""

    fingerprint = "captioned"

    def __init__(self, *extra: str) -> None:
        self.extra, self.pictures = extra, pictures()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        everything = {"caption": f"picture {index}", "sharpness": torch.tensor(index / 40)}
        item = {"images": self.pictures[index], "labels": torch.tensor(index % 4)}
        return item | {name: everything[name] for name in self.extra}


def test_entries_that_the_network_does_not_take_are_ignored(tmp_path: Path) -> None:
    for name, dataset in (("without", Captioned()), ("with", Captioned("caption", "sharpness"))):
        config = tiny_config(tmp_path / name, train_num_steps=4, num_samples=0, log_every=1)
        run_on_ranks(2, train_on, dataset, config, "ot")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_conditions_that_the_data_lack_and_keys_of_another_name_are_reported(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "a", train_num_steps=1, num_samples=0)
    [said] = run_on_ranks(1, train_without_labels, config)
    assert said.count("warning: the network takes labels, which the data do not have: it is trained without") == 1
    items = [{"image": picture} for picture in pictures()]
    PartialState()
    with pytest.raises(UsageError, match=r"^a batch has image, but not images: rename"):
        train_on(items, tiny_config(tmp_path / "b"))


def train_without_labels(config: TrainingConfig) -> str:
    network = Unet(8, (1, 2), conditions={"labels": Labels(4)}, image_size=8)
    dataset: Any = pictures()
    with redirect_stdout(io.StringIO()) as said:
        Trainer(RectifiedFlow(network), dataset, config).train()
    return said.getvalue()


def test_a_dataset_of_the_hub_library_trains(tmp_path: Path) -> None:
    """A dataset of the library ``datasets`` has a method ``batch`` with another meaning."""
    rows = datasets.Dataset.from_dict({"images": [picture.tolist() for picture in pictures()]})
    config = tiny_config(tmp_path, train_num_steps=2, num_samples=0)
    [(said, step)] = run_on_ranks(1, train_on_rows, rows, config)
    assert step == 2, said


def train_on_rows(rows: Any, config: TrainingConfig) -> tuple[str, int]:
    pixels = datasets.Array3D(shape=(3, 8, 8), dtype="uint8")
    return train_on(rows.cast_column("images", pixels).with_format("torch"), config)


def test_a_dataset_without_items_is_refused() -> None:
    data: Any = SimpleNamespace(open=lambda _found: [], name="nothing", has_pictures=False)
    with pytest.raises(UsageError, match="--dataset nothing has no items"):
        open_data(data, None, DataConfig(), None, split_is_given=False, stops=False, recorded=None, stores=True)
