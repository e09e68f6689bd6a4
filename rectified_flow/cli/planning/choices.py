"""The settings that a run chooses by itself, from its pictures and from its budget."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import median
from typing import Any

import torch
from accelerate import PartialState

from rectified_flow.cli import timing
from rectified_flow.cli.build import build_flow, choose_network, divisor_of, takes_conditions
from rectified_flow.cli.data import build_space, can_augment, is_augmentable
from rectified_flow.cli.distill import recipe_of
from rectified_flow.cli.planning import facts, limits, plan, reading
from rectified_flow.cli.planning.framing import FramedFlags, framing_of
from rectified_flow.cli.planning.sizes import MIN_SIDE, choose_size, sizes_for
from rectified_flow.cli.record import distillation_of
from rectified_flow.cli.settings import Settings, command_line
from rectified_flow.cli.training_flags import NO_WEIGHTS, STARTER, UNET, DataConfig, TrainConfig
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.description import PictureData
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.sources.folder import FileFolder
from rectified_flow.data.sources.huggingface import HuggingFaceSource
from rectified_flow.distributed import on_main
from rectified_flow.flags import rules_of
from rectified_flow.networks.unet import Unet
from rectified_flow.parts import Choice, name_of
from rectified_flow.spaces.space import Space, with_augmentation
from rectified_flow.system.terminal import line, lines
from rectified_flow.training.clock import Clock
from rectified_flow.training.speed import Speed

USUAL_SIDES = 0.9  # quantile of the sides that limits the size, so that few larger pictures do not


def with_pictures(
    settings: Settings[TrainConfig], data: PictureData, source: ImageSource, budget: float | None
) -> tuple[Settings[TrainConfig], list[str]]:
    """Add the flags that suit the pictures of a new run, and return sentences about them, too. Collective.

    Args:
        settings: the settings of the run.
        data: the description of the pictures.
        source: the pictures.
        budget: the time of the run [s], or None.
    """
    if settings.values.is_planned:
        settings = with_recipe(settings, source, budget)
    values, columns = settings.values, settings.values.columns.condition_on
    chosen, notes = framing_of(
        FramedFlags(values.data, values.source, values.init, columns, settings.given), data, source
    )
    settings = settings.resolving(chosen)
    if budget is not None and {"max_train_samples", "paired"}.isdisjoint(settings.given):
        whole = budget * (2 if values.program.one_step else 1)  # both runs need the pictures
        limited = reading.readable(source, settings.values.data, whole)
        if limited and "holdout" not in settings.fixed:
            limited |= {"holdout": limits.for_pictures(limited["max_train_samples"]).get("holdout", 0.0)}
        settings = settings.with_layer("chosen", limited)
        notes += ["the plan chose `limit`, as reading all pictures takes too much of the time"] if limited else []
    return settings, notes


def with_recipe(settings: Settings[TrainConfig], source: ImageSource, budget: float | None) -> Settings[TrainConfig]:
    """Add the flags that suit the pictures of a source, and print them. Collective."""
    values, size = settings.values, None
    network = choose_network(values.network)
    fixed = fixed_flags(settings.fixed, network)
    if settings.origin("image_size") == "chosen":  # that of the run of --init_from
        fixed = fixed | {"image_size"}
    if budget is not None:
        rules = rules_of(TrainConfig)
        given = {name for name in settings.given if rules[name].fixes_size}
        given |= set() if values.init.init_from in (None, STARTER, NO_WEIGHTS) else {"init_from"}
        # Another network, or arguments such as attention_sides, may suit one size only.
        given |= set() if values.network.network == (UNET,) else {"network"}
        size = chosen_size(
            source,
            values.data,
            given,
            fixed,
            None if facts.is_free(network, values.network, settings.given) else divisor_of(network),
            plan.seconds_left(budget, timing.seconds_since(settings.began)),
            facts.precisions(values.run, values.method, settings.fixed),
            lambda flags: speed_of(settings.with_layer("given", flags)),  # flags of a trial override all others
        )
    divisor = divisor_of(network)
    return settings.with_layer("chosen", recipe(values.data, source, divisor, fixed, size))


def fixed_flags(fixed: frozenset[str], network: Choice) -> frozenset[str]:
    """Return the names of the flags that are not to be chosen.

    These are the flags that the user set, and ``augment`` if the network cannot be conditioned on it.
    """
    return fixed if takes_conditions(network) else fixed | {"augment"}


def recipe(
    data: DataConfig, source: ImageSource, divisor: int, fixed: frozenset[str], size: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the flags that suit the pictures of a source, and print them. Collective.

    Args:
        data: the flags of the pictures.
        source: the pictures.
        divisor: number that must divide the sides, for the network.
        fixed: names of flags that are not to be chosen.
        size: the flags of the size that a plan chose, which will also choose the augmentation of pixels; None without
            a plan.
    """
    count = len(source.numbers(data.max_train_samples))
    flags = limits.for_pictures(count, augmentable=can_augment(build_space(data, source)))
    if size is not None:
        flags.pop("augment", None)  # the plan decides it, when it knows the number of passes
        flags |= size
    if not data.autoencoder and data.aspect_ratio == "1:1" and "image_size" not in flags:
        sides = sorted(reading.sides_of(source, data.crop))
        largest = sides[ceil(USUAL_SIDES * len(sides)) - 1] if sides else 0
        multiple = max(MIN_SIDE, divisor)
        side = ceil(largest / multiple) * multiple
        flags |= {"image_size": side} if 0 < side < data.image_size else {}
    flags = {name: value for name, value in flags.items() if name not in fixed}
    if flags:
        text = f"{' '.join(command_line(flags))}, for {count:,} pictures; flags override them (docs/budget.md)"
        PartialState().print(line("recipe", text))
    return flags


