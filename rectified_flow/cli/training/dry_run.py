"""The output of ``--dry_run``: all flags, and the size, memory and time of the run."""

from rectified_flow.cli.flags.training import TrainConfig
from rectified_flow.cli.training.rows import files_of
from rectified_flow.cli.training.teacher import calls_for
from rectified_flow.data.store import row_size
from rectified_flow.flags import plain
from rectified_flow.flows.flow import Flow
from rectified_flow.networks.unet import to_device
from rectified_flow.spaces.latents import Latents
from rectified_flow.system.terminal import lines
from rectified_flow.training import costs
from rectified_flow.training.accelerator import build_accelerator

LARGEST_SIDE_MEASURED = 64
"""Sides of the largest images whose memory and time are measured [px]; beyond it both grow with the pixels."""


def print_plan(config: TrainConfig, flow: Flow, length: int | None = None) -> None:
    """Print every flag with its resolved value, and the size, memory and time of the run.

    Args:
        config: all flags.
        flow: the flow to train.
        length: number of pictures, if they have been opened.
    """
    run, space, taught = config.run, flow.space, config.teacher_data
    points = taught.path_points if taught else 0
    accelerator = build_accelerator(run)
    batch = run.split_batch(accelerator.num_processes)
    resolved = plain(config) | {
        "batch_size": batch.per_process,
        "global_batch_size": batch.total,
        "gradient_accumulation_steps": batch.accumulation,
        "mixed_precision": accelerator.mixed_precision,
        "checkpoint_dir": str(run.checkpoints),
        "train_num_steps": None if run.num_epochs else run.total_steps(batch, 0),
    }
    for name, value in resolved.items():
        accelerator.print(f"{name:<28} {value}")
    to_device(flow, accelerator.device, accelerator.mixed_precision)
    item = costs.blank_item(flow, points, accelerator.device)
    with accelerator.autocast():
        flops = costs.forward_flops(flow, item)
    data = f"{config.data.dataset_path or config.data.dataset} at {config.data.framing.size_text} px"
    data += ", not opened yet" * (length is None)
    accelerator.print("\n" + costs.summarize(run, accelerator, flow, flops, data, length))
    texts: dict[str, str] = {}
    if taught is not None:
        files = files_of(taught, space, with_sources=flow.takes_source and not flow.from_source)
        size = taught.count * sum(row_size(name, shape) for name, shape in files.items())
        calls = f"{taught.count * calls_for(taught):,} calls of the teacher's network"
        texts[taught.rows] = (
            f"{taught.count:,} in {taught.steps} steps each, generated before training with {calls}: "
            f"{size / 1e9:.2f} GB in {taught.folder}"
        )
    if isinstance(space, Latents):
        texts |= costs.autoencoder_costs(space, mirrored=config.data.horizontal_flip)
    largest = max(LARGEST_SIDE_MEASURED, 2 ** (len(config.network.dim_mults) - 1))
    small = costs.blank_item(flow, points, accelerator.device, largest)
    accelerator.print(lines(texts | costs.step_costs(run, accelerator, flow, flops, item, small)))
