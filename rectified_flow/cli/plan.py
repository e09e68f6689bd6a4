"""``--look`` and ``--dry_run``: a report of the training pictures, and the cost of a run before it starts."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from tqdm.auto import tqdm

from rectified_flow.cli.recipe import may_choose
from rectified_flow.cli.teacher import calls_of, files_of
from rectified_flow.cli.train_flags import TeacherData, TrainConfig
from rectified_flow.data.store import LATENTS_FILE, ImageDataset, describe_pictures, row_size
from rectified_flow.distributed.collectives import on_main
from rectified_flow.evaluation.distances import count_near_duplicates
from rectified_flow.evaluation.features import average_colours, reference_features
from rectified_flow.flags import plain
from rectified_flow.flows.flow import Flow
from rectified_flow.networks.unet import to_device
from rectified_flow.randomness import Samples, deterministic
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.files import prepare_folder
from rectified_flow.system.pictures import to_grid, write_picture
from rectified_flow.system.terminal import line, lines, size_text
from rectified_flow.training.costs import (
    cost_of,
    forward_flops,
    gradient_time,
    multiplication_rate,
    summarize,
    training_memory,
)
from rectified_flow.training.trainer import build_accelerator

SHEET_FILE = "look.png"
SHOWN = 64


def look(output_dir: Path, pictures: ImageDataset, space: Pixels) -> None:
    """Print the report of ``pictures``, and write a sheet of some as training augments them. Collective.

    Raises:
        UsageError: if ``output_dir`` cannot be written.
        RunError: if the disk is full.
    """
    state = PartialState()
    colours = reference_features(pictures, average_colours(), state)
    on_main(state, lambda: _look(output_dir, pictures, space, count_near_duplicates(colours)))


def _look(output_dir: Path, pictures: ImageDataset, space: Pixels, near_duplicates: int) -> None:
    tqdm.write(lines(describe_pictures(pictures, near_duplicates)))
    chosen = spread(pictures.labels, SHOWN)
    with deterministic(Samples(0, chosen)):
        data, _ = space.augment(pictures.read_batch(chosen)["images"])
    drawn = space.render(space.decode(space.encode(data)))
    path = write_picture(prepare_folder("output_dir", output_dir) / SHEET_FILE, to_grid(drawn))
    tqdm.write(line("sheet", f"{path}: {len(chosen)} pictures as they are trained on"))


def spread(labels: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", count: int) -> list[int]:
    """Return at most ``count`` rows in order, evenly over the labels and over the rows of each."""
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    most = min(count, len(labels))
    shares = np.zeros(len(rows), dtype=int)
    while shares.sum() < most:
        left = np.flatnonzero(shares < [len(each) for each in rows])
        shares[left[_evenly(len(left), min(len(left), most - shares.sum()))]] += 1
    chosen = [each[_evenly(len(each), share)] for each, share in zip(rows, shares, strict=True) if share]
    return sorted(np.concatenate(chosen).tolist())


def _evenly(total: int, count: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Return ``count`` numbers below ``total`` at equal distances."""
    return np.arange(count) * total // count


LARGEST_SIDE_MEASURED = 64
"""Sides of the largest images whose memory and time is measured [px]; beyond it both grow with the pixels."""

SECONDS_MEASURED, MOST_MEASURED = 1.0, 64
"""Time that the measured images take at best [s], and their largest number."""


def print_plan(config: TrainConfig, flow: Flow) -> None:
    """Print every flag with its resolved value, and the size, memory and time of the run."""
    run = config.run
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
        flops = forward_flops(flow, _blank(config, flow, _sides_of(flow), accelerator.device))
    accelerator.print()
    data = f"{config.data.dataset_path or config.data.dataset} at {config.data.framing.size_text} px, not opened yet"
    accelerator.print(summarize(run, accelerator, flow, flops, data, None))
    taught = config.teacher_data
    if may_choose(config):
        chosen = "--augment, --holdout and a shorter run may be chosen when the folder is opened (docs/small_data.md)"
        teachers = "as many images as the teacher's run, where no flag gives the length (docs/mean_flow.md)"
        accelerator.print(line("recipe", chosen if taught is None else teachers))
    if taught is not None:
        accelerator.print(_describe_drawing(taught, flow.space))
    if isinstance(flow.space, Latents):
        accelerator.print(_describe_latents(config, flow.space))
    accelerator.print(_describe_memory(config, accelerator, flow))
    accelerator.print(_describe_time(config, accelerator, flow, flops))


def _describe_drawing(taught: TeacherData, space: Space) -> str:
    """Return a line on the data that a teacher generates before the training."""
    size = taught.count * sum(row_size(name, shape) for name, shape in files_of(taught, space).items())
    return line(
        taught.rows,
        f"{taught.count:,} in {taught.steps} steps each, drawn first with {calls_of(taught):,} calls of the teacher's "
        f"network: {size / 1e9:.2f} GB in {taught.folder}",
    )


