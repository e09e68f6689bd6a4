"""What a training step costs, counted on the network itself: operations, memory, and the least time it can take."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

BYTES = 4
"""Of a weight, and of all that is kept for it."""


@dataclass(frozen=True)
class Memory:
    """What a process holds at the end of a forward pass [bytes]."""

    fixed: int
    """Weights, gradients, the optimizer's two moments, averages."""
    per_image: int
    """What the backward pass needs of each image of a micro-batch."""


def forward_flops(flow: nn.Module, item: dict[str, Tensor]) -> int:
    """Floating-point operations (a multiply-add is two) of one forward pass on a batch of one."""
    was_training = flow.training
    flow.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flow(**item)
    flow.train(was_training)
    return int(counter.get_total_flops())


def training_memory(flow: nn.Module, item: dict[str, Tensor], averages: int) -> Memory:
    """Memory that training takes, counted on a batch of two; what the libraries need for themselves comes on top.

    Args:
        flow: returns the loss.
        item: a batch of one.
        averages: how many averages of the weights are kept.
    """
    was_training = flow.training
    flow.train()
    batch = {name: torch.cat((value, value)) for name, value in item.items()}
    with _Allocations() as allocations:
        loss = flow(**batch)
    kept = allocations.alive()
    del loss
    flow.train(was_training)
    trained = sum(p.numel() for p in flow.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in flow.parameters())
    return Memory(BYTES * (weights + 3 * trained + averages * weights), kept // 2)


def multiplication_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second that the device multiplies large matrices with, measured now."""
    side = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        _finish(device)
        began = time.perf_counter()
        a @ b
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Allocations(TorchDispatchMode):
    """Remembers what operations return, without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive(self) -> int:
        """Bytes of what is still held by someone."""
        return sum(size for storage, size in self._storages.values() if not storage.expired())
