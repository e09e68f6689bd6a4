"""``--look`` and ``--dry_run``: a report of the training pictures, and the cost of a run before it starts."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.cli.teacher import files_of
from rectified_flow.cli.train_flags import TrainConfig
from rectified_flow.data.report import describe_pictures
from rectified_flow.data.store import LATENTS_FILE, ImageDataset, row_size
from rectified_flow.distributed.collectives import on_main
from rectified_flow.evaluation.distances import count_near_duplicates
from rectified_flow.evaluation.features import average_colours, reference_features
from rectified_flow.flags import plain
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.solvers import CALLS_PER_STEP
from rectified_flow.networks.unet import to_device
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import is_run
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.system.files import prepare_folder, writing
from rectified_flow.system.outputs import claim
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.system.terminal import duration, line, lines
from rectified_flow.training import costs
from rectified_flow.training.accelerator import build_accelerator

SHEET_FILE = "look.png"
SHOWN = 64


def look(output_dir: Path, pictures: ImageDataset, space: Pixels) -> None:
    """Print the report of ``pictures``, and write a sheet of some as training augments them. Collective.

    Raises:
        UsageError: if ``output_dir`` cannot be written.
        RunError: if the disk is full.
    """
    state = PartialState()
    colours = reference_features(pictures, average_colours())

    def report() -> None:
        tqdm.write(lines(describe_pictures(pictures, count_near_duplicates(colours))))
        shown = spread(pictures.labels, SHOWN)
        with deterministic(Samples(0, shown)):
            data, _ = space.augment(pictures.read_batch(shown)["images"])
        sheet = to_grid(space.render(space.decode(space.encode(data))))
        path = prepare_folder("output_dir", output_dir) / SHEET_FILE
        with writing(path):
            claim(output_dir, [SHEET_FILE], ours=is_run(output_dir))
        write_picture(path, sheet)
        tqdm.write(line("sheet", f"{path}: {len(shown)} pictures as they are trained on"))

    on_main(state, report)


def spread(labels: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", count: int) -> list[int]:
    """Return at most ``count`` random rows, sorted, with a number of rows per label that is as equal as possible."""
    shuffled = np.random.default_rng(0).permutation(len(labels))
    turns = np.empty(len(labels), dtype=int)  # number of earlier rows with the same label
    for label in np.unique(labels):
        rows = shuffled[labels[shuffled] == label]
        turns[rows] = np.arange(len(rows))
    by_turn = shuffled[np.argsort(turns[shuffled], kind="stable")]
    return sorted(by_turn[:count].tolist())


LARGEST_SIDE_MEASURED = 64
"""Sides of the largest images whose memory and time is measured [px]; beyond it both grow with the pixels."""

SECONDS_MEASURED, MOST_MEASURED = 1.0, 64
"""Time that the measured images take at best [s], and their largest number."""


def print_plan(config: TrainConfig, flow: Flow, length: int | None = None) -> None:
    """Print every flag with its resolved value, and the size, memory and time of the run.

    Args:
        config: all flags.
        flow: the flow to train.
        length: number of pictures, if they have been opened.
    """
    run, space, taught = config.run, flow.space, config.teacher_data
    points = 0 if taught is None or taught.rows == "pairs" else taught.points
    accelerator = build_accelerator(run, flow)
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
    with accelerator.autocast():
        flops = costs.forward_flops(
            flow, costs.blank_item(space, (space.shape or (0,))[1:], points, accelerator.device)
        )
    data = (
        f"{config.data.dataset_path or config.data.dataset} at {config.data.framing.size_text} px"
        + ", not opened yet" * (length is None)
    )
    accelerator.print("\n" + costs.summarize(run, accelerator, flow, flops, data, length))
    texts: dict[str, str] = {}
    if taught is not None:
        calls = taught.count * taught.steps * CALLS_PER_STEP[taught.solver] * (1 if taught.guidance_scale == 1 else 2)
        size = taught.count * sum(row_size(name, shape) for name, shape in files_of(taught, space).items())
        texts[taught.rows] = (
            f"{taught.count:,} in {taught.steps} steps each, drawn first with {calls:,} calls of the "
            f"teacher's network: {size / 1e9:.2f} GB in {taught.folder}"
        )
    if isinstance(space, Latents):
        texts |= _autoencoder_costs(space, mirrored=config.data.horizontal_flip)
    largest = max(LARGEST_SIDE_MEASURED, 2 ** (len(config.network.dim_mults) - 1))
    measured = tuple(min(side, largest) for side in (space.shape or (0,))[1:])
    item = costs.blank_item(space, measured, points, accelerator.device)
    accelerator.print(lines(texts | _step_costs(run, accelerator, flow, flops, item, measured)))


def _autoencoder_costs(space: Latents, *, mirrored: bool) -> dict[str, str]:
    """Return texts on the size of the latents and on the cost of the autoencoder."""
    moments, *shape = space.autoencoder.shape_of(space.image_size)
    variants = 1 + mirrored
    size = variants * row_size(LATENTS_FILE, (moments, *shape))
    pictures = torch.zeros(1, 3, space.image_size, space.image_size, device="meta")
    encoding, _ = costs.cost_of(lambda: space.autoencoder.encode(pictures))
    decoding, memory = costs.cost_of(lambda: space.autoencoder.decode(torch.zeros(1, *shape, device="meta")))
    also = ", with its mirror image" * mirrored
    return {
        "latents": f"{' x '.join(map(str, shape))}, {size / 1e3:,.1f} kB of disk for each picture{also}",
        "encoding": f"{variants * encoding / 1e9:.3g} GFLOP for each picture, once",
        "decoding": f"{decoding / 1e9:.3g} GFLOP and {memory / 1e6:,.0f} MB for each sample",
    }


def _step_costs(
    run: TrainingConfig,
    accelerator: Accelerator,
    flow: Flow,
    flops: int,
    item: dict[str, Tensor],
    measured: Sequence[int],
) -> dict[str, str]:
    """Return texts on the memory and the time of a step, and on the lower bound of the time.

    The memory grows with the number of pixels, and the time with the floating-point operations of a forward pass.

    Args:
        run: the flags of the run.
        accelerator: the run's Accelerator.
        flow: the flow, on the device.
        flops: floating-point operations of the forward pass of an image of full size.
        item: a batch of one image, on which memory and time are measured.
        measured: the sides of this image, which may be smaller than the images of the run.
    """
    device, batch = accelerator.device, run.split_batch(accelerator.num_processes)
    fixed = costs.state_memory(flow, run.use_ema + 2 * run.power_ema)
    activations = costs.activation_memory(flow, item, accelerator.autocast)
    per_image = activations * prod((flow.space.shape or (0,))[1:]) / prod(measured)
    texts = {
        "memory": f"about {fixed / 1e9:.2f} GB + {batch.per_process} images x {per_image / 1e6:,.1f} MB = "
        f"{(fixed + batch.per_process * per_image) / 1e9:.2f} GB per process, excluding the libraries' own memory"
    }
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    rate, flops_measured = costs.multiplication_rate(device, dtype), costs.forward_flops(flow, item)
    # Even, as a mean flow takes the derivative of half of the rows.
    count = 2 * max(1, min(MOST_MEASURED, round(SECONDS_MEASURED * rate / (3 * flops_measured))) // 2)
    try:
        seconds = costs.gradient_time(flow, item, count, accelerator.autocast) / count * flops / flops_measured
    except torch.OutOfMemoryError:
        return texts | {"time": f"unknown: {count} images do not fit into the memory of the {device.type}"}
    images = batch.per_process * batch.accumulation
    step, flops_of_step = seconds * images, 3 * flops * images
    whole = "" if run.num_epochs else f", {duration(step * run.total_steps(batch, 0))} in all"
    size = "x".join(map(str, dict.fromkeys(reversed(measured))))  # one number for a square
    how = f"measured just now on {count} images of {size} px" + ", not compiled" * run.compile
    least = flops_of_step / rate
    return texts | {
        "time": f"about {duration(step)} a step{whole}: {how}",
        "at best": f"{duration(least)} a step ({least / step:.0%} of that): {flops_of_step / 1e12:.3g} TFLOP per "
        f"process at the measured matmul rate of {rate / 1e12:.3g} TFLOP/s",
    }
