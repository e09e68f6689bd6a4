"""What a training step costs, counted and measured on the network itself: operations, memory, time."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.config import GlobalBatch, TrainingConfig
from rectified_flow.runs.resume import precision_name
from rectified_flow.system.terminal import lines

Autocast = Callable[[], AbstractContextManager[object]]
BYTES = 4
"""Of a gradient, a moment, an average."""


@dataclass(frozen=True)
class Memory:
    """What the tensors of a process take at the peak of a step [bytes]."""

    fixed: int
    """Weights, gradients, the optimizer's two moments, averages."""
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


def training_memory(
    flow: nn.Module, item: dict[str, Tensor], averages: int, autocast: Autocast = nullcontext
) -> Memory:
    """Memory that training takes, counted in a step on a batch of two; what the libraries need for themselves is more.

    Args:
        flow: returns the loss; its gradients are lost.
        item: a batch of one.
        averages: how many averages of the weights are kept.
        autocast: the precision of a forward pass.
    """
    with _training_step(flow, item, 2, autocast) as step, _Activations(flow) as activations:
        step()
    trained = sum(p.numel() for p in flow.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in flow.parameters())
    return Memory(weights + BYTES * (3 + averages) * trained, activations.peak // 2)


@dataclass(frozen=True)
class Cost:
    """What a computation takes."""

    flops: int
    """Floating-point operations."""
    memory: int
    """Of what it computes, at the peak [bytes]."""


def cost_of(action: Callable[[], object]) -> Cost:
    """What ``action`` takes, without gradients; on torch's meta device it is counted without being done."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter, _Activations(nn.Module()) as activations:
        action()
    return Cost(int(counter.get_total_flops()), activations.peak)


def multiplication_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second that the device multiplies large matrices with, measured now."""
    side = 4096 if device.type == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    precise, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True  # as convolutions
    seconds = _shortest(lambda: a @ b, of=5)
    torch.backends.cuda.matmul.allow_tf32 = precise
    return 2 * side**3 / seconds


def gradient_time(flow: nn.Module, item: dict[str, Tensor], count: int, autocast: Autocast = nullcontext) -> float:
    """Seconds that a batch's loss and gradient take, measured now.

    Args:
        flow: returns the loss; its gradients are lost.
        item: a batch of one.
        count: images in the batch that is measured.
        autocast: the precision of a forward pass.
    """
    with _training_step(flow, item, count, autocast) as step:
        return _shortest(step, of=3)


@contextmanager
def _training_step(
    flow: nn.Module, item: dict[str, Tensor], count: int, autocast: Autocast
) -> Iterator[Callable[[], None]]:
    """Loss and gradient of a batch of ``count``, of which no trace is left."""
    batch = {name: torch.cat([value] * count) for name, value in item.items()}

    def step() -> None:
        with autocast():
            loss = flow(**batch)
        loss.backward()

    was_training = flow.training
    flow.train()
    flow.zero_grad()
    try:
        with deterministic(BatchRows(0, 0, count, slice(None)), next(flow.parameters()).device):
            yield step
    finally:
        flow.zero_grad()
        flow.train(was_training)


def _shortest(action: Callable[[], object], of: int) -> float:
    """Seconds of the shortest run ``of`` some."""
    seconds = []
    for _ in range(of):
        _finish()
        began = time.perf_counter()
        action()
        _finish()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _Activations(TorchDispatchMode):
    """Watches what operations return, without holding it; what has the shape of a weight is one, or its gradient.

    Args:
        flow: whose weights these are.
    """

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        weights = flow.state_dict(keep_vars=True).values()
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._shapes = {weight.shape for weight in weights}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most, self.peak = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result

    def _add(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        known = self._alive.get(storage._cdata)
        if storage._cdata in self._weights or (known is not None and not known[0].expired()):
            return
        size = 0 if value.shape in self._shapes else storage.nbytes()
        self._alive[storage._cdata] = StorageWeakRef(storage), size
        self._at_most += size
        if self._at_most > self.peak:  # looking at them all is slow
            self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
            self._at_most = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._at_most)


class Throughput:
    """Images per second of training proper; pauses do not count."""

    def __init__(self) -> None:
        self._images_seen = 0
        self._started = time.perf_counter()

    def restart(self, images_seen: int) -> float:
        """The rate since the last restart, at ``images_seen`` images; then start counting again."""
        now = time.perf_counter()
        rate = (images_seen - self._images_seen) / max(1e-9, now - self._started)
        self._images_seen, self._started = images_seen, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        entered = time.perf_counter()
        yield
        self._started += time.perf_counter() - entered


def summarize(
    config: TrainingConfig, accelerator: Accelerator, flow: nn.Module, flops: int, data: str, length: int | None
) -> str:
    """Device, data, network, batch, length and output of a run.

    Args:
        config: the run's flags.
        accelerator: of the run.
        flow: the module to train.
        flops: of one item's forward pass.
        data: the dataset, in words.
        length: its items, if it has been opened.
    """
    batch = config.split_batch(accelerator.num_processes)
    count = sum(parameter.numel() for parameter in flow.parameters())
    trained = sum(parameter.numel() for parameter in flow.parameters() if parameter.requires_grad)
    items = items_of(flow)
    frozen = f" ({trained / 1e6:.1f} M trained)" if trained < 0.999 * count else ""
    return lines(
        {
            "processes": f"{accelerator.num_processes} x {accelerator.device.type}, {precision_name(accelerator)}",
            "data": data,
            "network": f"{count / 1e6:.1f} M parameters{frozen}, {flops / 1e9:.2f} GFLOP per {items[:-1]} forward",
            "batch": batch,
            "run": _length(config, batch, length, items),
            "output": config.output_dir,
        }
    )


def items_of(flow: nn.Module) -> str:
    """What a batch holds, in the plural: images, or the name of the entry that a flow's space knows."""
    space = getattr(flow, "space", None)
    if getattr(space, "picture_shape", None) is not None:
        return "images"
    return getattr(space, "key", "items")


def _length(config: TrainingConfig, batch: GlobalBatch, length: int | None, items: str) -> str:
    if length is None and config.num_epochs is not None:
        return f"{config.num_epochs:g} epochs"
    steps = config.total_steps(batch, length or 0)
    epochs = f" = {steps * batch.total / length:.1f} epochs" if length else ""
    return f"{steps} steps = {steps * batch.total} {items}{epochs}"
