"""The costs of a training step, counted and measured on the network itself: operations, memory, time."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from timeit import repeat
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.data.store import LATENTS_FILE, row_size
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.resume import precision_name
from rectified_flow.spaces.latents import Latents
from rectified_flow.system.terminal import duration, lines, size_text
from rectified_flow.training.optimizers import BuildOptimizer

Item = dict[str, Tensor]
Autocast = Callable[[], AbstractContextManager[object]]
BYTES = 4
"""Size of one number of a gradient, a moment or an average."""
SECONDS_MEASURED, MOST_MEASURED = 1.0, 64
"""Time that the images of a measurement take at best [s], and their largest number."""


def forward_flops(flow: nn.Module, item: Item) -> int:
    """Count the floating-point operations of one forward pass on a batch of one; a multiply-add is two."""
    was_training = flow.training
    flow.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flow(**item)
    flow.train(was_training)
    return int(counter.get_total_flops())


def state_memory(flow: nn.Module, averages: int) -> int:
    """Count the memory of weights, gradients, the optimizer's two moments and ``averages`` of the weights [bytes]."""
    trained = sum(p.numel() for p in flow.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in flow.parameters())
    return weights + BYTES * (3 + averages) * trained


def activation_memory(flow: nn.Module, item: Item, autocast: Autocast = nullcontext) -> int:
    """Count the memory of the activations of each image at the peak of a step on a batch of two [bytes].

    Args:
        flow: returns the loss; its gradients are lost.
        item: a batch of one.
        autocast: the precision of a forward pass.
    """
    with _training_step(flow, item, 2, autocast) as step, _Activations(flow) as activations:
        step()
    return activations.peak // 2


def cost_of(action: Callable[[], object]) -> tuple[int, int]:
    """Count the cost of ``action`` without gradients. On torch's meta device, nothing is computed.

    Returns:
        The number of floating-point operations, and the peak memory of the results [bytes].
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter, _Activations(nn.Module()) as activations:
        action()
    return int(counter.get_total_flops()), activations.peak


def multiplication_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the rate at which the device multiplies large matrices [floating-point operations per second]."""
    side = 4096 if device.type == "cuda" else 1024
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    precise, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True  # as convolutions
    seconds = _shortest(lambda: a @ b, of=5)
    torch.backends.cuda.matmul.allow_tf32 = precise
    return 2 * side**3 / seconds


def gradient_time(flow: nn.Module, item: Item, count: int, autocast: Autocast = nullcontext) -> float:
    """Measure the time of a batch's loss and gradient [s].

    Args:
        flow: returns the loss; its gradients are lost.
        item: a batch of one.
        count: images in the batch that is measured.
        autocast: the precision of a forward pass.
    """
    with _training_step(flow, item, count, autocast) as step:
        return _shortest(step, of=3)


def measure_rate(
    flow: nn.Module, build: BuildOptimizer, item: Item, count: int, autocast: Autocast = nullcontext
) -> float:
    """Measure the images per second of training steps on a batch, with the optimizer's updates.

    Args:
        flow: returns the loss; its weights are changed.
        build: builds the optimizer.
        item: a batch of one.
        count: images in the batch that is measured.
        autocast: the precision of a forward pass.
    """
    optimizer = build([(name, p) for name, p in flow.named_parameters() if p.requires_grad])
    with _training_step(flow, item, count, autocast) as step:
        return count / _shortest(lambda: (step(), optimizer.step()), of=4)


@contextmanager
def _training_step(flow: nn.Module, item: Item, count: int, autocast: Autocast) -> Iterator[Callable[[], None]]:
    """Yield a function that computes the loss and the gradient of a batch of ``count`` identical items."""
    batch = {name: torch.cat([value] * count) for name, value in item.items()}

    def step() -> None:
        flow.zero_grad()
        with autocast():
            loss = flow(**batch)
        loss.backward()

    with deterministic(BatchRows(0, 0, count, slice(None)), next(flow.parameters()).device):
        yield step


def blank_item(flow: Flow, points: int, device: torch.device, largest: int | None = None) -> Item:
    """Return a batch of one item of zeros.

    Args:
        flow: the flow to train.
        points: number of points of the item's path; 0 if it has none.
        device: the device of the item.
        largest: upper bound of the item's sides; by default they are those of the space.
    """
    space = flow.space
    channels, *sides = space.shape or (0,)
    zeros = torch.zeros(1, channels, *(min(side, largest or side) for side in sides), device=device)
    batch = {space.key: space.to_stored(zeros)}
    if flow.takes_source:
        batch[SOURCE] = zeros.half() if points else batch[space.key]
    if points:
        batch["path"] = zeros[:, None].expand(-1, points, -1, -1, -1).half()
    return batch


def _shortest(action: Callable[[], object], of: int) -> float:
    """Return the seconds of the shortest of some runs."""
    finish = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    return min(repeat(lambda: (action(), finish()), finish, time.perf_counter, repeat=of, number=1))


def autoencoder_costs(space: Latents, *, mirrored: bool) -> dict[str, str]:
    """Return texts on the size of the latents and on the cost of the autoencoder."""
    moments, *shape = space.autoencoder.shape_of(space.image_size)
    variants = 1 + mirrored
    size = variants * row_size(LATENTS_FILE, (moments, *shape))
    pictures = torch.zeros(1, 3, space.image_size, space.image_size, device="meta")
    encoding, _ = cost_of(lambda: space.autoencoder.encode(pictures))
    decoding, memory = cost_of(lambda: space.autoencoder.decode(torch.zeros(1, *shape, device="meta")))
    also = ", with its mirror image" * mirrored
    return {
        "latents": f"{' x '.join(map(str, shape))}, {size / 1e3:,.1f} kB of disk for each picture{also}",
        "encoding": f"{variants * encoding / 1e9:.3g} GFLOP for each picture, once",
        "decoding": f"{decoding / 1e9:.3g} GFLOP and {memory / 1e6:,.0f} MB for each sample",
    }


