"""The facts and speeds that a plan depends on: pictures are counted, steps are timed, memory is read."""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from rectified_flow.cli import plan
from rectified_flow.cli.budget import seconds_of, time_text
from rectified_flow.cli.data import build_space, can_augment
from rectified_flow.cli.distill import DistillationData, Recipe, recipe_of
from rectified_flow.cli.record import recorded_flags
from rectified_flow.cli.settings import command_line
from rectified_flow.cli.training_flags import (
    STARTER,
    DataConfig,
    InitConfig,
    Method,
    NetworkConfig,
    TrainProgramConfig,
)
from rectified_flow.data.framing import Crop
from rectified_flow.data.sources import ImageSource, Row
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource
from rectified_flow.data.sources.synthetic_flowers import SYNTHETIC_FLOWERS
from rectified_flow.data.store_writer import is_stored
from rectified_flow.data.survey import survey
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import values_of
from rectified_flow.flows.flow import Flow
from rectified_flow.load import autocast
from rectified_flow.networks.network import Network, to_device
from rectified_flow.networks.unet import Unet
from rectified_flow.parts import Choice, name_of
from rectified_flow.registry import names
from rectified_flow.runs import checkpoint
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.space import Space
from rectified_flow.system.machine import free_memory, memory, processors
from rectified_flow.system.terminal import duration, line, lines
from rectified_flow.training.clock import Clock
from rectified_flow.training.optimizers import find_optimizer
from rectified_flow.training.speed import Speed, measure_speed
from rectified_flow.training.trainer import choose_precision

TRIED = 16  # number of pictures that an autoencoder is tried on, and that are decoded to measure the time
READING_SHARE = 1 / 3  # of the time: if reading all pictures takes longer, some are left out
SHORTEST_WARM_UPS = 4  # least length of a run by default, as a multiple of its warm-up; a guess
DEFAULT_BUDGET = "1h"
"""Budget of runs on a folder of pictures and of runs with a teacher, unless a flag gives the length."""


def budget_of(program: TrainProgramConfig, *, is_own: bool, has_length: bool) -> str | None:
    """Return the time that a run is to take, half of it with ``--one_step``.

    Args:
        program: the flags of the program.
        is_own: whether the data are a folder of the user's, or those of a teacher.
        has_length: whether a flag gives the length of the run.

    Returns:
        The time in words; None if nothing is planned.
    """
    if has_length or not may_choose(program, is_own=is_own):
        return None
    budget = program.budget or DEFAULT_BUDGET
    return time_text(seconds_of(budget) / 2) if program.one_step else budget


def seconds_since(began: float) -> float:
    """Return the seconds since a time of the monotonic clock of the main process. Collective."""
    return on_main(PartialState(), lambda: time.monotonic() - began)


def resumed_clock(folder: Path, budget: str | None, given: Collection[str], began: float) -> Clock | None:
    """Return the clock of a run that resumes; None if its length is a number of steps. Collective.

    The run has the rest of its time, or a new time if the user gives another budget.

    Args:
        folder: the folder of the run.
        budget: the budget that the user gives, if there is one.
        given: names of the flags that the user gave.
        began: when the program began, by :func:`time.monotonic`.
    """
    if not {"train_num_steps", "num_epochs"}.isdisjoint(given):
        return None
    seconds = None if budget is None else seconds_of(budget)
    return on_main(PartialState(), lambda: Clock.resumed(folder, seconds=seconds, began=began))


def may_choose(program: TrainProgramConfig, *, is_own: bool) -> bool:
    """Return whether flags may be chosen: for data of the user's or with ``--budget``, and not with ``--config``."""
    return (is_own or program.budget is not None or program.one_step) and program.config is None