def chosen_size(
    source: ImageSource,
    data: DataConfig,
    given: Collection[str],
    fixed: Collection[str],
    divisor: int | None,
    seconds: float,
    precisions: Sequence[str | None],
    speed_of: Callable[[Mapping[str, Any]], Speed],
) -> dict[str, Any]:
    """Return the flags of the largest size for which there is enough time, and print them. Collective.

    Args:
        source: the pictures.
        data: the flags of the pictures.
        given: names of the flags that the user gave and that fix the size.
        fixed: names of all flags that are not to be chosen.
        divisor: the network that the flags set needs sides of the data that are divisible by this number; None if a
            plan will choose the network.
        seconds: the time that is left [s].
        precisions: the precisions to choose from.
        speed_of: measures the speed of a run with other flags.
    """
    state, is_free = PartialState(), not given
    sizes = {} if data.space else sizes_for(given, data.framing.shape[1:], data.autoencoder, divisor or 2)
    sides = reading.sides_of(source, data.crop) if is_free else [data.image_size]
    is_registered = not isinstance(source, FileFolder | HuggingFaceSource)  # such a dataset has the size of its flags
    is_stored = bool(data.autoencoder) and not is_augmentable(data, source)  # the latents are stored: nothing to choose
    if not sizes or not sides or (is_free and is_registered) or is_stored:
        return {}

    def measure(side: int, autoencoder: tuple[str, ...], augment: float) -> Speed:
        batch = state.num_processes * (plan.MIN_BATCH_OF_LATENTS if autoencoder else plan.MIN_BATCH)
        # Neither the batch nor the conditions are known before the data are open.
        flags: dict[str, Any] = {"batch_size": None, "gradient_accumulation_steps": None, "use_cfg": False}
        flags |= {"guidance_scale": 1.0, "image_size": side, "autoencoder": autoencoder, "global_batch_size": batch}
        flags |= {"augment": augment} if augment and autoencoder else {}
        if divisor is None:
            space = build_space(replace(data, image_size=side, autoencoder=autoencoder))
            flags |= plan.network_flags(Unet, plan.STARTER_DIMS[bool(autoencoder)], (space.shape or ())[1:])
        speeds = [speed_of({**flags, "mixed_precision": precision}) for precision in precisions]
        return max(speeds, key=lambda speed: speed.rate)

    count = len(source.numbers(data.max_train_samples))

    def error(side: int, autoencoder: tuple[str, ...]) -> float:
        if autoencoder == data.autoencoder:
            return 0.0  # the run warns if it is large
        return reading.round_trip_error(source, replace(data, image_size=side, autoencoder=autoencoder))

    def augmentable(side: int, autoencoder: tuple[str, ...]) -> bool:
        may_augment = "augment" not in fixed or data.augment > 0
        return may_augment and is_augmentable(replace(data, image_size=side, autoencoder=autoencoder), source)

    override = "--image_size overrides the choice" if is_free else "--autoencoder without a name trains on pixels"
    made = choose_size(
        count, int(median(sides)), seconds, measure, error, sizes=sizes, augmentable=augmentable, override=override
    )
    if made.reasons and not data.autoencoder:
        state.print(lines(made.reasons))
    return made.settings


