"""The training program: open the data, plan the run, build the flow, train."""

from collections.abc import Collection, Mapping
from math import ceil, gcd
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from rectified_flow.cli import facts, plan
from rectified_flow.cli.build import build_flow, choose_flow, choose_network, divisor_of, join
from rectified_flow.cli.config import (
    UNET,
    DataConfig,
    EvaluationConfig,
    NetworkConfig,
    OneStepConfig,
    TrainConfig,
    check_outside,
)
from rectified_flow.cli.data import build_space, check_source, find_data, flags_of_files, summary_of
from rectified_flow.cli.distill import DistillationData, open_distilled
from rectified_flow.cli.framing import FramedFlags, framing_of
from rectified_flow.cli.record import DATA_FLAGS, check_one_step, distillation_of, with_record
from rectified_flow.cli.settings import Settings, check_rules
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.description import PictureData, RunData, with_sources
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import HeldOutPictures, Split, hold_out
from rectified_flow.flags import recorded, refuse, rules_of
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap, takes_interval
from rectified_flow.parts import name_of
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import check_start, describe_run, write_config
from rectified_flow.spaces.space import Space, with_augmentation
from rectified_flow.system.terminal import line, lines, size_text
from rectified_flow.training.evaluations import Callback, EvaluationHook, HeldOutHook
from rectified_flow.training.speed import Speed, summarize
from rectified_flow.training.trainer import Trainer, build_accelerator, choose_precision

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run by default, before the limit of MEASURED_SHARE."""
MEASURED_SHARE = 0.05
"""Largest share of a run's computations for the held-out loss, unless a flag asks for its measurement."""


def train(settings: Settings[TrainConfig]) -> bool:
    """Train by the flags; return whether the run finished.

    With ``--one_step``, a one-step generator then learns from the run, and this run has to finish, too.
    """
    program = settings.values.program
    if not program.one_step or program.dry_run:
        return train_run(settings)
    second = one_step_of(settings.values, settings.layers.get("given", {}))
    distilled, run = distillation_of(second.values), second.values.run
    on_main(join(settings.values), lambda: check_one_step(run, second.values.method, distilled))
    if not train_run(settings):
        return False
    AcceleratorState._reset_state()  # the run may have another precision
    return train_run(second)


def one_step_of(values: TrainConfig, given: Mapping[str, Any]) -> Settings[TrainConfig]:
    """Return the settings of the one-step generator of ``--one_step``: half of the budget, and this machine's flags."""
    rules, run = rules_of(TrainConfig), values.run
    flags = {name: value for name, value in given.items() if rules[name].local and name not in DATA_FLAGS}
    flags |= {"teacher": run.output_dir, "output_dir": run.output_dir / "one-step", "seed": run.seed}
    flags["budget"] = facts.budget_of(values.program, is_own=True, has_length=False)
    if run.checkpoint_dir is not None:
        flags["checkpoint_dir"] = run.checkpoint_dir / "one-step"
    return Settings(OneStepConfig, {"given": flags})


