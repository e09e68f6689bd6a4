"""The facts and speeds that a plan depends on: steps are timed, and memory is read."""

import os
import time
from collections.abc import Collection
from functools import cache
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import gather_object

from rectified_flow.cli.distill import DistillationData, Recipe
from rectified_flow.cli.planning import plan
from rectified_flow.cli.record import recorded_flags
from rectified_flow.cli.settings import command_line
from rectified_flow.cli.training_flags import (
    STARTER,
    UNET,
    DataConfig,
    InitConfig,
    Method,
    NetworkConfig,
)
from rectified_flow.data.sources.synthetic_flowers import SYNTHETIC_FLOWERS
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flows.flow import Flow
from rectified_flow.load import autocast
from rectified_flow.networks.network import Network, to_device
from rectified_flow.parts import Choice, name_of, split_part
from rectified_flow.registry import names
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.space import Space
from rectified_flow.system.machine import free_memory, memory
from rectified_flow.system.terminal import duration, line, lines
from rectified_flow.training.optimizers import find_optimizer
from rectified_flow.training.speed import Speed, measure_speed
from rectified_flow.training.trainer import choose_precision

SHORTEST_WARM_UPS = 4  # least length of a run by default, as a multiple of its warm-up; a guess


def least_memory() -> float:
    """Return the least free memory of a process [bytes], on its device; no limit if it is unknown. Collective."""
    device, free = PartialState().device, inf
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for itself is free, too
        free = torch.cuda.mem_get_info(device)[0]
    elif device.type == "cpu":
        free = free_memory()
    return min(gather_object([free]))


def precisions(
    run: TrainingConfig, method: Method, fixed: Collection[str], stored: Recipe | None = None
) -> tuple[str | None, ...]:
    """Return the precisions that a plan may choose from, the safest one first; None is the default of the device."""
    state, is_fixed = PartialState(), "mixed_precision" in fixed or "ACCELERATE_MIXED_PRECISION" in os.environ
    if is_fixed or state.device.type != "cpu" or method == "mean_flow":
        return (run.mixed_precision,)
    if stored is not None:
        return ("bf16" if stored.precision == "bf16" else "no",)
    return ("no", "bf16") if on_main(state, is_bf16_faster) else ("no",)


@cache
def is_bf16_faster() -> bool:
    """Return whether this CPU computes a small convolution faster in bf16.

    CPUs without instructions for bf16 take up to 20 times as long, so steps of whole networks are not tried there.
    """
    inputs, weights = torch.ones(8, 48, 16, 16), torch.ones(48, 48, 3, 3)

    def least_time(dtype: torch.dtype) -> float:
        times, (x, kernel) = list[float](), (inputs.to(dtype), weights.to(dtype))
        for _ in range(4):  # the first one prepares the kernel
            began = time.perf_counter()
            F.conv2d(x, kernel, padding=1)
            times.append(time.perf_counter() - began)
        return min(times)

    return least_time(torch.bfloat16) < least_time(torch.float32)


def training_speed(flow: Flow, run: TrainingConfig, path_points: int) -> Speed:
    """Measure the images per second of all processes, by the slowest of them, and the memory of each. Collective.

    Args:
        flow: the flow to train.
        run: the flags of the training.
        path_points: number of points of each path of a teacher; 0 for other data.
    """
    state = PartialState()
    precision = choose_precision(run, state.device)
    to_device(flow, state.device, precision).train()
    count = run.split_batch(state.num_processes).per_process
    optimizer = find_optimizer(run, fused=state.device.type == "cuda")
    speed = measure_speed(flow, optimizer, count, path_points, lambda: autocast(precision, state.device))
    speeds: list[Speed] = gather_object([speed])
    slowest, processes = min(speeds), state.num_processes
    rate, _, low, high, _ = slowest
    memory, at_once = max(each.memory for each in speeds), min(each.at_once for each in speeds)
    return Speed(processes * rate, memory, processes * low, processes * high, at_once)


