"""Tests of reads from and copies to the device during a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import Batch
from rectified_flow.training.optimizers import BuildOptimizer, Muon, NamedParameters, muon
from rectified_flow.training.stepper import _AsyncBool
from tests.training.runs import build_trainer, tiny_config

READING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class Reads(TorchDispatchMode):
    """Keeps every tensor whose value the processor asked for; on a GPU it would wait for each.

    On a CPU it does not see ``tolist()``, ``numpy()`` and ``cpu()``; the row "waits for the GPU" of
    benchmarks/step_parts.py does, on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))


def muon_of_a_gpu(parameters: NamedParameters) -> Muon:
    groups = [group | {"fused": True} for group in muon(parameters, lr=1e-3).param_groups]
    return Muon(groups, lr=1e-3, weight_decay=0.0, fused=True)


@pytest.mark.parametrize("optimizer", [None, muon_of_a_gpu])
def test_one_number_a_step_is_asked_for_when_the_next_gradient_is_on_its_way(
    optimizer: BuildOptimizer | None, tmp_path: Path, flowers: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tiny_config(tmp_path, batch_size=8), flowers, optimizer=optimizer)
    # The averages count on the CPU, wherever the weights are, and may read what they count.
    monkeypatch.setattr(trainer.state.ema, "update", lambda: None)
    events: list[str] = []
    verdicts: list[Tensor] = []
    read, backward = _AsyncBool.read, trainer.stepper.forward_backward

    def read_and_tell(flag: _AsyncBool) -> bool:
        events.append("verdict")
        verdicts.append(flag._value)
        return read(flag)

    def backward_and_tell(batch: Batch, micro_batch: int) -> Tensor:
        events.append("gradient")
        return backward(batch, micro_batch)

    monkeypatch.setattr(_AsyncBool, "read", read_and_tell)
    monkeypatch.setattr(trainer.stepper, "forward_backward", backward_and_tell)
    batches = trainer._batches()
    next(batches)

    with Reads() as reads:
        for _ in range(3):
            trainer.stepper.take(batches)

    gradients = ["gradient"] * 2
    assert events == [*gradients, *gradients, "verdict", *gradients, "verdict"]
    assert [tensor.data_ptr() for tensor in reads.tensors] == [verdict.data_ptr() for verdict in verdicts]