def train_run(settings: Settings[TrainConfig]) -> bool:
    """Train one run by the flags, or print its plan; return whether it finished."""
    check_flags(settings.values, settings.given)
    state, program = join(settings.values), settings.values.program
    set_seed(settings.values.run.seed)

    # Settings that the flags leave open are taken from the folders of the run, of its teacher and of the data.
    settings, has_begun = with_record(settings)
    values = settings.values
    distilled = distillation_of(values)
    has_length, is_own = "train_num_steps" in settings.fixed, values.has_own_data
    time = None if has_begun else facts.budget_of(program, is_own=is_own, has_length=has_length)
    settings = settings.resolving(flags_of_files(values.data, may_choose=not has_begun and distilled is None))
    values = settings.values
    data, found = find_data(values.data, values.source, values.columns)
    if not data.has_pictures:
        check_items(settings.given, data.name)
    elif not has_begun and distilled is None and facts.may_choose(program, is_own=is_own):
        settings = with_recipe(settings, found, time)
        values = settings.values
        data, found = find_data(values.data, values.source, values.columns)

    if isinstance(data, PictureData) and not has_begun and distilled is None:
        asked = FramedFlags(values.data, values.source, values.init, values.columns.condition_on, settings.given)
        chosen, notes = framing_of(asked, data, found)
        settings = settings.resolving(chosen)
        values = settings.values
        data, found = find_data(values.data, values.source, values.columns)
        found.notes = [*found.notes, *notes]

    # All checks that need no data precede the decoding of the pictures, which can take hours.
    space = build_space(values.data, found)
    _check_space(
        space,
        crops=values.data.crop == "random" and "crop" in settings.given and not has_begun,
        is_encoded=bool(values.data.autoencoder),
        evaluates=values.evaluation.evaluate_every > 0,
    )
    if (
        time is None
        or distilled is not None
        or not facts.is_free(choose_network(values.network), values.network, settings.given)
    ):
        check_sides(values.network, values.data, space)
    start = values.init.origin(values.data.starter) if distilled is None else distilled.teacher
    on_main(state, lambda: check_start(values.run, start, writes=not program.dry_run))
    if not program.dry_run:
        space.medium.prepare(state.device)
    opened = _opened(data, found)
    teacher = None if distilled is None else on_main(state, distilled.space_of_teacher)
    space = build_space(values.data, opened, teacher)
    split = None
    if data.has_pictures and distilled is None:
        stops, seed = values.evaluation.stop_when_memorising, values.data.data_seed or 0
        is_given = "holdout" in settings.given
        split = hold_out_pictures(opened, values.data.holdout, seed, is_given=is_given, stops=stops)
    count, conditions = len(opened) if split is None else len(split.training), getattr(opened, "conditions", {})
    if not has_begun and time is None:
        settings = settings.resolving(facts.short_warm_up(values.run, _items_of(distilled, count), settings.given))
    if not has_begun and (data.has_pictures or program.dry_run):
        settings = with_plan(settings, time, count, conditions, space)
        values = settings.values
    check_sides(values.network, values.data, space)
    return train_settled(values, data, opened, split, space, has_begun=has_begun)


def train_settled(
    values: TrainConfig, data: RunData, opened: Any, split: Split | None, space: Space, *, has_begun: bool
) -> bool:
    """Train by final flags on open data, or print the size of the run; return whether it finished.

    Args:
        values: the flags.
        data: the description of the data.
        opened: the data.
        split: the rows of the data on either side of the split, if some are held out.
        space: the space of the data.
        has_begun: whether the run resumes.
    """
    state, distilled = PartialState(), distillation_of(values)
    conditions, count = getattr(opened, "conditions", {}), len(opened) if split is None else len(split.training)
    start = values.init.origin(values.data.starter) if distilled is None else distilled.teacher
    flow = build_flow(values, conditions, with_augmentation(space, values.data.augment))
    opened = with_sources(opened, data, flow.space)
    start_from(start, values.run, flow)
    summary: dict[str, object] = {"pictures": summary_of(opened)} if data.has_pictures else {"items": len(opened)}
    scale = space.medium.summary
    state.print(lines(summary | ({"values": scale} if scale else {})))
    if values.program.dry_run:
        shown = f"{data.name} at {values.data.framing.size_text} px"
        print_dry_run(values.run, flow, shown, _items_of(distilled, count))
        return True
    records: dict[str, Any] = {"data": describe(data), "flags": recorded(values)}
    if distilled is not None and not has_begun:  # a run that is killed while it generates the data keeps its plan
        document = describe_run(values.run, describe(flow), opened, **records)
        on_main(state, lambda: write_config(values.run.output_dir, document))
    holdout = values.data.holdout, values.data.data_seed or 0
    rows = _rows(distilled, flow, opened, holdout, values.run, mirrored=values.data.horizontal_flip)
    training, held_out = (rows, None) if split is None else split.divide(rows)
    callbacks = _callbacks(values.run, values.evaluation, flow, opened, split, data.name)
    if held_out is not None:
        callbacks.insert(0, build_heldout_hook(values.run, values.evaluation, training, held_out))
    texts_of = opened if distilled is not None else held_out  # distillation data have no texts for previews
    return Trainer(flow, training, values.run, callbacks=callbacks, preview_data=texts_of, **records).train()