def short_warm_up(run: TrainingConfig, items: int, given: Collection[str]) -> dict[str, int]:
    """Return the flag of a warm-up that suits a run too short for the default one, and print it."""
    state = PartialState()
    steps = run.total_steps(run.split_batch(state.num_processes), items)
    most = max(1, steps // SHORTEST_WARM_UPS)
    if "lr_warmup_steps" in given or run.lr_warmup_steps <= most:
        return {}
    state.print(line("warm-up", f"--lr_warmup_steps {most}, since the run has {steps:,} steps"))
    return {"lr_warmup_steps": most}


def print_speed(run: TrainingConfig, speed: Speed, items: int) -> None:
    """Print the time and the memory of a run without a plan, with this number of items in an epoch."""
    state = PartialState()
    batch = run.split_batch(state.num_processes)
    is_full = speed.rate == 0 or speed.at_once < batch.per_process
    if is_full or (state.device.type == "cpu" and speed.memory > memory()):
        needed = f"a step of {batch.per_process:,} images does not fit into the memory ({speed.memory / 1e9:,.1f} GB)"
        remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
        raise UsageError(f"{needed}: {remedy}")
    step, steps = batch.total / speed.rate, run.total_steps(batch, items)
    state.print(lines({"speed": speed, "time": f"{duration(step)} a step, {duration(step * steps)} in all"}))


def is_free(network: Choice, flags: NetworkConfig, given: Collection[str]) -> bool:
    """Return whether a plan chooses the size of a network: a flag may have named it, but without arguments."""
    sized = issubclass(network.target, Network) and bool(network.target.widths)
    return sized and {"dim", "dim_mults"}.isdisjoint(given) and not ("network" in given and flags.network[1:])


def network_of_origin(
    network: NetworkConfig,
    init: InitConfig,
    data: DataConfig,
    distilled: DistillationData | None,
    fixed: frozenset[str],
) -> tuple[dict[str, Any], str]:
    """Return the network of the run of ``--init_from``, and words for a network that is not to be chosen. Collective.

    The words are empty if the plan chooses the network.
    """
    origin = init.origin(data.starter)
    if distilled is not None:
        return {}, "the network of the teacher"
    if "network" in fixed:
        name, options = split_part(network.network)
        set_there = {option.partition("=")[0] for option in options}
        others = [each for each in plan.UNET_FLAGS if name == UNET and each not in set_there]
        words = command_line({each: getattr(network, each) for each in ("network", *others)})
        return {}, f"{' '.join(words)}; set by flags, the others by default"
    if origin is None or init.init_from == STARTER:
        return {}, ""
    source = on_main(PartialState(), lambda: checkpoint.resolve(origin, [checkpoint.CONFIG_FILE]))
    known = recorded_flags(source)
    return {name: known[name] for name in ("network", *plan.UNET_FLAGS)}, f"the network of {init.init_from}"


def starter_of(
    init: InitConfig, data: DataConfig, space: Space, given: Collection[str], *, is_plain: bool
) -> plan.Starter:
    """Return how a run may use a starter, a rectified flow of RGB pictures that predicts velocities.

    Args:
        init: the flags of the initial weights.
        data: the flags of the pictures.
        space: the space of the pictures.
        given: names of the flags that the user gave.
        is_plain: whether the run trains a rectified flow without a teacher.
    """
    if init.init_from == STARTER:
        return "requested"
    unlike = {"init_from", "prediction", "space", "alpha"}.intersection(given)
    named = data.dataset_path is None and name_of(data.dataset) in (SYNTHETIC_FLOWERS, *names("dataset"))
    sides = (space.shape or data.framing.shape)[1:]
    fits = min(sides) in plan.STARTER_SIDES.get(data.starter, ()) and not data.space and not named
    return "suited" if is_plain and not unlike and fits else "unsuited"
