"""What a run is about to do, in a few lines a person reads before it starts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from rectified_flow.data.stream import GlobalBatch
from rectified_flow.training.config import TrainingConfig


def forward_flops(flow: nn.Module, item: dict[str, Tensor]) -> int:
    """Floating-point operations (a multiply-add is two) of one forward pass on a batch of one."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        flow(**item)
    return int(counter.get_total_flops())


def describe_run(
    config: TrainingConfig,
    flow: nn.Module,
    flops: int,
    batch: GlobalBatch,
    place: str,
    dataset: Dataset[Any] | None,
) -> list[str]:
    """Lines on where, on what, with what and how long; without a dataset, what can be said before it is opened."""
    parameters = sum(parameter.numel() for parameter in flow.parameters())
    lines = {
        "processes": place,
        "data": _describe_data(config, dataset),
        "network": f"{parameters / 1e6:.1f} M parameters, {flops / 1e9:.2f} GFLOP per image forward",
        "batch": str(batch),
        "run": _describe_length(config, batch, None if dataset is None else len(dataset)),  # type: ignore[arg-type]
        "output": str(config.output_dir),
    }
    return [f"{name:<11} {text}" for name, text in lines.items()]


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