def _describe_latents(config: TrainConfig, space: Latents) -> str:
    """Return lines on the cost of the autoencoder."""
    moments, *shape = space.autoencoder.shape_of(space.image_size)
    variants = 1 + config.data.horizontal_flip
    size = variants * row_size(LATENTS_FILE, (moments, *shape))
    pictures = torch.zeros(1, 3, space.image_size, space.image_size, device="meta")
    encoding = cost_of(lambda: space.autoencoder.encode(pictures))
    decoding = cost_of(lambda: space.autoencoder.decode(torch.zeros(1, *shape, device="meta")))
    mirrored = ", with its mirror image" * config.data.horizontal_flip
    return "\n".join(
        [
            line("latents", f"{' x '.join(map(str, shape))}, {size / 1e3:,.1f} kB of disk for each picture{mirrored}"),
            line("encoding", f"{variants * encoding.flops / 1e9:.3g} GFLOP for each picture, once"),
            line(
                "decoding",
                f"{decoding.flops / 1e9:.3g} GFLOP and {decoding.memory / 1e6:,.0f} MB for each picture that is drawn",
            ),
        ]
    )


def _describe_memory(config: TrainConfig, accelerator: Accelerator, flow: Flow) -> str:
    """Return a line on the memory of a step."""
    count, sides = config.run.split_batch(accelerator.num_processes).per_process, _sides_measured(config, flow)
    item = _blank(config, flow, sides, accelerator.device)
    averages = config.run.use_ema + 2 * config.run.power_ema
    memory = training_memory(flow, item, averages, accelerator.autocast)
    per_image = memory.per_image * prod(_sides_of(flow)) / prod(sides)
    return line(
        "memory",
        f"about {memory.fixed / 1e9:.2f} GB + {count} images x {per_image / 1e6:,.1f} MB = "
        f"{(memory.fixed + count * per_image) / 1e9:.2f} GB per process, without the libraries' own",
    )


def _describe_time(config: TrainConfig, accelerator: Accelerator, flow: Flow, flops: int) -> str:
    """Return lines on the time of a step, and its lower bound."""
    batch, sides = config.run.split_batch(accelerator.num_processes), _sides_measured(config, flow)
    item = _blank(config, flow, sides, accelerator.device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    rate = multiplication_rate(accelerator.device, dtype)
    flops_measured = forward_flops(flow, item)
    # Even, as a mean flow takes the derivative of half of the rows.
    count = 2 * max(1, min(MOST_MEASURED, round(SECONDS_MEASURED * rate / (3 * flops_measured))) // 2)
    try:
        per_image = gradient_time(flow, item, count, accelerator.autocast) / count * flops / flops_measured
    except torch.OutOfMemoryError:
        return line("time", f"unknown: {count} images do not fit into the memory of the {accelerator.device.type}")
    images = batch.per_process * batch.accumulation
    steps = 0 if config.run.num_epochs else config.run.total_steps(batch, 0)
    whole = f", {_duration(per_image * images * steps)} in all" if steps else ""
    how = f"measured just now on {count} images of side {size_text(sides[1], sides[0])}"
    how += ", not compiled" * config.run.compile
    least = 3 * flops * images / rate
    taken = line("time", f"about {_duration(per_image * images)} a step{whole}: {how}")
    bound = line(
        "at best",
        f"{_duration(least)} a step ({least / (per_image * images):.0%} of that): {3 * flops * images / 1e12:.3g} "
        f"TFLOP per process at the measured matmul rate of {rate / 1e12:.3g} TFLOP/s",
    )
    return f"{taken}\n{bound}"


def _sides_of(flow: Flow) -> Sequence[int]:
    """Return height and width of the flow's ``x``: pixels, or latents."""
    return (flow.space.shape or (0, 0, 0))[1:]


def _sides_measured(config: TrainConfig, flow: Flow) -> Sequence[int]:
    largest = max(LARGEST_SIDE_MEASURED, 2 ** (len(config.network.dim_mults) - 1))
    return [min(side, largest) for side in _sides_of(flow)]


def _duration(seconds: float) -> str:
    """Return seconds in a fitting unit."""
    units = {"days": 2 * 86400, "hours": 2 * 3600, "minutes": 120, "s": 1, "ms": 0}
    unit = next(unit for unit, least in units.items() if seconds >= least)
    size = {"days": 86400, "hours": 3600, "minutes": 60, "s": 1, "ms": 1e-3}[unit]
    return f"{seconds / size:.{0 if seconds / size >= 10 else 1}f} {unit}"


def _blank(config: TrainConfig, flow: Flow, sides: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return a batch of one item of zeros, with a path where paths are learned."""
    zeros = torch.zeros(1, (flow.space.shape or (0,))[0], *sides, device=device)
    batch = {flow.space.key: flow.space.to_stored(zeros)}
    taught = config.teacher_data
    if taught is not None and taught.rows == "paths":
        batch["path"] = zeros[:, None].expand(-1, taught.points, -1, -1, -1).half()
    return batch