def step_costs(
    config: TrainingConfig, accelerator: Accelerator, flow: Flow, flops: int, item: Item, small: Item
) -> dict[str, str]:
    """Return texts on the memory and the time of a step, and on the lower bound of the time.

    Memory and time are measured on a batch of small items, and then scaled: the memory with the number of pixels, the
    time with the floating-point operations of a forward pass.

    Args:
        config: the run's flags.
        accelerator: the run's Accelerator.
        flow: the flow, on the device.
        flops: floating-point operations of a forward pass of ``item``.
        item: a batch of one item of the run.
        small: like ``item``, with sides limited to a maximum.
    """
    device, batch = accelerator.device, config.split_batch(accelerator.num_processes)
    fixed = state_memory(flow, int(config.use_ema))
    pixels, few_pixels = item[flow.space.key].numel(), small[flow.space.key].numel()
    per_image = activation_memory(flow, small, accelerator.autocast) * pixels / few_pixels
    texts = {
        "memory": f"about {fixed / 1e9:.2f} GB + {batch.per_process} images x {per_image / 1e6:,.1f} MB = "
        f"{(fixed + batch.per_process * per_image) / 1e9:.2f} GB per process, excluding the libraries' own memory"
    }
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    rate, few_flops = multiplication_rate(device, dtype), forward_flops(flow, small)
    # Even, as a mean flow takes the derivative of half of the rows.
    count = 2 * max(1, min(MOST_MEASURED, round(SECONDS_MEASURED * rate / (3 * few_flops))) // 2)
    try:
        seconds = gradient_time(flow, small, count, accelerator.autocast) / count * flops / few_flops
    except torch.OutOfMemoryError:
        return texts | {"time": f"unknown: {count} images do not fit into the memory of the {device.type}"}
    images = batch.per_process * batch.accumulation
    step, flops_of_step = seconds * images, 3 * flops * images
    whole = "" if config.num_epochs else f", {duration(step * config.total_steps(batch, 0))} in all"
    height, width = small[flow.space.key].shape[-2:]
    how = f"measured just now on {count} images of {size_text(width, height)} px" + ", not compiled" * config.compile
    least = flops_of_step / rate
    return texts | {
        "time": f"about {duration(step)} a step{whole}: {how}",
        "at best": f"{duration(least)} a step ({least / step:.0%} of that): {flops_of_step / 1e12:.3g} TFLOP per "
        f"process at the measured matmul rate of {rate / 1e12:.3g} TFLOP/s",
    }


class _Activations(TorchDispatchMode):
    """The peak memory of the results of operations, which are watched without being kept alive.

    A result with the shape of a weight counts as a copy of the weight or as its gradient, and not as an activation.

    Args:
        flow: the module with the weights.
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
        if self._at_most > self.peak:  # checking every object is slow
            self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
            self._at_most = sum(size for _, size in self._alive.values())
            self.peak = max(self.peak, self._at_most)


class Throughput:
    """The images per second of training proper; pauses do not count."""

    def __init__(self) -> None:
        self._images_seen = 0
        self._started = time.perf_counter()

    def restart(self, images_seen: int) -> float:
        """Return the rate since the last restart, at ``images_seen`` images, and start to count again."""
        now = time.perf_counter()
        rate = (images_seen - self._images_seen) / max(1e-9, now - self._started)
        self._images_seen, self._started = images_seen, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time that is spent inside the block."""
        entered = time.perf_counter()
        yield
        self._started += time.perf_counter() - entered


def summarize(
    config: TrainingConfig, accelerator: Accelerator, flow: nn.Module, flops: int, data: str, length: int | None
) -> str:
    """Describe device, data, network, batch, length and output of a run.

    Args:
        config: the run's flags.
        accelerator: the run's Accelerator.
        flow: the module to train.
        flops: floating-point operations of one item's forward pass.
        data: a description of the dataset.
        length: number of items, if the dataset has been opened.
    """
    batch = config.split_batch(accelerator.num_processes)
    count = sum(parameter.numel() for parameter in flow.parameters())
    trained = sum(parameter.numel() for parameter in flow.parameters() if parameter.requires_grad)
    items, steps = items_of(flow), config.total_steps(batch, length or 0)
    if length is None and config.num_epochs is not None:
        extent = f"{config.num_epochs:g} epochs"
    else:
        epochs = f" = {steps * batch.total / length:.1f} epochs" if length else ""
        extent = f"{steps} steps = {steps * batch.total} {items}{epochs}"
    frozen = f" ({trained / 1e6:.1f} M trained)" if trained < 0.999 * count else ""
    return lines(
        {
            "processes": f"{accelerator.num_processes} x {accelerator.device.type}, {precision_name(accelerator)}",
            "data": data,
            "network": f"{count / 1e6:.1f} M parameters{frozen}, {flops / 1e9:.2f} GFLOP per {items[:-1]} forward",
            "batch": batch,
            "run": extent,
            "output": config.output_dir,
        }
    )


def items_of(flow: nn.Module) -> str:
    """Return the name of a flow's items in the plural: ``images``, or the key of its space."""
    space = getattr(flow, "space", None)
    if getattr(space, "picture_shape", None) is not None:
        return "images"
    return getattr(space, "key", "items")
