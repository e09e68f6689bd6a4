"""The training program: resolve the settings, open the data, build the flow, train."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from rectified_flow.cli import timing
from rectified_flow.cli.budget import time_text
from rectified_flow.cli.build import build_flow, choose_network, columns_of, join
from rectified_flow.cli.callbacks import build_callbacks, write_sheet_of_dry_run
from rectified_flow.cli.checks import (
    check_conditions,
    check_flags,
    check_items,
    check_sides,
    check_space,
)
from rectified_flow.cli.data import build_space, find_data, flags_of_files
from rectified_flow.cli.distill import DistillationData, open_distilled
from rectified_flow.cli.open_data import OpenData, open_data
from rectified_flow.cli.planning import facts
from rectified_flow.cli.planning.choices import speed_of, with_pictures, with_plan
from rectified_flow.cli.planning.document import write_plan
from rectified_flow.cli.record import check_one_step, distillation_of, handed_on, recorded_space, with_record
from rectified_flow.cli.settings import Settings
from rectified_flow.cli.training_flags import DataConfig, InitConfig, OneStepConfig, TrainConfig
from rectified_flow.data.description import PictureData
from rectified_flow.data.open import check_obeyed
from rectified_flow.data.report import sentences
from rectified_flow.distributed import any_rank, on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import recorded
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.registry import describe
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import check_start, describe_run, prepare_folders, write_config
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.space import with_augmentation
from rectified_flow.system.signals import stop_requested
from rectified_flow.system.terminal import line, paragraph
from rectified_flow.training.clock import Clock
from rectified_flow.training.optimizers import warm_up_note
from rectified_flow.training.speed import summarize
from rectified_flow.training.trainer import Trainer, build_accelerator, choose_precision


def train(settings: Settings[TrainConfig]) -> bool:
    """Train by the flags; return whether the run finished.

    With ``--one_step``, a one-step generator then learns from the run, and this run has to finish, too.
    """
    program = settings.values.program
    if not program.one_step or program.dry_run:
        return train_run(settings)
    given, half = settings.layers.get("given", {}), timing.budget_of(program)
    second = one_step_of(settings.values.run, given, half, spent=0.0)
    distilled, run = distillation_of(second.values), second.values.run
    on_main(join(settings.values), lambda: check_one_step(run, second.values.method, distilled))
    # A signal during the last step stops the command, too.
    if not train_run(settings) or any_rank(PartialState(), stop_requested() is not None):
        return False
    folder = settings.values.run.output_dir
    used = on_main(PartialState(), lambda: Clock.used_before(folder, half))  # time before a kill counts, pauses do not
    is_new = not used  # no time is recorded for this budget
    spent = used or timing.seconds_since(settings.began)
    second = one_step_of(settings.values.run, given, half, spent=spent, is_new=is_new)
    AcceleratorState._reset_state()  # the run may have another precision
    return train_run(second)


def one_step_of(
    run: TrainingConfig, given: Mapping[str, Any], half: float, *, spent: float, is_new: bool = False
) -> Settings[TrainConfig]:
    """Return the settings of the one-step generator of ``--one_step``: the flags of both runs, and the time left.

    The generator gets at most half of the budget, and at least a tenth. A generator that has begun has a clock of its
    own.

    Args:
        run: the flags of the run that it learns from.
        given: the flags of the command line.
        half: half of the budget that both runs share [s].
        spent: the time that the run took [s].
        is_new: whether the budget has changed. A generator that has begun then gets a part of the new budget.
    """
    flags = handed_on(given) | {"teacher": run.output_dir, "output_dir": run.output_dir / "one-step", "seed": run.seed}
    if run.checkpoint_dir is not None:
        flags["checkpoint_dir"] = run.checkpoint_dir / "one-step"
    known = None if is_new else Clock.resumed(run.output_dir / "one-step")
    flags["budget"] = time_text(min(max(2 * half - spent, half / 5), half) if known is None else known.asked)
    return Settings(OneStepConfig, {"given": flags})


def train_run(settings: Settings[TrainConfig]) -> bool:
    """Train one run by the flags, or print its plan; return whether it finished."""
    check_flags(settings.values, settings.given)
    state, program = join(settings.values), settings.values.program

    # Settings that the flags leave open are taken from the folders of the run, of its teacher and of the data.
    settings, has_begun = with_record(settings)
    set_seed(settings.values.run.seed)
    distilled = distillation_of(settings.values)
    is_timed = settings.values.is_planned and "train_num_steps" not in settings.fixed
    asked = timing.budget_of(program) if is_timed else None
    budget = None if has_begun else asked
    chooses_data = not has_begun and distilled is None
    if budget is not None and not program.dry_run:
        settings = settings.begun_before(timing.time_used(settings.values.run.output_dir, budget))
    settings = settings.resolving(flags_of_files(settings.values.data, may_choose=chooses_data))
    check_obeyed(settings.values.data.space, settings.changed)
    data, found = find_data(settings.values.data, settings.values.source, settings.values.columns)
    choices = list[str]()
    if not isinstance(data, PictureData):
        check_items(settings.changed, data.name)
    elif chooses_data:
        settings, choices = with_pictures(settings, data, found, budget)
        data, found = find_data(settings.values.data, settings.values.source, settings.values.columns, found)

    # All checks that need no data precede the decoding of the pictures, which can take hours.
    values, space = settings.values, build_space(settings.values.data, found)
    crops = values.data.crop == "random" and "crop" in settings.given and not has_begun
    check_space(space, crops=crops, evaluates=values.evaluation.evaluate_every > 0)
    may_size = facts.is_free(choose_network(values.network), values.network, settings.given)
    if budget is None or distilled is not None or not may_size:
        check_sides(values.network, values.data, space)
    origin, known = origin_of(values.init, values.data, distilled), None
    on_main(state, lambda: check_start(values.run, origin, writes=not program.dry_run))
    if not program.dry_run:
        space.medium.prepare(state.device)
        known = on_main(state, lambda: recorded_space(values.run)) if has_begun else None

    reading = None if budget is None or program.dry_run else Clock(budget, began=settings.began)
    with timing.time_recorded(values.run, reading):
        opened = open_data(
            data,
            found,
            values.data,
            distilled,
            choices=choices,
            split_is_given="holdout" in settings.given,
            stops=values.evaluation.stop_when_memorising,
            recorded=known,
            stores=not program.dry_run,
        )
        if not has_begun or "use_cfg" in settings.given:
            check_conditions(opened.items, columns_of(values.columns, opened.conditions), values.network, values.flow)
    clock = None
    if has_begun:
        time = asked if program.budget else None
        clock = timing.resumed_clock(values.run.output_dir, time, settings.given, settings.began)
    elif budget is not None:
        settings, clock = with_plan(settings, budget, opened.count, opened.conditions, opened.space)
    else:
        items = rows_of(opened, distilled)
        if data.has_pictures or program.dry_run:
            facts.print_speed(values.run, speed_of(settings, opened.conditions, opened.space), items)
        settings = settings.resolving(facts.short_warm_up(values.run, items, settings.given))
    check_sides(settings.values.network, settings.values.data, opened.space)
    distilled = distillation_of(settings.values)  # the plan may have chosen the number of samples
    return train_on(settings.values, opened, distilled, clock, has_begun=has_begun)


def train_on(
    values: TrainConfig,
    data: OpenData,
    distilled: DistillationData | None,
    clock: Clock | None,
    *,
    has_begun: bool,
) -> bool:
    """Train on open data by final flags, or print the size of the run; return whether it finished.

    Args:
        values: the flags.
        data: the data, without the rows of a teacher.
        distilled: the data of a teacher, if there is one.
        clock: the time of the run, if it has a budget.
        has_begun: whether the run resumes.
    """
    state, run, pictures = PartialState(), values.run, None
    flow = build_flow(values, data.conditions, with_augmentation(data.space, values.data.augment))
    if distilled is not None and isinstance(flow, DistilledFlow):
        flow.grid = on_main(state, lambda: distilled.grid_of(data.space))
    start_from(origin_of(values.init, values.data, distilled), run, flow)
    words = [f"{len(data.items):,} of {data.description.name}"]
    if data.description.has_pictures:
        mirrored = values.data.horizontal_flip and distilled is None
        words = sentences(data.items, flow.conditions, mirrored=mirrored, augment=values.data.augment)
        pictures = data.divide(data.items)[0] if distilled is None else None
    state.print(paragraph("pictures" if data.description.has_pictures else "items", [*words, *data.choices]))
    if scale := data.space.medium.summary:
        state.print(line("values", scale))
    if values.program.dry_run:
        accelerator, shown = build_accelerator(run), f"{data.description.name} at {values.data.framing.size_text} px"
        length = rows_of(data, distilled)
        planned = run.total_steps(run.split_batch(state.num_processes), length)
        steps = planned if clock is None else clock.pace(planned).total
        accelerator.print(summarize(run, accelerator, flow, shown, length, steps))
        if note := warm_up_note(run, steps):
            accelerator.print(line("warm-up", note))
        if pictures is not None:
            words += data.choices
            write_sheet_of_dry_run(flow, pictures, words, run, mirrored=values.data.horizontal_flip)
            write_plan(recorded(values), pictures, words)
        return True

    records: dict[str, Any] = {"data": describe(data.description), "flags": recorded(values)}
    if distilled is not None:
        if not has_begun:  # a run that is killed while it generates the data keeps its plan
            document = describe_run(run, describe(flow), data.items, **records)
            on_main(state, lambda: prepare_folders(run))
            on_main(state, lambda: write_config(run.output_dir, document))
        holdout = values.data.holdout, values.data.data_seed or 0
        precision = choose_precision(run, state.device)
        with timing.time_recorded(run, clock):
            rows = open_distilled(distilled, data.items, data.space, holdout, precision)
        data, words = replace(data, rows=rows), [f"{len(rows):,} {rows.info.source}"]
    callbacks = build_callbacks(run, values.evaluation, flow, data, words, pictures)
    training, held_out = data.divide(data.rows)
    previews = held_out if distilled is None else data.items  # distillation data have no texts for previews
    return Trainer(flow, training, run, callbacks=callbacks, preview_data=previews, clock=clock, **records).train()


def rows_of(data: OpenData, distilled: DistillationData | None) -> int:
    """Return the number of items in an epoch of a run, which may be those that a teacher generates."""
    return data.count if distilled is None else distilled.recipe.pairs


def origin_of(init: InitConfig, data: DataConfig, distilled: DistillationData | None) -> Path | None:
    """Return the checkpoint or run that initialises the network: that of a teacher, or of ``--init_from``."""
    return init.origin(data.starter) if distilled is None else distilled.teacher


def start_from(origin: Path | None, run: TrainingConfig, flow: Flow) -> None:
    """Initialise the network of a new run with the weights of ``origin`` whose shapes match. Collective.

    The weights of a run that resumes are not changed.
    """
    state = PartialState()
    if origin is None or on_main(state, lambda: bool(checkpoint.list_checkpoints(run.checkpoints))):
        return
    source = on_main(state, lambda: checkpoint.resolve(origin))
    taken, fresh = checkpoint.load_matching(flow.network, source)
    sizes = {name: weight.numel() for name, weight in flow.network.state_dict().items()}
    fits, total = sum(sizes[name] for name in taken), sum(sizes[name] for name in (*taken, *fresh))
    if 2 * fits <= total:
        fitting = f"{fits / total:.0%} of this network's weights would fit"
        raise UsageError(f"{source} is of another architecture ({fitting}): pass the --dim and --dim_mults of its run")
    state.print(line("start from", f"{source}: {fits:,} of {total:,} weights"))
