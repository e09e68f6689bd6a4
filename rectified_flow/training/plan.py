"""What a run is about to do, in a few lines a person reads before it starts."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from rectified_flow.data.stream import GlobalBatch
from rectified_flow.networks import place
from rectified_flow.training.accelerator import build_accelerator, precision_name
from rectified_flow.training.config import TrainingConfig
from rectified_flow.training.costs import forward_flops, gradient_time, multiplication_rate, training_memory

LARGEST_SIDE_MEASURED = 64
"""Of images whose memory and time is measured [px]; larger ones take nearly in proportion to their pixels."""

SECONDS_MEASURED, MOST_MEASURED = 1.0, 64
"""As many images are measured as take that long at best [s], and no more than these."""


def describe_run(
    config: TrainingConfig,
    accelerator: Accelerator,
    flow: nn.Module,
    flops: int,
    dataset: Dataset[Any] | None,
) -> str:
    """Lines on where, on what, with what and how long; without a dataset, what can be said before it is opened."""
    batch = config.split_batch(accelerator.num_processes)
    parameters = sum(parameter.numel() for parameter in flow.parameters())
    lines = {
        "processes": f"{accelerator.num_processes} x {accelerator.device.type}, {precision_name(accelerator)}",
        "data": _describe_data(config, dataset),
        "network": f"{parameters / 1e6:.1f} M parameters, {flops / 1e9:.2f} GFLOP per image forward",
        "batch": str(batch),
        "run": _describe_length(config, batch, None if dataset is None else len(dataset)),  # type: ignore[arg-type]
        "output": str(config.output_dir),
    }
    return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def print_plan(config: TrainingConfig, flow: nn.Module) -> None:
    """Print every flag with the value it takes, and what the run would be, without opening any data."""
    accelerator = build_accelerator(config)
    batch = config.split_batch(accelerator.num_processes)
    resolved = config.plain() | {
        "batch_size": batch.per_process,
        "global_batch_size": batch.total,
        "gradient_accumulation_steps": batch.accumulation,
        "mixed_precision": accelerator.mixed_precision,
        "checkpoint_dir": str(config.checkpoints),
        "train_num_steps": None if config.num_epochs else config.total_steps(batch, 0),
    }
    for name, value in resolved.items():
        accelerator.print(f"{name:<28} {value}")
    place(flow, accelerator.device, accelerator.mixed_precision)
    flops = forward_flops(flow, _black(config.image_size, accelerator.device))
    accelerator.print()
    accelerator.print(describe_run(config, accelerator, flow, flops, None))
    accelerator.print(_describe_memory(config, accelerator, flow))
    accelerator.print(_describe_time(config, accelerator, flow, flops))


def _describe_memory(config: TrainingConfig, accelerator: Accelerator, flow: nn.Module) -> str:
    """A line on the memory that a step takes."""
    count, side = config.split_batch(accelerator.num_processes).per_process, _side_measured(config)
    item = _black(side, accelerator.device)
    averages = config.use_ema + 2 * config.power_ema
    memory = training_memory(flow, item, averages, accelerator.autocast)
    per_image = memory.per_image * (config.image_size / side) ** 2
    return (
        f"{'memory':<11} about {memory.fixed / 1e9:.2f} GB + {count} images x {per_image / 1e6:,.1f} MB = "
        f"{(memory.fixed + count * per_image) / 1e9:.2f} GB per process, and what the libraries need"
    )


def _describe_time(config: TrainingConfig, accelerator: Accelerator, flow: nn.Module, flops: int) -> str:
    """Lines on the time that a step takes, and the least it can take."""
    batch, item = config.split_batch(accelerator.num_processes), _black(_side_measured(config), accelerator.device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    rate = multiplication_rate(accelerator.device, dtype)
    flops_measured = forward_flops(flow, item)
    # Even, as a mean flow takes the derivative of half of the rows.
    count = 2 * max(1, min(MOST_MEASURED, round(SECONDS_MEASURED * rate / (3 * flops_measured))) // 2)
    try:
        per_image = gradient_time(flow, item, count, accelerator.autocast) / count * flops / flops_measured
    except torch.OutOfMemoryError:
        return f"{'time':<11} not known: {count} images do not fit into the memory of the {accelerator.device.type}"
    images = batch.per_process * batch.accumulation
    steps = 0 if config.num_epochs else config.total_steps(batch, 0)
    whole = f", {_duration(per_image * images * steps)} in all" if steps else ""
    how = f"measured just now on {count} images of {item['images'].shape[-1]} px" + ", not compiled" * config.compile
    least = 3 * flops * images / rate
    return (
        f"{'time':<11} about {_duration(per_image * images)} a step{whole}: {how}\n"
        f"{'at best':<11} {_duration(least)} a step ({least / (per_image * images):.0%} of that): "
        f"{3 * flops * images / 1e12:.3g} TFLOP per process at {rate / 1e12:.3g} TFLOP/s, as matrices are multiplied"
    )


def _side_measured(config: TrainingConfig) -> int:
    return min(config.image_size, max(LARGEST_SIDE_MEASURED, 2 ** (len(config.dim_mults) - 1)))


def _duration(seconds: float) -> str:
    """Seconds in the unit that a person would take."""
    units = {"days": 2 * 86400, "hours": 2 * 3600, "minutes": 120, "s": 1, "ms": 0}
    unit = next(unit for unit, least in units.items() if seconds >= least)
    size = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1, "ms": 1e-3}[unit]
    return f"{seconds / size:.{0 if seconds / size >= 10 else 1}f} {unit}"


def _black(side: int, device: torch.device) -> dict[str, Tensor]:
    return {"images": torch.zeros(1, 3, side, side, dtype=torch.uint8, device=device)}


def _describe_data(config: TrainingConfig, dataset: Dataset[Any] | None) -> str:
    name = getattr(dataset, "info", {}).get("source", str(config.dataset_path or config.dataset))
    if dataset is None:
        return f"{name} at {config.image_size} px, not opened yet"
    classes = getattr(dataset, "num_classes", None)
    labels = f", {classes} classes" if classes else ""
    return f"{name}: {len(dataset)} images of {config.image_size} px{labels}"  # type: ignore[arg-type]


def _describe_length(config: TrainingConfig, batch: GlobalBatch, length: int | None) -> str:
    if length is None and config.num_epochs is not None:
        return f"{config.num_epochs:g} epochs"
    steps = config.total_steps(batch, length or 0)
    epochs = f" = {steps * batch.total / length:.1f} epochs" if length else ""
    return f"{steps} steps = {steps * batch.total} images{epochs}"
