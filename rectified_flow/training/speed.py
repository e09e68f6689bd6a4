"""The speed of a training: measured on some steps before it begins, and counted while it runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf, prod
from statistics import median
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_norm_

from rectified_flow.condition import chosen
from rectified_flow.errors import is_out_of_memory
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.randomness import BatchRows, deterministic
from rectified_flow.runs.folder import precision_name
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.medium import Medium
from rectified_flow.system.terminal import lines
from rectified_flow.training.optimizers import BuildOptimizer
from rectified_flow.training.stepper import constant_average, trained_parameters

PIXELS = 2**14  # of a measured batch on a CPU; with half of them, a step of 64 px looks 20% slower than it is
MAX_STEPS, MIN_STEPS, MAX_SECONDS = 6, 2, 2.0  # measured steps; no further one starts after these seconds
SLOW_STEP = 5.0  # only one further step is measured if the first takes more than these seconds
AVERAGE = 0.99  # decay of the average of the weights in measured steps; its time does not depend on it
BYTES_PER_WEIGHT = 20  # float32 weight, gradient, two moments and average


class Speed(NamedTuple):
    """The speed of a training and the memory that it needs."""

    rate: float
    """Images per second; 0 if a step of a single image does not fit into the memory."""
    memory: float = 0.0
    """Memory of each process [bytes]."""
    slowest: float = 0.0
    """Images per second of the slowest measured step; 0 if it is unknown."""
    fastest: float = 0.0
    """Images per second of the fastest measured step; 0 if it is unknown."""
    at_once: float = inf
    """The largest number of images of a process that fit, if a step with more of them ran out of memory."""

    def __str__(self) -> str:
        span = f" ({_number(self.slowest)} to {_number(self.fastest)})" if self.fastest else ""
        memory = f"in about {self.memory / 1e9:.2g} GB of memory for each process"
        return f"{_number(self.rate)} images/s{span} {memory}"


def _number(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 1 else f"{rate:.2g}"


def measure_speed(
    flow: Flow,
    build: BuildOptimizer,
    count: int,
    points: int = 0,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Speed:
    """Time steps of this process on a batch of ``count`` images, and read the memory at the peak.

    The median of up to six steps counts. A step clips the gradient and updates an average of the weights, as in a run.
    A run also reads its batch from a store, which takes less than a thousandth of a step (benchmarks/README.md).

    On a CPU, the steps are made on fewer and smaller images, and both figures are scaled by the number of pixels: time
    and memory of a convolution are in proportion to it, and a full memory would end the program. On a GPU, the speed
    depends on the size of the batch. A batch that exceeds the memory is halved until it fits, and scaled, too.
    """
    device, sides = flow.device, list((flow.space.shape or (0,))[1:])
    rows, small = count, sides
    if device.type == "cpu":
        divisor = 2 * getattr(flow.network, "downsampling", inf)
        while 2 * prod(small) > PIXELS and not any(side % divisor for side in small):
            small = [side // 2 for side in small]
        rows = min(count, max(2, PIXELS // prod(small)))
    at_once = inf
    while rows:
        try:
            return _time_steps(flow, build, count, points, autocast, rows, small)._replace(at_once=at_once)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        rows = at_once = rows // 2
        torch.cuda.empty_cache()  # cuBLAS and cuDNN allocate beside torch
    return Speed(0.0, inf)


def _time_steps(
    flow: Flow,
    build: BuildOptimizer,
    count: int,
    points: int,
    autocast: Callable[[], AbstractContextManager[object]],
    rows: int,
    small: list[int],
) -> Speed:
    """Measure steps on ``rows`` images of the sides ``small``, and scale the figures to ``count`` whole images."""
    device, sides = flow.device, list((flow.space.shape or (0,))[1:])
    scale = count * prod(sides) / (rows * prod(small))
    batch = {name: torch.cat([value] * rows) for name, value in blank_item(flow, points, small).items()}
    parameters = trained_parameters(flow)
    optimizer, average = build([*parameters.items()]), constant_average(flow, AVERAGE)
    weights = {p.untyped_storage().data_ptr() for p in flow.parameters()}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
        return value

    def step() -> float:
        flow.zero_grad()
        began = _now()
        with autocast():
            loss = flow(**batch)
        loss.backward()
        computed = _now()
        clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        average.update()
        return scale * (computed - began) + _now() - computed

    with deterministic(BatchRows(0, 0, rows, slice(None)), device):
        began = time.perf_counter()
        with saved_tensors_hooks(keep, lambda value: value):
            step()  # not measured, since it allocates memory
        now, times = time.perf_counter(), list[float]()
        deadline, least = now + MAX_SECONDS, 1 if now - began > SLOW_STEP else MIN_STEPS
        while len(times) < least or (len(times) < MAX_STEPS and time.perf_counter() < deadline):
            times.append(step())
    state = BYTES_PER_WEIGHT * sum(p.numel() for p in flow.parameters())
    memory = state + scale * sum(kept.values())
    return Speed(count / median(times), memory, slowest=count / max(times), fastest=count / min(times))


def blank_item(flow: Flow, points: int, sides: list[int]) -> dict[str, Tensor]:
    """Return a batch of one item of zeros without conditions, with a path of so many points if these are not 0."""
    space = flow.space
    zeros = torch.zeros(1, (space.shape or (0,))[0], *sides, device=flow.device)
    batch = {name: kind.none(1, flow.device) for name, kind in chosen(flow.conditions).items()}
    batch[space.key] = space.to_stored(zeros)
    if flow.takes_source:
        batch[SOURCE] = zeros.half() if points else batch[space.key]
    if points:
        batch["path"] = zeros[:, None].expand(-1, points, -1, -1, -1).half()
    return batch


def _now() -> float:
    """Return the time when the device has finished its work [s]."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


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
    config: TrainingConfig, accelerator: Accelerator, flow: nn.Module, data: str, length: int, steps: int
) -> str:
    """Describe device, data, network, batch, length and output of a run.

    Args:
        config: the flags of the run.
        accelerator: the accelerator of the run.
        flow: the flow.
        data: the data in words.
        length: number of items in an epoch.
        steps: number of steps of the whole run.
    """
    batch = config.split_batch(accelerator.num_processes)
    count = sum(parameter.numel() for parameter in flow.parameters())
    images = steps * batch.total
    texts = {
        "processes": f"{accelerator.num_processes} x {accelerator.device.type}, {precision_name(accelerator)}",
        "data": data,
        "network": f"{count / 1e6:.1f} M parameters",
        "batch": batch,
        "run": f"{steps} steps = {images} {items_of(flow)} = {images / length:.1f} epochs",
        "output": config.output_dir,
    }
    return lines(texts)


def items_of(flow: nn.Module) -> str:
    """Return the name of a flow's items in the plural."""
    space = getattr(flow, "space", None)  # other modules can be trained, too
    return Medium.items if space is None else str(space.medium.items)