def recipe(
    data: DataConfig, source: ImageSource, divisor: int, fixed: frozenset[str], size: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the flags that suit the pictures of a source, and print them. Collective.

    Args:
        data: the flags of the pictures.
        source: the pictures.
        divisor: number that must divide the sides, for the network.
        fixed: names of flags that are not to be chosen.
        size: the flags of the size that a plan chose, which will also choose the augmentation; None without a plan.
    """
    count = len(source.numbers_without(data.exclude, data.max_train_samples))
    flags = plan.for_pictures(count, augmentable=can_augment(build_space(data, source))) | (size or {})
    if size is not None:
        flags.pop("augment", None)  # the plan decides it, when it knows the number of passes
    if not data.autoencoder and data.aspect_ratio == "1:1" and "image_size" not in flags:
        largest = max(sides_of(source, data.crop), default=0)
        multiple = max(plan.MIN_SIDE, divisor)
        side = ceil(largest / multiple) * multiple
        flags |= {"image_size": side} if 0 < side < data.image_size else {}
    flags = {name: value for name, value in flags.items() if name not in fixed}
    if flags:
        text = f"{' '.join(command_line(flags))}, for {count:,} pictures; flags override them (docs/budget.md)"
        PartialState().print(line("recipe", text))
    return flags


def sides_of(source: ImageSource, crop: Crop) -> list[int]:
    """Return the shorter sides of some pictures of a source [px], or the longer sides if crop is none. Collective."""

    def read() -> list[int]:
        sides = list[int]()
        for number in range(0, len(source), len(source) // 200 + 1):  # of at most 200 pictures
            with suppress(Exception):  # a broken picture is reported when it is decoded
                sides.append((max if crop == "none" else min)(source.size_of(number)))
        return sides

    return on_main(PartialState(), read)


def chosen_size(
    source: ImageSource,
    data: DataConfig,
    seconds: float,
    precisions: Sequence[str | None],
    speed_of: Callable[[Mapping[str, Any]], Speed],
) -> dict[str, Any]:
    """Return the flags of the largest size for which there is enough time, and print them. Collective.

    Args:
        source: the pictures.
        data: the flags of the pictures.
        seconds: the time that is left [s].
        precisions: the precisions to choose from.
        speed_of: measures the speed of a training by flags.
    """
    state, sides = PartialState(), sides_of(source, data.crop)
    if not isinstance(source, FileFolder | HuggingFaceSource) or not sides:
        return {}

    def measure(side: int, autoencoder: tuple[str, ...]) -> Speed:
        batch = state.num_processes * (plan.MIN_BATCH_OF_LATENTS if autoencoder else plan.MIN_BATCH)
        # Neither the batch nor the conditions are known before the data are open.
        flags: dict[str, Any] = {"batch_size": None, "gradient_accumulation_steps": None, "use_cfg": False}
        flags |= {"guidance_scale": 1.0, "image_size": side, "autoencoder": autoencoder, "global_batch_size": batch}
        space = build_space(replace(data, image_size=side, autoencoder=autoencoder))
        flags |= plan.network_flags(Unet, plan.STARTER_DIMS[bool(autoencoder)], (space.shape or ())[1:])
        speeds = [speed_of({**flags, "mixed_precision": precision}) for precision in precisions]
        return max(speeds, key=lambda speed: speed.rate)

    count = len(source.numbers_without(data.exclude, data.max_train_samples))

    def error(side: int, autoencoder: tuple[str, ...]) -> float:
        return round_trip_error(source, replace(data, image_size=side, autoencoder=autoencoder))

    made = plan.choose_size(count, int(median(sides)), seconds, measure, error)
    if made.reasons:
        state.print(lines(made.reasons))
    return made.settings


def round_trip_error(source: ImageSource, data: DataConfig) -> float:
    """Return how much the autoencoder of the flags changes some of the pictures of a source. Collective.

    Returns:
        The median of the root mean square errors of the pictures [levels of 256]; 0 if none can be read.
    """
    # Pictures for random crops have a margin, which is no part of what is encoded.
    data = replace(data, crop="center") if data.crop == "random" else data

    def measure() -> float:
        numbers = source.numbers_without(data.exclude, data.max_train_samples)
        some, rows = numbers[:: 1 + (len(numbers) - 1) // TRIED], list[Row]()
        how = source.rows(replace(data.framing, resize=data.resize or survey(source, data.framing, some).resize))
        for number in some:
            with suppress(Exception):  # a broken picture is reported when it is decoded
                rows.append(how.fit(source.load(number)[0]).row)
        if not rows:
            return 0.0
        space, pictures = build_space(data), torch.from_numpy(np.stack(rows))
        space.medium.prepare(torch.device("cpu"))
        errors = space.decode(space.encode(space.medium.stored(pictures))) - pictures / 255
        return 255 * float(errors.square().flatten(1).mean(dim=1).sqrt().median())

    return on_main(PartialState(), measure)


def encoding_time(data: DataConfig) -> float:
    """Return the time in which this process makes what a store keeps of a picture, and of its mirror image [s]."""
    medium = build_space(data).medium
    medium.prepare(torch.device("cpu"))
    pictures = torch.zeros(TRIED // 2, *data.framing.shape, dtype=torch.uint8)
    began = time.monotonic()
    medium.stored(pictures)
    return (time.monotonic() - began) / len(pictures) * (1 + data.horizontal_flip)


def readable(source: ImageSource, data: DataConfig, seconds: float) -> dict[str, int]:
    """Return the number of pictures to read, as a flag, if all would take too much of the time. Collective.

    Args:
        source: the pictures.
        data: the flags of the pictures.
        seconds: the time of the run [s].
    """
    framing, numbers = data.framing, source.numbers_without(data.exclude, data.max_train_samples)

    def picture_time() -> float:
        if is_stored(source, framing, data.cache_dir, exclude=data.exclude):
            return 0.0
        rows, some = source.rows(framing), numbers[:: 1 + (len(numbers) - 1) // TRIED]

        def decode(number: int) -> None:
            with suppress(Exception):  # a broken picture is reported when all are decoded
                rows.fit(source.load(number)[0])

        began = time.monotonic()
        with ThreadPoolExecutor(processors()) as pool:
            [*pool.map(decode, some)]
        return (time.monotonic() - began) / len(some) + encoding_time(data)

    each, room = on_main(PartialState(), picture_time), READING_SHARE * seconds
    if not numbers or each * len(numbers) <= room:
        return {}
    count = max(1, int(room / each))
    whole = duration(each * len(numbers))
    text = f"{count:,} of {len(numbers):,}, as reading all takes {whole}; --max_train_samples overrides the choice"
    PartialState().print(line("pictures", text))
    return {"max_train_samples": count}


def facts_of(
    method: Method,
    data: DataConfig,
    run: TrainingConfig,
    distilled: DistillationData | None,
    fixed: frozenset[str],
    *,
    augmentable: bool,
    **known: Any,
) -> plan.Facts:
    """Return the facts that the plan of a run depends on. Collective.

    Args:
        method: the training method.
        data: the flags of the pictures.
        run: the flags of the training.
        distilled: the data of a teacher, if there is one.
        fixed: names of the flags that are not to be chosen.
        augmentable: whether the space of the pictures augments them.
        known: further facts.
    """
    state = PartialState()
    stored = None if distilled is None else on_main(state, lambda: recipe_of(distilled))
    augment = plan.for_pictures(known["pictures"], augmentable=augmentable).get("augment", 0.0)
    return plan.Facts(
        method,
        fixed=fixed,
        memory=min(gather_object([free_memory()])) if state.device.type == "cpu" else inf,  # a GPU reports it itself
        processes=state.num_processes,
        device=state.device.type,
        batch=run.split_batch(state.num_processes).total if "batch_size" in fixed else None,
        augment=data.augment if "augment" in fixed else augment,
        latents=bool(data.autoencoder),
        precisions=precisions(run, method, fixed, stored),
        samples=distilled.recipe.pairs if distilled else 0,
        drawn=stored.pairs if stored else None,
        calls=distilled.calls if distilled else 0,
        **known,
    )


def precisions(
    run: TrainingConfig, method: Method, fixed: Collection[str], stored: Recipe | None = None
) -> tuple[str | None, ...]:
    """Return the precisions that a plan may choose from, the safest one first; None is the default of the device."""
    is_fixed = "mixed_precision" in fixed or "ACCELERATE_MIXED_PRECISION" in os.environ
    if is_fixed or PartialState().device.type != "cpu" or method == "mean_flow":
        return (run.mixed_precision,)
    return ("no", "bf16") if stored is None else ("bf16" if stored.precision == "bf16" else "no",)


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
    memory = max(each.memory for each in speeds)
    return Speed(processes * slowest.rate, memory, processes * slowest.slowest, processes * slowest.fastest)


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
    if speed.rate == 0 or (state.device.type == "cpu" and speed.memory > memory()):
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
    init: InitConfig, data: DataConfig, distilled: DistillationData | None, fixed: frozenset[str]
) -> tuple[dict[str, Any], str]:
    """Return the network of the run of ``--init_from``, and the origin of the network if it is known. Collective."""
    origin = init.origin(data.starter)
    if distilled is not None:
        return {}, "the network of the teacher"
    if "network" in fixed:
        return {}, "set by flags"
    if origin is None or init.init_from == STARTER:
        return {}, ""
    source = on_main(PartialState(), lambda: checkpoint.resolve(origin, [checkpoint.CONFIG_FILE]))
    known, ours = recorded_flags(source), values_of(NetworkConfig())
    return {name: value for name, value in known.items() if name in ours}, f"the network of {init.init_from}"


def starter_of(
    init: InitConfig, data: DataConfig, space: Space, given: Collection[str], *, is_plain: bool
) -> plan.Starter:
    """Return whether a run can start from a starter, a rectified flow of RGB pictures that predicts velocities.

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
