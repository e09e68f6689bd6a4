"""From the flags and the data of a run to its settings: facts are counted, speeds are measured, the plan is printed.

Flags that the user sets are never changed. The chosen flags are recorded, so a resumed run has the same ones.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from math import ceil, inf
from statistics import median
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from rectified_flow.cli import plan
from rectified_flow.cli.build import build_flow
from rectified_flow.cli.config import STARTER, TrainConfig, seconds_of
from rectified_flow.cli.data import build_space, can_augment
from rectified_flow.cli.distill import DistillationData, Recipe, recipe_of
from rectified_flow.cli.record import config_of
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.config import Crop
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource
from rectified_flow.data.sources.synthetic_flowers import SYNTHETIC_FLOWERS
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import command_line, name_of, plain, replaced
from rectified_flow.flows.flow import Flow
from rectified_flow.load import autocast
from rectified_flow.networks.unet import to_device
from rectified_flow.registry import names
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.space import Space, with_augmentation
from rectified_flow.system.machine import free_memory, memory
from rectified_flow.system.terminal import duration, line, lines
from rectified_flow.training.optimizers import find_optimizer
from rectified_flow.training.speed import Speed, measure_speed, summarize
from rectified_flow.training.trainer import build_accelerator, choose_precision

DEFAULT_BUDGET = "1h"
"""Budget of runs on a folder of pictures and of runs with a teacher, unless a flag gives the length."""
LENGTH_FLAGS = {"num_epochs", "train_num_steps"}
BATCH_FLAGS = {"global_batch_size", "batch_size", "gradient_accumulation_steps"}
NETWORK_FLAGS = ("network", "dim", "dim_mults")
SIZE_FLAGS = {
    *("image_size", "aspect_ratio", "crop", "alpha", "space", "autoencoder", "augment"),
    *("source_path", "degrade", *NETWORK_FLAGS),
}
"""Flags that disable the choice of the size of the pictures."""
ALTERNATIVES = (LENGTH_FLAGS, BATCH_FLAGS, {*NETWORK_FLAGS}, {"optimizer", "learning_rate"})
"""Groups of alternative flags. If the user sets one flag of a group, the recipe sets none of that group."""


def with_recipe(config: TrainConfig, source: ImageSource) -> TrainConfig:
    """Return the flags of a new run on the pictures of a source, and print the chosen ones. Collective."""
    if not may_choose(config) or config.teacher.teacher is not None:
        return config
    count, fixed = len(source.numbers_without(config.data.exclude)), fixed_flags(config)
    flags = plan.for_pictures(count, augmentable=can_augment(config.data))
    if budget_of(config) is not None:
        flags.pop("augment", None)  # the plan decides it, when it knows the number of passes
    sides = sides_of(source, config.data.crop)
    flags |= _choose_size(config, source, sides, count)
    if not config.data.autoencoder and config.data.aspect_ratio == "1:1" and "image_size" not in flags:
        multiple = max(plan.MIN_SIDE, 2 ** (len(config.network.dim_mults) - 1))
        side = ceil(max(sides, default=0) / multiple) * multiple
        flags |= {"image_size": side} if 0 < side < config.data.image_size else {}
    if flags := {name: value for name, value in flags.items() if name not in fixed}:
        words = " ".join(command_line(flags))
        text = f"{words}, for {count:,} pictures; flags override them (docs/budget.md)"
        PartialState().print(line("recipe", text))
    return replaced(config, flags)


def sides_of(source: ImageSource, crop: Crop) -> list[int]:
    """Return the shorter sides of some pictures of a source [px], or the longer sides if crop is none. Collective."""

    def read() -> list[int]:
        sides = list[int]()
        for number in range(0, len(source), len(source) // 200 + 1):  # of at most 200 pictures
            with suppress(Exception):  # a broken picture is reported when it is decoded
                sides.append((max if crop == "none" else min)(source.size_of(number)))
        return sides

    return on_main(PartialState(), read)


def _choose_size(config: TrainConfig, source: ImageSource, sides: Sequence[int], pictures: int) -> dict[str, Any]:
    """Return the flags of the largest size for which there is enough time, and print them. Collective."""
    state, time = PartialState(), budget_of(config)
    is_own = isinstance(source, FileFolder | HuggingFaceSource) and not config.data.space and config.origin is None
    if time is None or not is_own or not SIZE_FLAGS.isdisjoint(config.given) or not sides:
        return {}
    for (side, autoencoder), min_images in plan.SIZES.items():
        if median(sides) < plan.MIN_SHARE_OF_SIDE * side:
            continue
        flags = {"image_size": side, "autoencoder": autoencoder}
        count = state.num_processes * (plan.MIN_BATCH_OF_LATENTS if autoencoder else plan.MIN_BATCH)
        # Neither the batch nor the conditions are known before the data are open.
        unknown = {"batch_size": None, "gradient_accumulation_steps": None, "use_cfg": False, "guidance_scale": 1.0}
        tried = replaced(config, {**flags, **unknown, "global_batch_size": count})
        space = build_space(tried.data)
        network = plan.network_of(plan.STARTER_DIMS[bool(autoencoder)], (space.shape or ())[1:])
        trials = [replaced(tried, {**network, "mixed_precision": each}) for each in _precisions_of(config)]
        rate = max(training_speed(each, {}, space).rate for each in trials)
        augment = plan.for_pictures(pictures, augmentable=can_augment(tried.data)).get("augment", 0.0)
        images = min(plan.TRAINED_SHARE * seconds_of(time) * rate, plan.limit_of(pictures, augment))
        if images >= min_images:
            text = f"about {images:,.0f} images in {time}; --image_size overrides the choice"
            state.print(line("size", f"{' '.join(command_line(flags))}: {text}"))
            return flags
    return {}


def fixed_flags(config: TrainConfig) -> set[str]:
    """Return the names of the flags that the user has set, and of the alternatives to them."""
    fixed = set(config.given)
    for group in ALTERNATIVES:
        fixed |= group if fixed & group else set()
    return fixed | ({"time_distribution"} if name_of(config.flow.flow) else set())  # other flows may have none


def budget_of(config: TrainConfig) -> str | None:
    """Return the time that the run is to take, half of it with ``--one_step``; None if a flag gives the length."""
    if not may_choose(config) or config.given & LENGTH_FLAGS:
        return None
    budget = config.program.budget or DEFAULT_BUDGET
    return f"{float(budget[:-1]) / 2:g}{budget[-1]}" if config.program.one_step else budget


def may_choose(config: TrainConfig) -> bool:
    """Return whether flags may be chosen: with a folder of pictures, a teacher, or ``--budget``.

    Without a time, nothing is chosen for other data, or for a config that was built in Python. With ``--config``,
    nothing is chosen.
    """
    own = config.data.dataset_path is not None or config.teacher.teacher is not None
    chooses = own and config.program.given is not None
    asked = config.program.budget is not None or config.program.one_step
    return (chooses or asked) and config.program.config is None


def with_plan(
    config: TrainConfig, has_begun: bool, pictures: int, conditions: ConditionSpecs, space: Space
) -> TrainConfig:
    """Return the flags of a run that takes the time of ``--budget``, and print its plan. Collective."""
    if has_begun:
        return config
    if (time := budget_of(config)) is None:
        print_speed(config, pictures, conditions, space)
        return config
    config, why_network = _with_network(config)
    facts = facts_of(config, pictures, time, space, why_network)
    made = plan.plan(
        facts, lambda trial: training_speed(replaced(config, plan.settings_of(facts, trial)), conditions, space)
    )
    PartialState().print(lines(made.reasons))
    return replaced(config, made.settings)


def facts_of(config: TrainConfig, pictures: int, time: str, space: Space, why_network: str) -> plan.Facts:
    """Return the facts that the plan of a run depends on. Collective."""
    state, fixed, distilled = PartialState(), fixed_flags(config), DistillationData.of(config)
    stored = None if distilled is None else on_main(state, lambda: recipe_of(distilled))
    augment = plan.for_pictures(pictures, augmentable=can_augment(config.data)).get("augment", 0.0)
    sides = (space.shape or config.data.framing.shape)[1:]
    return plan.Facts(
        config.method,
        pictures,
        time,
        seconds_of(time),
        sides,
        frozenset(fixed),
        memory=min(gather_object([free_memory()])) if state.device.type == "cpu" else inf,  # a GPU reports it itself
        processes=state.num_processes,
        device=state.device.type,
        batch=None if fixed.isdisjoint(BATCH_FLAGS) else config.run.split_batch(state.num_processes).total,
        augment=config.data.augment if "augment" in fixed else augment,
        network="the network of the teacher" if distilled else why_network,
        starter=_starter_of(config, sides),
        latents=bool(config.data.autoencoder),
        precisions=_precisions_of(config, stored),
        samples=distilled.recipe.pairs if distilled else 0,
        drawn=stored.pairs if stored else None,
        calls=distilled.calls if distilled else 0,
    )


def _precisions_of(config: TrainConfig, stored: Recipe | None = None) -> tuple[str | None, ...]:
    """Return the precisions that a plan may choose from, the safest one first; None is the default of the device."""
    fixed = "mixed_precision" in fixed_flags(config) or "ACCELERATE_MIXED_PRECISION" in os.environ
    if fixed or PartialState().device.type != "cpu" or config.method == "mean_flow":
        return (config.run.mixed_precision,)
    return ("no", "bf16") if stored is None else ("bf16" if stored.precision == "bf16" else "no",)


def training_speed(config: TrainConfig, conditions: ConditionSpecs, space: Space) -> Speed:
    """Measure the images per second of all processes, by the slowest of them, and the memory of each. Collective."""
    state, distilled = PartialState(), DistillationData.of(config)
    with torch.random.fork_rng():  # the initial weights of the run do not depend on how many networks are measured
        flow = build_flow(config, conditions, with_augmentation(space, config.data.augment))
    precision = choose_precision(config.run, state.device)
    to_device(flow, state.device, precision).train()
    count = config.run.split_batch(state.num_processes).per_process
    optimizer = find_optimizer(config.run, fused=state.device.type == "cuda")
    points = distilled.path_points if distilled else 0
    speed = measure_speed(flow, optimizer, count, points, lambda: autocast(precision, state.device))
    rates, memories = zip(*gather_object([speed]), strict=True)
    return Speed(state.num_processes * min(rates), max(memories))


def print_speed(config: TrainConfig, pictures: int, conditions: ConditionSpecs, space: Space) -> None:
    """Print the time and the memory of a run without a plan. Collective."""
    state, speed = PartialState(), training_speed(config, conditions, space)
    batch = config.run.split_batch(state.num_processes)
    if speed.rate == 0 or (state.device.type == "cpu" and speed.memory > memory()):
        needed = f"a step of {batch.per_process:,} images does not fit into the memory ({speed.memory / 1e9:,.1f} GB)"
        remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
        raise UsageError(f"{needed}: {remedy}")
    step, steps = batch.total / speed.rate, config.run.total_steps(batch, _count_items(config, pictures))
    state.print(lines({"speed": speed, "time": f"{duration(step)} a step, {duration(step * steps)} in all"}))


def print_dry_run(config: TrainConfig, flow: Flow, pictures: int) -> None:
    """Print the size of a run."""
    accelerator = build_accelerator(config.run)
    data = f"{config.data.dataset_path or name_of(config.data.dataset)} at {config.data.framing.size_text} px"
    accelerator.print(summarize(config.run, accelerator, flow, data, _count_items(config, pictures)))


def _count_items(config: TrainConfig, pictures: int) -> int:
    """Return the number of items of an epoch: pictures, or the samples of a teacher."""
    distilled = DistillationData.of(config)
    return pictures if distilled is None else distilled.recipe.pairs


def chooses_network(config: TrainConfig) -> bool:
    """Return whether the plan chooses the network, with levels that fit the sides of the data."""
    return bool(budget_of(config)) and not config.teacher.teacher and fixed_flags(config).isdisjoint(NETWORK_FLAGS)


def _with_network(config: TrainConfig) -> tuple[TrainConfig, str]:
    """Take the network of the run of ``--init_from``, and return the origin of the network if it is known."""
    origin = config.origin
    if not fixed_flags(config).isdisjoint(NETWORK_FLAGS):
        return config, "set by flags"
    if origin is None or config.init.init_from == STARTER or config.teacher.teacher is not None:
        return config, ""
    source = on_main(PartialState(), lambda: checkpoint.resolve(origin, [checkpoint.CONFIG_FILE]))
    known: TrainConfig = config_of(source)
    network = {name: value for name, value in plain(known.network).items() if name not in config.given}
    return replaced(config, network), f"the network of {config.init.init_from}"


def _starter_of(config: TrainConfig, sides: tuple[int, ...]) -> plan.Starter:
    """Return whether this run can start from a starter, a rectified flow of RGB pictures that predicts velocities."""
    if config.init.init_from == STARTER:
        return "requested"
    data, unlike = config.data, {"init_from", "prediction", "space", "alpha"} & config.given
    named = data.dataset_path is None and name_of(data.dataset) in (SYNTHETIC_FLOWERS, *names("dataset"))
    fits = min(sides) in plan.STARTER_SIDES.get(config.starter, ()) and not data.space and not named
    suits = config.method == "rectified" and not name_of(config.flow.flow) and not unlike and fits
    return "suited" if suits and config.teacher.teacher is None else "unsuited"