def with_recipe(settings: Settings[TrainConfig], source: ImageSource, time: str | None) -> Settings[TrainConfig]:
    """Return the settings with those that suit the pictures of a source, and print them. Collective."""
    values, size = settings.values, None
    if time is not None:
        size = {}
        rules = rules_of(TrainConfig)
        is_free = not any(rules[name].fixes_size for name in settings.given)
        if is_free and values.init.origin(values.data.starter) is None and not values.data.space:
            precisions = facts.precisions(values.run, values.method, settings.fixed)
            size = facts.chosen_size(
                source, values.data, time, precisions, lambda flags: speed_of(settings.with_layer("given", flags))
            )
    divisor = divisor_of(choose_network(values.network))
    return settings.with_layer("plan", facts.recipe(values.data, source, divisor, settings.fixed, size))


def with_plan(
    settings: Settings[TrainConfig], time: str | None, count: int, conditions: ConditionSpecs, space: Space
) -> Settings[TrainConfig]:
    """Return the settings of a run that takes a time, and print its plan; without a time, print its speed. Collective.

    Args:
        settings: the settings of the run.
        time: the time in words, or None.
        count: number of items to train on.
        conditions: the conditions of the items.
        space: the space of the data.
    """
    values, distilled = settings.values, distillation_of(settings.values)
    if time is None:
        facts.print_speed(values.run, speed_of(settings, conditions, space), _items_of(distilled, count))
        return settings
    network, fixed = choose_network(values.network), settings.fixed
    if facts.is_free(network, values.network, settings.given):
        fixed = fixed - {"network", *plan.UNET_FLAGS}
    of_origin, why_network = facts.network_of_origin(values.init, values.data, distilled, fixed)
    settings = settings.with_layer("plan", of_origin)
    is_default = not name_of(values.flow.flow) and name_of(values.network.network) == UNET
    is_plain = values.method == "rectified" and is_default and distilled is None
    # Another flow may draw no times.
    fixed = fixed | ({"time_distribution"} if name_of(values.flow.flow) else set())
    known = facts.facts_of(
        values.method,
        values.data,
        values.run,
        distilled,
        fixed,
        pictures=count,
        time=time,
        sides=(space.shape or values.data.framing.shape)[1:],
        network=network.target,
        why_network=why_network,
        starter=facts.starter_of(values.init, values.data, space, settings.given, is_plain=is_plain),
    )
    made = plan.plan(
        known, lambda trial: speed_of(settings.resolving(plan.settings_of(known, trial)), conditions, space)
    )
    PartialState().print(lines(made.reasons))
    return settings.resolving(made.settings)


def speed_of(
    settings: Settings[TrainConfig], conditions: ConditionSpecs | None = None, space: Space | None = None
) -> Speed:
    """Measure the images per second of all processes in a training by these settings, and its memory. Collective."""
    values, distilled = settings.values, distillation_of(settings.values)
    with torch.random.fork_rng():  # the initial weights of the run do not depend on how many networks are measured
        flow = build_flow(
            values, conditions or {}, with_augmentation(space or build_space(values.data), values.data.augment)
        )
    return facts.training_speed(flow, values.run, distilled.path_points if distilled else 0)


