"""The training program: open the data, plan the run, build the flow, train."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from rectified_flow.cli import facts, plan
from rectified_flow.cli.budget import seconds_of, time_text
from rectified_flow.cli.build import build_flow, choose_network, divisor_of, join
from rectified_flow.cli.checks import check_flags, check_items, check_sides, check_space, warm_up_note
from rectified_flow.cli.data import build_space, can_augment, find_data, flags_of_files
from rectified_flow.cli.distill import DistillationData, open_distilled
from rectified_flow.cli.framing import FramedFlags, framing_of
from rectified_flow.cli.plan_document import write_plan
from rectified_flow.cli.record import DATA_FLAGS, check_one_step, distillation_of, recorded_space, with_record
from rectified_flow.cli.settings import Settings
from rectified_flow.cli.training_flags import UNET, EvaluationConfig, OneStepConfig, TrainConfig
from rectified_flow.condition import ConditionSpecs
from rectified_flow.data.description import PictureData, RunData, with_sources
from rectified_flow.data.report import sentences
from rectified_flow.data.sources import ImageSource
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed import check_equal, on_main
from rectified_flow.errors import UsageError
from rectified_flow.evaluation import scores  # noqa: F401 -- it registers scores
from rectified_flow.evaluation.evaluator import METRICS, Evaluator
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import MAX_PICTURES, MIN_HELD_OUT, TIMES, HeldOutPictures, Split, hold_out
from rectified_flow.flags import recorded, refuse, rules_of
from rectified_flow.flows.flow import Flow
from rectified_flow.parts import name_of
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import CLOCK_FILE, DATA_SHEET, check_start, describe_run, write_config
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.space import Space, with_augmentation
from rectified_flow.system.files import replace_file, writing
from rectified_flow.system.terminal import line, lines, paragraph
from rectified_flow.training.clock import Clock
from rectified_flow.training.evaluations import Callback, EvaluationHook, HeldOutHook
from rectified_flow.training.sheet import DataSheet, DataSheetHook
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
    own, budget = settings.layers.get("given", {}), program.budget or facts.DEFAULT_BUDGET
    second = one_step_of(settings.values.run, own, budget, spent=0.0)
    distilled, run = distillation_of(second.values), second.values.run
    on_main(join(settings.values), lambda: check_one_step(run, second.values.method, distilled))
    if not train_run(settings):
        return False
    second = one_step_of(settings.values.run, own, budget, spent=facts.seconds_since(settings.began))
    AcceleratorState._reset_state()  # the run may have another precision
    return train_run(second)


def one_step_of(run: TrainingConfig, given: Mapping[str, Any], budget: str, *, spent: float) -> Settings[TrainConfig]:
    """Return the settings of the one-step generator of ``--one_step``: this machine's flags, and the time that is left.

    The generator gets at most half of the budget, and at least a tenth. A generator that has begun has a clock of its
    own.

    Args:
        run: the flags of the run that it learns from.
        given: the flags of the command line.
        budget: the time of both in words.
        spent: the time that the run took [s].
    """
    rules = rules_of(TrainConfig)
    flags = {name: value for name, value in given.items() if rules[name].local and name not in DATA_FLAGS}
    flags |= {"teacher": run.output_dir, "output_dir": run.output_dir / "one-step", "seed": run.seed}
    if run.checkpoint_dir is not None:
        flags["checkpoint_dir"] = run.checkpoint_dir / "one-step"
    if not (run.output_dir / "one-step" / CLOCK_FILE).exists():
        seconds = seconds_of(budget)
        flags["budget"] = time_text(min(max(seconds - spent, seconds / 10), seconds / 2))
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
    asked = facts.budget_of(program, is_own=values.has_own_data, has_length="train_num_steps" in settings.fixed)
    budget = None if has_begun else asked
    settings = settings.resolving(flags_of_files(values.data, may_choose=not has_begun and distilled is None))
    values = settings.values
    data, found = find_data(values.data, values.source, values.columns)
    if not isinstance(data, PictureData):
        check_items(settings.given, data.name)
    elif not has_begun and distilled is None:
        settings, notes = with_pictures(settings, data, found, budget)
        values = settings.values
        data, found = find_data(values.data, values.source, values.columns)
        found.notes = [*found.notes, *notes]

    # All checks that need no data precede the decoding of the pictures, which can take hours.
    space = build_space(values.data, found)
    check_space(
        space,
        crops=values.data.crop == "random" and "crop" in settings.given and not has_begun,
        evaluates=values.evaluation.evaluate_every > 0,
    )
    if (
        budget is None
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
        split = hold_out_pictures(
            opened,
            values.data.holdout,
            values.data.data_seed or 0,
            is_given="holdout" in settings.given,
            stops=values.evaluation.stop_when_memorising,
        )
    opened = with_sources(opened, data, space)
    rows = opened
    if distilled is None and not program.dry_run:  # before the plan, which then knows the time that encoding takes
        known = on_main(state, lambda: recorded_space(values.run)) if has_begun else None
        rows, space = space.medium.rows(opened, mirrored=values.data.horizontal_flip, recorded=known)
    count, conditions = len(opened) if split is None else len(split.training), getattr(opened, "conditions", {})
    clock = None
    if has_begun:
        clock = facts.resumed_clock(
            values.run.output_dir, asked if program.budget else None, settings.given, settings.began
        )
    elif data.has_pictures or program.dry_run:
        settings, clock = with_plan(settings, budget, count, conditions, space)
        values = settings.values
    check_sides(values.network, values.data, space)
    return train_settled(values, data, opened, rows, split, space, has_begun=has_begun, clock=clock)


def train_settled(
    values: TrainConfig,
    data: RunData,
    opened: Any,
    rows: Any,
    split: Split | None,
    space: Space,
    *,
    has_begun: bool,
    clock: Clock | None,
) -> bool:
    """Train by final flags on open data, or print the size of the run; return whether it finished.

    Args:
        values: the flags.
        data: the description of the data.
        opened: the data.
        rows: the data as the space stores them, without those of a teacher.
        split: the rows of the data on either side of the split, if some are held out.
        space: the space of the rows.
        has_begun: whether the run resumes.
        clock: the time of the run, if it has a budget.
    """
    state, distilled = PartialState(), distillation_of(values)
    conditions, count = getattr(opened, "conditions", {}), len(opened) if split is None else len(split.training)
    start = values.init.origin(values.data.starter) if distilled is None else distilled.teacher
    flow = build_flow(values, conditions, with_augmentation(space, values.data.augment))
    start_from(start, values.run, flow)
    words = [f"{len(opened):,} of {data.name}"]
    if data.has_pictures:
        mirrored = values.data.horizontal_flip and distilled is None
        words = sentences(opened, flow.conditions, mirrored=mirrored, augment=values.data.augment)
    state.print(paragraph("pictures" if data.has_pictures else "items", words))
    if note := warm_up_note(values.run):
        state.print(line("warm-up", note))
    if scale := space.medium.summary:
        state.print(line("values", scale))
    pictures = opened if split is None else split.divide(opened)[0]
    if values.program.dry_run:
        shown = f"{data.name} at {values.data.framing.size_text} px"
        print_dry_run(values.run, flow, shown, _items_of(distilled, count))
        if data.has_pictures and distilled is None:
            write_sheet_of_dry_run(flow, pictures, words, values.run, mirrored=values.data.horizontal_flip)
            write_plan(recorded(values), pictures, words)
        return True
    records: dict[str, Any] = {"data": describe(data), "flags": recorded(values)}
    if distilled is not None:
        if not has_begun:  # a run that is killed while it generates the data keeps its plan
            document = describe_run(values.run, describe(flow), opened, **records)
            on_main(state, lambda: write_config(values.run.output_dir, document))
        holdout = values.data.holdout, values.data.data_seed or 0
        rows = open_distilled(distilled, opened, space, holdout, choose_precision(values.run, state.device))
    training, held_out = (rows, None) if split is None else split.divide(rows)
    callbacks = _callbacks(values.run, values.evaluation, flow, opened, split, data.name)
    if held_out is not None:
        callbacks.insert(0, build_heldout_hook(values.run, values.evaluation, training, held_out))
    if distilled is not None:
        words = [f"{len(training):,} {training.info.source}"]
    callbacks.insert(0, DataSheetHook(words, pictures if data.has_pictures and distilled is None else None))
    texts_of = opened if distilled is not None else held_out  # distillation data have no texts for previews
    return Trainer(
        flow, training, values.run, callbacks=callbacks, preview_data=texts_of, clock=clock, **records
    ).train()


def write_sheet_of_dry_run(
    flow: Flow, pictures: ImageDataset, words: Sequence[str], run: TrainingConfig, *, mirrored: bool
) -> None:
    """Write the sheet of the data beside the store of the pictures, as a dry run leaves the output folder alone."""
    state = PartialState()
    batch = run.split_batch(state.num_processes).total
    path = pictures.path.with_name(f"{pictures.path.name}-{DATA_SHEET}")

    def write() -> None:
        flow.space.medium.prepare(flow.device)
        sheet = DataSheet(flow, pictures, words, pictures, run.seed, batch, mirrored)
        content = sheet.encoded()
        if content is not None:
            with writing(path):
                replace_file(path, content, durable=False)
            state.print(line("data sheet", path))

    on_main(state, write)


def with_pictures(
    settings: Settings[TrainConfig], data: PictureData, source: ImageSource, budget: str | None
) -> tuple[Settings[TrainConfig], list[str]]:
    """Return the settings with those that suit the pictures of a new run, and sentences about them. Collective.

    Args:
        settings: the settings of the run.
        data: the description of the pictures.
        source: the pictures.
        budget: the time of the run in words, or None.
    """
    if facts.may_choose(settings.values.program, is_own=settings.values.has_own_data):
        settings = with_recipe(settings, source, budget)
    values, columns = settings.values, settings.values.columns.condition_on
    chosen, notes = framing_of(
        FramedFlags(values.data, values.source, values.init, columns, settings.given), data, source
    )
    settings = settings.resolving(chosen)
    if budget is not None and {"max_train_samples", "paired"}.isdisjoint(settings.given):
        whole = seconds_of(budget) * (2 if values.program.one_step else 1)  # both runs need the pictures
        settings = settings.with_layer("plan", facts.readable(source, settings.values.data, whole))
    return settings, notes


def with_recipe(settings: Settings[TrainConfig], source: ImageSource, budget: str | None) -> Settings[TrainConfig]:
    """Return the settings with those that suit the pictures of a source, and print them. Collective."""
    values, size = settings.values, None
    if budget is not None:
        size = {}
        rules = rules_of(TrainConfig)
        is_free = not any(rules[name].fixes_size for name in settings.given)
        if is_free and values.init.origin(values.data.starter) is None and not values.data.space:
            precisions = facts.precisions(values.run, values.method, settings.fixed)
            size = facts.chosen_size(
                source,
                values.data,
                plan.seconds_left(budget, facts.seconds_since(settings.began)),
                precisions,
                lambda flags: speed_of(settings.with_layer("given", flags)),
            )
    divisor = divisor_of(choose_network(values.network))
    return settings.with_layer("plan", facts.recipe(values.data, source, divisor, settings.fixed, size))


def with_plan(
    settings: Settings[TrainConfig], budget: str | None, count: int, conditions: ConditionSpecs, space: Space
) -> tuple[Settings[TrainConfig], Clock | None]:
    """Return the settings of a run that takes a time and its clock, and print the plan. Collective.

    Without a time, the speed is printed, and the run has no clock.

    Args:
        settings: the settings of the run.
        budget: the time in words, or None.
        count: number of items to train on.
        conditions: the conditions of the items.
        space: the space of the data.
    """
    values, distilled, elapsed = settings.values, distillation_of(settings.values), facts.seconds_since(settings.began)
    if budget is None:
        items = _items_of(distilled, count)
        facts.print_speed(values.run, speed_of(settings, conditions, space), items)
        return settings.resolving(facts.short_warm_up(values.run, items, settings.given)), None
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
        time=budget,
        spent=elapsed / (2 if values.program.one_step else 1),  # both runs need the pictures
        augmentable=can_augment(space),
        sides=(space.shape or values.data.framing.shape)[1:],
        network=network.target,
        why_network=why_network,
        starter=facts.starter_of(values.init, values.data, space, settings.given, is_plain=is_plain),
    )
    made = plan.plan(
        known, lambda trial: speed_of(settings.resolving(plan.settings_of(known, trial)), conditions, space)
    )
    PartialState().print(lines(made.reasons))
    clock = Clock(elapsed + known.seconds, made.most_steps, began=settings.began)
    return settings.resolving(made.settings), clock


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
    refuse({f"dataset {data.name}": len(opened) == 0}, "has no items: pass a dataset with some")
    if data.has_pictures:  # different numbers of pictures would desynchronise the processes
        facts = {"the number of pictures": len(opened), "their fingerprint": opened.fingerprint}
        check_equal(PartialState(), lambda: facts)
    return opened


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
        real,
        flags.feature_network,
        num_samples=flags.evaluation_samples,
        seed=run.seed,
        held_out=unseen,
        metrics=(*METRICS, *flags.evaluate_metric),
        medium=flow.space.medium,
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
    if config.evaluate_every or config.stop_when_memorising:
        return HeldOutHook(HeldOutPictures(training, held_out, run.seed), every, stops=config.stop_when_memorising)
    # In a step, the backward pass costs twice as much as the forward pass. A short run measures at least twice: before
    # its first step, and after the last one.
    passes = 3 * batch.total * total * MEASURED_SHARE / 2
    most = min(MAX_PICTURES, max(MIN_HELD_OUT, int(passes / (2 * TIMES))))
    pictures = HeldOutPictures(training, held_out, run.seed, most)
    return HeldOutHook(pictures, max(every, ceil(pictures.passes / (3 * batch.total * MEASURED_SHARE))), stops=False)
