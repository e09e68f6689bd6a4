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

from rectified_flow.randomness import Rows, rows_of

BYTES = 4
"""Of a weight, a moment, an average."""


@dataclass(frozen=True)
class Memory:
    """What the tensors of a process take at the peak of a step [bytes]."""

    fixed: int
    """Weights, gradients, the optimizer's two moments, averages, and copies of the weights in another precision."""
    per_image: int
    """Activations, for each image of a micro-batch."""


def forward_flops(flow: nn.Module, item: dict[str, Tensor]) -> int:
    """Floating-point operations (a multiply-add is two) of one forward pass on a batch of one."""
    was_training = flow.training
    flow.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flow(**item)
    flow.train(was_training)
    return int(counter.get_total_flops())


def training_memory(flow: nn.Module, item: dict[str, Tensor], averages: int) -> Memory:
    """Memory that training takes, from the peaks of two small batches; what the libraries need for themselves is more.

    Args:
        flow: returns the loss; its gradients are lost.
        item: a batch of one.
        averages: how many averages of the weights are kept.
    """
    was_training = flow.training
    flow.train()
    small, large = (_peak(flow, {name: torch.cat(rows * [value]) for name, value in item.items()}) for rows in (2, 4))
    flow.train(was_training)
    per_image = (large - small) // 2
    trained = sum(p.numel() for p in flow.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in flow.parameters())
    kept = BYTES * (weights + 2 * trained + averages * weights)
    return Memory(kept + small - 2 * per_image, per_image)


def multiplication_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second that the device multiplies large matrices with, measured now."""
    side = 4096 if device.type == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    seconds = []
    precise, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True  # as convolutions
    for _ in range(5):
        _finish()
        began = time.perf_counter()
        a @ b
        _finish()
        seconds.append(time.perf_counter() - began)
    torch.backends.cuda.matmul.allow_tf32 = precise
    return 2 * side**3 / min(seconds)


def _peak(flow: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes that a forward and a backward pass hold at once, at most, beside the weights and the batch."""
    rows = len(next(iter(batch.values())))
    flow.zero_grad()
    with rows_of(Rows(0, 0, rows, slice(None)), next(flow.parameters()).device), _Allocations(flow) as allocations:
        flow(**batch).backward()
    flow.zero_grad()
    return allocations.peak


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _Allocations(TorchDispatchMode):
    """Watches what operations return, without holding it.

    Args:
        flow: whose weights do not count.
    """

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage()._cdata for weight in flow.state_dict(keep_vars=True).values()}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        name = storage._cdata
        known = self._alive.get(name)
        if name in self._weights or (known is not None and not known[0].expired()):
            return
        self._alive[name] = StorageWeakRef(storage), storage.nbytes()
        self._at_most += storage.nbytes()
        if self._at_most > self.peak:  # looking at them all is slow
            self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
            self._at_most = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._at_most)