def check_flags(values: TrainConfig, given: Collection[str]) -> None:
    """Check relations between flags of different groups, and the names of registered parts."""
    check_rules(values, given)
    method, has_teacher, run = values.method, values.teacher.teacher is not None, values.run
    needed = "has no effect with --teacher" if has_teacher else "needs --teacher: pass the run of a rectified flow"
    refuse({f"method {method}": (method in ("distill", "reflow")) != has_teacher}, needed)
    source = values.source.source_path
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoint_dir, "cache_dir": values.data.cache_dir}
    check_outside("dataset_path", values.data.dataset_path, **written, source_path=source)
    check_outside("source_path", source, **written)
    network, flow = choose_network(values.network), choose_flow(values.flow, method, is_taught=has_teacher)
    noisy = values.source.source_noise > 0 and not values.source.as_start
    refuse({"source_noise": noisy}, "has no effect if the source is a condition: pass --source_as start")
    one_step, is_map = values.program.one_step, issubclass(flow.target, FlowMap)
    refuse({"one_step": one_step and is_map}, f"is for rectified flows, not --method {method}: leave it out")
    if (one_step or is_map) and not takes_interval(network.target):
        needed = "has no input r, the end of an interval, which a one-step generator needs: train only a rectified flow"
        raise UsageError(f"--network {network.target.__name__} {needed}")
    check_source(values.source)


def check_items(given: Collection[str], dataset: str) -> None:
    """Raise a UsageError if a flag is for pictures, and the data are items of a registered dataset."""
    rules = rules_of(TrainConfig)
    refuse(
        {name: rules[name].for_pictures for name in sorted(given)},
        f"is for pictures, and --dataset {dataset} has items of another kind",
    )


def _check_space(space: Space, *, crops: bool, is_encoded: bool, evaluates: bool) -> None:
    """Raise a UsageError if a flag has no effect on data of this space.

    Args:
        space: the space.
        crops: whether random crops are asked for.
        is_encoded: whether an autoencoder encodes the pictures.
        evaluates: whether samples are compared by their features during training.
    """
    refuse(
        {"crop random": crops and is_encoded},
        "has no effect with --autoencoder, which encodes the centre: leave it out",
    )
    by_features = evaluates and "frechet" not in space.medium.metrics
    refuse({"evaluate_every": by_features}, "compares features of photographs: leave it out, and run evaluate.py")


def _items_of(distilled: DistillationData | None, count: int) -> int:
    """Return the number of items of an epoch: those of the data, or the samples of a teacher."""
    return count if distilled is None else distilled.recipe.pairs


def print_dry_run(run: TrainingConfig, flow: Flow, data: str, items: int) -> None:
    """Print the size of a run on data in words, with so many items."""
    accelerator = build_accelerator(run)
    accelerator.print(summarize(run, accelerator, flow, data, items))


def _opened(data: RunData, found: Any) -> Any:
    """Return the data, decoded, on all processes. Collective."""
    opened: Any = data.open(found)
    if data.has_pictures:  # different numbers of pictures would desynchronise the processes
        facts = {"the number of pictures": len(opened), "their fingerprint": opened.fingerprint}
        check_equal(PartialState(), lambda: facts)
    return opened


def _rows(
    distilled: DistillationData | None,
    flow: Flow,
    opened: Any,
    holdout: tuple[float, int],
    run: TrainingConfig,
    *,
    mirrored: bool,
) -> Any:
    """Return the data as the space of the flow stores them, or the data of a teacher. Collective.

    The flow gets the space of these rows, whose scales are known now.
    """
    if distilled is not None:
        return open_distilled(distilled, opened, holdout, choose_precision(run, PartialState().device))
    rows, flow.space = flow.space.medium.rows(opened, mirrored=mirrored)
    return rows