def with_plan(
    settings: Settings[TrainConfig], budget: float, count: int, conditions: ConditionSpecs, space: Space
) -> tuple[Settings[TrainConfig], Clock]:
    """Return the settings of a run with a budget, and its clock, and print the plan. Collective.

    Args:
        settings: the settings of the run.
        budget: the time of the run [s].
        count: number of items to train on.
        conditions: the conditions of the items.
        space: the space of the data.
    """
    values, distilled, elapsed = settings.values, distillation_of(settings.values), timing.seconds_since(settings.began)
    network = choose_network(values.network)
    fixed = fixed_flags(settings.fixed, network)
    if facts.is_free(network, values.network, settings.given):
        fixed = fixed - {"network", "dim", "dim_mults"}  # a name without arguments fixes no size
    of_origin, why_network = facts.network_of_origin(values.network, values.init, values.data, distilled, fixed)
    settings = settings.with_layer("chosen", of_origin)
    is_default = not name_of(values.flow.flow) and name_of(values.network.network) == UNET
    is_plain = values.method == "rectified" and is_default and distilled is None
    # Another flow may draw no times.
    fixed = fixed | ({"time_distribution"} if name_of(values.flow.flow) else set())
    state = PartialState()
    stored = None if distilled is None else on_main(state, lambda: recipe_of(distilled))
    suited = limits.for_pictures(count, augmentable=can_augment(space))
    latents = bool(values.data.autoencoder)
    known = plan.Facts(
        values.method,
        pictures=count,
        budget=budget,
        sides=(space.shape or values.data.framing.shape)[1:],
        fixed=fixed,
        spent=elapsed,
        runs=2 if values.program.one_step else 1,
        memory=facts.least_memory(),
        processes=state.num_processes,
        device=state.device.type,
        batch=values.run.split_batch(state.num_processes).total if "batch_size" in fixed else None,
        # On latents, the augmentation was chosen together with the size, before the pictures were read.
        augment=values.data.augment if "augment" in fixed or latents else suited.get("augment", 0.0),
        network=network.target,
        why_network=why_network,
        starter=facts.starter_of(values.init, values.data, space, settings.given, is_plain=is_plain),
        latents=latents,
        precisions=facts.precisions(values.run, values.method, fixed, stored),
        samples=distilled.recipe.pairs if distilled else 0,
        drawn=stored.pairs if stored else None,
        calls=distilled.calls if distilled else 0,
        num_samples=values.run.num_samples if "num_samples" in fixed else None,
        sample_steps=values.run.sample_steps if "sample_steps" in fixed else None,
    )
    made = plan.plan(
        known, lambda trial: speed_of(settings.resolving(plan.settings_of(known, trial)), conditions, space)
    )
    state.print(lines(made.reasons))
    clock = Clock(elapsed + known.seconds, made.most_steps, asked=budget, began=settings.began)
    return settings.resolving(made.settings), clock


def speed_of(
    settings: Settings[TrainConfig], conditions: ConditionSpecs | None = None, space: Space | None = None
) -> Speed:
    """Measure the images per second of all processes in a run with these settings, and its memory. Collective."""
    values, distilled = settings.values, distillation_of(settings.values)
    with torch.random.fork_rng():  # the initial weights of the run do not depend on how many networks are measured
        flow = build_flow(
            values, conditions or {}, with_augmentation(space or build_space(values.data), values.data.augment)
        )
    return facts.training_speed(flow, values.run, distilled.path_points if distilled else 0)
