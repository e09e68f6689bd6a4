"""What a run is about to do, in a few lines a person reads before it starts."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.data.stream import GlobalBatch
from rectified_flow.training.accelerator import build_accelerator
from rectified_flow.training.config import TrainingConfig


def forward_flops(flow: nn.Module, item: dict[str, Tensor]) -> int:
    """Floating-point operations (a multiply-add is two) of one forward pass on a batch of one."""
    was_training = flow.training
    flow.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flow(**item)
    flow.train(was_training)
    return int(counter.get_total_flops())


def describe_run(
    config: TrainingConfig,
    accelerator: Accelerator,
    flow: nn.Module,
    flops: int,
    dataset: Dataset[Any] | None,
) -> str:
    """Lines on where, on what, with what and how long; without a dataset, what can be said before it is opened."""
    batch = config.split_batch(accelerator.num_processes)
    precision = {"no": "float32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    parameters = sum(parameter.numel() for parameter in flow.parameters())
    lines = {
        "processes": f"{accelerator.num_processes} x {accelerator.device.type}, {precision}",
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
    black = {"images": torch.zeros(1, 3, config.image_size, config.image_size, dtype=torch.uint8)}
    accelerator.print()
    accelerator.print(describe_run(config, accelerator, flow, forward_flops(flow, black), None))


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