def _callbacks(
    run: TrainingConfig, flags: EvaluationConfig, flow: Flow, opened: Any, split: Split | None, name: str
) -> list[Callback]:
    """Return the callbacks that evaluate samples during training."""
    if not flags.evaluate_every:
        return []
    real, unseen = (opened, None) if split is None else split.divide(opened)
    if not hasattr(opened, "read_pictures"):  # items of a registered dataset
        real = RenderedItems(opened, flow.space, name)
    evaluator = Evaluator(
        real, flags.feature_network, num_samples=flags.evaluation_samples, seed=run.seed, held_out=unseen
    )
    return [EvaluationHook(evaluator, flags.evaluate_every, keeps_best=not flags.stop_when_memorising)]


def start_from(origin: Path | None, run: TrainingConfig, flow: Flow) -> None:
    """Initialise the network of a new run with the weights of ``origin`` whose shapes match. Collective.

    The weights of a run that resumes are not changed.
    """
    if origin is None or checkpoint.list_checkpoints(run.checkpoints):
        return
    state = PartialState()
    source = on_main(state, lambda: checkpoint.resolve(origin))
    taken, fresh = checkpoint.load_matching(flow.network, source)
    sizes = {name: weight.numel() for name, weight in flow.network.state_dict().items()}
    fits, total = sum(sizes[name] for name in taken), sum(sizes[name] for name in (*taken, *fresh))
    if 2 * fits <= total:
        fitting = f"{fits / total:.0%} of this network's weights would fit"
        raise UsageError(f"{source} is of another architecture ({fitting}): pass the --dim and --dim_mults of its run")
    state.print(line("start from", f"{source}: {fits:,} of {total:,} weights"))


def check_sides(flags: NetworkConfig, data: DataConfig, space: Space) -> None:
    """Raise a UsageError if the network does not take the sides of the pictures, or of their latents."""
    size, shape, network = data.image_size, space.shape or data.framing.shape, choose_network(flags)
    if len(shape) < 3:  # items that are not pictures, for a registered network
        return
    height, width = shape[-2:]
    divisor, common = divisor_of(network), gcd(height, width)
    if common % divisor > 0:
        inputs = f"inputs of {size_text(width, height)}, not divisible by {divisor}"
        problem = f"--image_size {size} gives the network {inputs}, as this {network.target.__name__} requires"
        raise UsageError(f"{problem}: pass a multiple of {divisor * (size // common)}")


def hold_out_pictures(pictures: ImageDataset, share: float, seed: int, *, is_given: bool, stops: bool) -> Split | None:
    """Return the split by ``--holdout``, or None if nothing is held out. Collective.

    Args:
        pictures: all pictures.
        share: share to hold out.
        seed: seed of the split.
        is_given: whether the user gave the share: then a split that fails is an error.
        stops: whether the run stops when it memorises, which needs held-out pictures, too.
    """
    state, asked = PartialState(), is_given or stops
    if not share:
        needed = f"needs pictures to measure on: pass --holdout {plan.proposed_share(len(pictures)):g}"
        refuse({"stop_when_memorising": stops}, needed)
        if len(pictures) < plan.MIN_TO_HOLD_OUT and not asked:
            text = f"none of {len(pictures)} pictures, as too few would be left: the run cannot warn when it memorises"
            state.print(line("held out", text))
        return None
    split = hold_out(pictures, share, seed)
    if split.problem is not None:
        refuse({f"holdout {share:g}": asked}, f"leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    return split


def build_heldout_hook(
    run: TrainingConfig, config: EvaluationConfig, training: StoreDataset, held_out: StoreDataset
) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures, and on as many training pictures."""
    batch = run.split_batch(PartialState().num_processes)
    total = run.total_steps(batch, len(training))
    often = max(1, total // MEASUREMENTS)
    every = config.evaluate_every or min(run.save_every or often, often)
    pictures = HeldOutPictures(training, held_out, run.seed)
    if not config.evaluate_every and not config.stop_when_memorising:
        # In a step, the backward pass costs twice as much as the forward pass.
        every = max(every, ceil(pictures.passes / (3 * batch.total * MEASURED_SHARE)))
    return HeldOutHook(pictures, every, stops=config.stop_when_memorising)
