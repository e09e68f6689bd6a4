"""Tests of loader processes that fail: the run ends in a sentence, and no process stays behind."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import Dataset

from rectified_flow.condition import Condition, Labels
from rectified_flow.data import GlobalBatch
from rectified_flow.data.stream import StreamSampler
from rectified_flow.errors import RunError, UsageError
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.networks.unet import Unet
from rectified_flow.training.loader import checked, explain_loader_errors, gather_rows, load
from rectified_flow.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.runs import tiny_config


class Unshareable(torch.Tensor):
    """A tensor that does not fit into shared memory."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


def gather_small_integers() -> list[list[int]]:
    state = PartialState()
    batch, rows = GlobalBatch(2, state.num_processes, 2), torch.tensor([[1, 2], [3, 4]]) + 100 * state.process_index
    found = [
        gather_rows([{"fields": micro_batch.to(dtype)} for micro_batch in (rows, rows + 10)], batch, state.device)
        for dtype in (torch.uint16, torch.int16, torch.bool, torch.float16)
    ]
    return [each["fields"].float().tolist() for each in found]


def test_items_of_any_type_are_gathered() -> None:
    """Two ranks have two micro-batches of two rows each; the ranks take turns, and then the micro-batches."""
    expected = [[row + k, row + k + 1] for row in (1, 3) for k in (0, 100, 10, 110)]
    for whole in run_on_ranks(2, gather_small_integers):
        assert [whole[index] for index in (0, 1, 3)] == [expected] * 3
        assert whole[2] == [[1, 1]] * 8


def fill_memory() -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def share() -> torch.Tensor:
    return torch.zeros(3).as_subclass(Unshareable)


def open_too_much() -> torch.Tensor:
    raise OSError(24, "Too many open files")


def miss_a_file() -> torch.Tensor:
    raise UsageError("images.uint8 is missing")


def fail() -> torch.Tensor:
    raise ValueError("of my own")


class Failing(Dataset[Any]):
    """A dataset of zeros that fails in one of the batches."""

    def __init__(self, failure: Callable[[], torch.Tensor]) -> None:
        self.failure = failure

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return 46

    def read_batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {"images": self.failure() if 7 in indices else torch.zeros(len(indices), 3)}


def read_all(tmp_path: Path, failure: Callable[[], torch.Tensor], workers: int = 2) -> None:
    config = tiny_config(tmp_path, num_workers=workers)
    with explain_loader_errors():
        for batch in load(Failing(failure), StreamSampler(40, 0, GlobalBatch(4)), config):
            assert torch.equal(batch["images"], torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("failure", "kind", "sentence"),
    [
        (share, RunError, r"^a loader process failed \(.*No space left.*shared memory \(shm-size of docker run\)"),
        (
            fill_memory,
            RunError,
            r"^a loader process failed \(.*(killed by signal|exited unexpectedly).*pass fewer `num_workers`",
        ),
        (open_too_much, RunError, r"^a loader process failed \(.*Too many open files.*open files \(ulimit\)"),
        (miss_a_file, UsageError, "^images.uint8 is missing$"),
        (fail, ValueError, r"(?s)^Caught ValueError in DataLoader worker process.*of my own"),
    ],
)
def test_a_loader_process_that_fails(tmp_path: Path, failure: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=sentence) as refusal:
        read_all(tmp_path, failure)
    assert kind is ValueError or "\n" not in str(refusal.value)
    assert multiprocessing.active_children() == [], "a loader process stays behind"


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_shared_memory_without_room_for_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse)
    with pytest.raises(RunError, match=r"could not be started \(No space left on device\)"):
        read_all(tmp_path, fail)


class TakesLabels(nn.Module):
    """A flow of three classes."""

    conditions: ClassVar[dict[str, Condition]] = {"labels": Labels(3), "species": Labels(3)}


def read_labels(*batches: list[int], name: str = "labels") -> list[str]:
    """Return the warnings about batches with these labels, which are all read."""
    warnings = list[str]()
    read = checked(iter([{name: torch.tensor(labels)} for labels in batches]), TakesLabels(), warnings.append)
    assert [batch[name].tolist() for batch in read] == [*batches]
    return [warning for warning in warnings if "do not have" not in warning]


@pytest.mark.parametrize(
    ("labels", "found"), [([0, 4], "reach 4"), ([1, 2, 7], "reach 7"), ([-1, 2], "begin at -1")], ids=str
)
def test_labels_that_do_not_exist_are_refused_in_any_batch(labels: list[int], found: str) -> None:
    sentence = re.escape(f"labels {found}, and `Labels(3)` takes 0 to 2: number the classes from 0")
    for batches in ([labels], [[0, 1, 2, 3], labels]):
        with pytest.raises(UsageError, match=sentence):
            read_labels(*batches)


def test_labels_that_seem_to_be_counted_from_1_are_warned_of() -> None:
    """This is only a warning, because the value 3 is valid: it means that a row has no label."""
    [warning] = read_labels(4 * [1, 2, 3])
    assert warning.startswith("warning: labels reach 3, which means no label, as `Labels(3)` takes 0 to 2: number")
    assert read_labels([0, *4 * [1, 2, 3]]) == read_labels(4 * [0, 1, 2]) == read_labels(6 * [1, 2]) == []
    assert read_labels([1, 2, 3]) == [], "few labels may lack 0 by chance"
    assert read_labels(4 * [1, 2, 3], name="species") == [], "a column may have missing values"


def test_a_label_of_the_first_item_is_refused_before_training(tmp_path: Path) -> None:
    items: Any = [(torch.zeros(3, 8, 8, dtype=torch.uint8), 4)] * 8
    network = Unet(8, (1,), conditions={"labels": Labels(3)}, image_size=8)
    with pytest.raises(UsageError, match="labels reach 4"):
        Trainer(RectifiedFlow(network), items, tiny_config(tmp_path))
