"""The lines that a run prints before it starts."""

from accelerate import Accelerator
from torch import nn

from rectified_flow.data.batches import GlobalBatch
from rectified_flow.report import lines
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.resume import precision_name


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
