"""What the processor asks of the device while it takes steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rectified_flow.data.image_store import ImageDataset
from rectified_flow.training.stepper import Batch, Stepper, _Flag
from tests.training.runs import build_trainer, tiny_config

STEPS = 3
READING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class Reads(TorchDispatchMode):
    """Keeps every tensor whose value the processor asked for; on a GPU it would wait for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))


def take_steps(stepper: Stepper, batches: Iterator[Batch]) -> None:
    for _ in range(STEPS):
        stepper.take(batches)


def test_one_number_a_step_is_asked_for_when_the_next_step_is_on_its_way(
    tmp_path: Path, flowers: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tiny_config(tmp_path, gradient_accumulation_steps=2), flowers)
    # The averages count on the CPU, wherever the weights are, and may read what they count.
    monkeypatch.setattr(trainer.state, "update_averages", lambda: None)
    verdicts: list[Tensor] = []
    read = _Flag.read

    def read_and_keep(flag: _Flag) -> bool:
        verdicts.append(flag._value)
        return read(flag)

    monkeypatch.setattr(_Flag, "read", read_and_keep)
    batches = trainer._batches()
    next(batches)

    with Reads() as reads:
        take_steps(trainer.stepper, batches)

    assert len(verdicts) == STEPS - 1
    assert [tensor.data_ptr() for tensor in reads.tensors] == [verdict.data_ptr() for verdict in verdicts]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for_between_two_lines_of_metrics(tmp_path: Path, flowers: ImageDataset) -> None:
    trainer = build_trainer(tiny_config(tmp_path), flowers)
    batches = trainer._batches()
    take_steps(trainer.stepper, batches)  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        take_steps(trainer.stepper, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
