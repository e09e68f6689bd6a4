"""The training programs: flags ► dataset, network, flow ► ``Trainer(...).train()``."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from rectified_flow.cli import parts
from rectified_flow.cli.data import (
    add_columns,
    add_source,
    build_space,
    check_source,
    describe_fields,
    open_pictures,
    open_registered,
    with_field_flags,
)
from rectified_flow.cli.flags.data import FIELDS
from rectified_flow.cli.flags.training import TrainConfig, TrainMeanFlow, TrainRectifiedFlow, seconds_of
from rectified_flow.cli.plan import proposed_share
from rectified_flow.cli.programs import command
from rectified_flow.cli.training import planning
from rectified_flow.cli.training.checks import check_sides
from rectified_flow.cli.training.evaluations import build_evaluations, build_heldout_hook, hold_out_pictures
from rectified_flow.cli.training.rows import open_drawn
from rectified_flow.cli.training.teacher import inherited_flags, with_teacher_flags
from rectified_flow.condition import Labels
from rectified_flow.data.build import ImageSource
from rectified_flow.data.latents import encode_pictures
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import divided, split_sources
from rectified_flow.evaluation.report import look, summarize_pictures
from rectified_flow.flags import command_line, parse, plain, recorded, refuse
from rectified_flow.flows.flow import Flow
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.folder import flags_of_checkpoint
from rectified_flow.runs.resume import check_start
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.latents import Latents
from rectified_flow.system.terminal import line
from rectified_flow.training.callbacks import Pace
from rectified_flow.training.trainer import Callback, Trainer

OF_MAP = ("import", "cache_dir", "seed", "num_workers", "rank_timeout", "log_with", "interrupted_exit_code")
"""Flags of a run that are also those of the one-step generator of ``--one_step``."""
REFLOW_FLAGS = {
    "teacher": "reflow_from",
    "teacher_paths": "reflow_pairs",
    "teacher_steps": "reflow_steps",
    "paths_dir": "pairs_dir",
}
"""Flags of ``--method reflow`` that :class:`TrainRectifiedFlow` has under another name."""


def train_rectified_flow(config: TrainRectifiedFlow) -> bool:
    """Train a rectified flow on data, or on the pairs of another flow; return whether it finished.

    With ``--one_step``, a one-step generator then learns from it, and this run has to finish, too.
    """
    finished = _train(config)
    if not finished or not config.program.one_step or config.program.look:
        return finished
    run, own = config.run, plain(config)
    flags: dict[str, Any] = {"teacher": run.checkpoint_dir or run.output_dir, "output_dir": run.output_dir / "one-step"}
    flags |= {"budget": planning.budget_of(config), **{name: own[name] for name in OF_MAP if name in config.given}}
    PartialState().print(line("one step", f"{command('one-step')} {shlex.join(command_line(flags))}"))
    if config.program.dry_run:
        return True
    AcceleratorState._reset_state()  # the run may have another precision
    return train_one_step(parse(TrainMeanFlow, "", command_line(flags)))


def train_one_step(config: TrainMeanFlow) -> bool:
    """Train a one-step generator with the given ``--method``; return whether it finished.

    Reflow trains a rectified flow, so its flags are renamed and passed to :func:`train_rectified_flow`.
    """
    if config.flow.method != "reflow":
        return _train(config)
    state, own, known = parts.join(config), plain(config), plain(TrainRectifiedFlow())
    names = {name: REFLOW_FLAGS.get(name, name) for name in config.given - {"method"}}
    refuse({name: names[name] not in known for name in names}, "has no effect with --method reflow; leave it out")
    words = command_line({names[name]: own[name] for name in sorted(names)})
    state.print(line("reflow", f"{command('train')} {shlex.join(words)}"))
    reflow = parse(TrainRectifiedFlow, "", words)
    if config.program.given is None:  # built in Python, so nothing is chosen
        object.__setattr__(reflow.program, "given", None)
    return train_rectified_flow(reflow)


def _train(config: TrainConfig) -> bool:
    """Train by the flags, or print a plan of the run, or a report of the pictures; return whether it finished."""
    planning.check_length(config)
    state = parts.join(config)
    set_seed(config.run.seed)
    config = with_teacher_flags(config)
    begun = on_main(state, lambda: planning.recorded_flags(config))
    # A run that began on pictures, and the student of a teacher, keep their kind of data.
    keeps_kind = config.teacher_data is not None or (begun is not None and begun.get("space") != FIELDS)
    config = replace(config, data=with_field_flags(config.data, may_choose=not keeps_kind))
    by_features = config.data.is_fields and config.evaluation.evaluate_every
    refuse({"evaluate_every": by_features}, "compares features of photographs: leave it out, and run evaluate.py")
    check_source(config.data, config.source)
    parts.choose_network(config.network)  # raises an error for an unknown name
    parts.choose_flow(config)
    items, source = open_registered(config.data)
    if items is not None:
        return _train_on_items(config, items, state)
    if config.program.look:
        build_space(replace(config.data, autoencoder=None), source=source)  # raises an error for an unknown name
        config, pictures = _open_pictures(config, source, begun)
        look(config.run.output_dir, pictures, build_space(replace(config.data, autoencoder=None), source=pictures))
        return True
    return _train_on_pictures(config, source, begun, state)


def _train_on_items(config: TrainConfig, items: Any, state: PartialState) -> bool:
    """Train on the items of a registered dataset; return whether the run finished."""
    data, evaluation = config.data, config.evaluation
    given: dict[str, object] = {"autoencoder": data.autoencoder, "holdout": data.holdout}
    given |= {name: getattr(config.program, name) for name in ("one_step", "budget", "extend", "look")}
    given |= {"stop_when_memorising": evaluation.stop_when_memorising, "source_path": config.source.source_path}
    given |= {"condition_on": config.columns.condition_on}
    given |= {} if config.teacher_data is None else {config.teacher_data.flag: True}
    refuse(given, f"is for pictures, and --dataset {data.dataset} has items of another kind")
    flow = parts.build_flow(config, getattr(items, "conditions", {}), build_space(data, items))
    on_main(state, lambda: check_start(config.run, config.network.origin, writes=not config.program.dry_run))
    start_from(config.network.origin, config.run, flow)
    if config.program.dry_run:
        planning.print_speed(config, len(items), flow.conditions, flow.space)
        planning.print_dry_run(config, flow, len(items))
        return True
    callbacks: list[Callback] = []
    if evaluation.evaluate_every:
        callbacks += build_evaluations(evaluation, RenderedItems(items, flow.space, data.dataset), config.run.seed)
    return Trainer(flow, items, config.run, callbacks=callbacks, flags=recorded(config)).train()


def _open_pictures(
    config: TrainConfig, source: ImageSource | None, begun: dict[str, Any] | None
) -> tuple[TrainConfig, ImageDataset]:
    """Open the pictures, and return them with the flags that suit them. Collective."""
    pictures = _with_conditions(open_pictures(config.data, source), config, source)
    # Checked first, since different numbers of pictures would desynchronise the processes.
    facts = {"the number of pictures": len(pictures), "their fingerprint": pictures.fingerprint}
    check_equal(PartialState(), lambda: facts)
    chosen = planning.with_recipe(config, begun, len(pictures), pictures.info.originals)
    if chosen.data.framing != config.data.framing:  # the pictures are smaller, or a resumed run has another size
        smaller = open_pictures(chosen.data, source)
        pictures = add_source(smaller, chosen.data, chosen.source, chosen.run.seed).with_columns(
            pictures.columns, seed=chosen.run.seed
        )
    return chosen, pictures


def _with_conditions(pictures: ImageDataset, config: TrainConfig, source: ImageSource | None) -> ImageDataset:
    """Return the pictures with the conditions of columns, and with their sources. Collective."""
    pictures = add_columns(pictures, config.columns, source=source, seed=config.run.seed)
    unequal = [name for name, column in pictures.columns.items() if not isinstance(column.kind, Labels)]
    if config.flow.coupling == "ot" and unequal:
        raise UsageError(
            f"--coupling ot pairs only rows with equal conditions, and {unequal[0]} differs in most rows: leave it out"
        )
    return add_source(pictures, config.data, config.source, config.run.seed)


def _train_on_pictures(
    config: TrainConfig, source: ImageSource | None, begun: dict[str, Any] | None, state: PartialState
) -> bool:
    """Train on pictures, on their latents, or on the data of a teacher; return whether the run finished.

    Checks that need no data come first, since the decoding of the pictures can take hours.
    """
    space, dry_run = build_space(config.data, source=source), config.program.dry_run
    if not planning.chooses_network(config):
        check_sides(config, space)
    budget, taught = planning.budget_of(config), config.teacher_data
    on_main(state, lambda: check_start(config.run, config.network.origin, writes=not dry_run))
    if not dry_run:
        space.prepare(state.device)
    config, pictures = _open_pictures(config, source, begun)
    config.check_held_out(proposed_share(len(pictures)))
    asked = "holdout" in config.given or config.evaluation.stop_when_memorising
    split = None if taught else hold_out_pictures(pictures, config, asked=asked)
    latents = space if isinstance(space, Latents) else None
    fields = build_space(config.data, source=pictures) if config.data.is_fields else None
    trained = len(pictures) if split is None else len(split.training)
    config = planning.with_plan(config, begun, trained, pictures.conditions, latents or fields)
    space = latents or build_space(config.data, source=pictures)  # the recipe may add augmentation
    check_sides(config, space)
    flow = parts.build_flow(config, pictures.conditions, space)
    taught = config.teacher_data  # with the planned number of samples
    start_from(config.network.origin if taught is None else taught.source, config.run, flow)
    state.print(line("pictures", summarize_pictures(pictures)))
    if isinstance(space, Fields):
        state.print(line("fields", describe_fields(space, pictures)))
    if dry_run:
        planning.print_dry_run(config, flow, trained if taught is None else taught.count)
        return True
    dataset = _open_rows(config, flow, pictures, state)
    callbacks: list[Callback] = [] if budget is None else [Pace(seconds_of(budget))]
    held_out: ImageDataset | None = None
    preview_data: StoreDataset | None = None if taught is None else pictures  # a teacher's data have no texts
    if split is not None:
        sources = split_sources(pictures, config.data.holdout, config.run.seed)
        seen, unseen = divided(dataset, split, sources)
        callbacks.append(build_heldout_hook(config.run, config.evaluation, seen, unseen))
        dataset, preview_data = seen, unseen
        pictures, held_out = divided(pictures, split, sources)
    callbacks += build_evaluations(config.evaluation, pictures, config.run.seed, held_out)
    flags = recorded(config)
    return Trainer(flow, dataset, config.run, callbacks=callbacks, flags=flags, preview_data=preview_data).train()


def _open_rows(config: TrainConfig, flow: Flow, pictures: ImageDataset, state: PartialState) -> StoreDataset:
    """Return the pictures, their latents, or the data of a teacher. Collective.

    ``flow`` gets the space of the latents, whose scales are known now.
    """
    autoencoder = flow.space.autoencoder if isinstance(flow.space, Latents) else None
    if config.teacher_data is not None:
        with_sources = config.source.is_given and not config.source.as_start
        drawn = open_drawn(
            config.teacher_data, pictures, config.run, inherited_flags(config), with_sources=with_sources
        )
        dataset, space = drawn
        if isinstance(flow.space, Fields) and isinstance(space, Fields):
            flow.space = flow.space.with_scale_of(space)
        if autoencoder is not None and isinstance(space, Latents):
            if space.autoencoder.fingerprint != autoencoder.fingerprint:
                raise UsageError(f"--autoencoder {autoencoder.name} is not the teacher's autoencoder: leave it out")
            space.autoencoder = autoencoder  # the folder may have moved
            flow.space = space
        return dataset
    if autoencoder is None:
        return pictures
    mirrored = config.data.horizontal_flip
    latents = encode_pictures(ImageDataset(pictures.path, pictures.arguments), autoencoder, state, mirrored=mirrored)
    flow.space, source = latents.space(autoencoder), None
    if isinstance(pictures.source, ImageDataset):
        source = encode_pictures(pictures.source, autoencoder, state, mirrored=mirrored)
    return latents.like(pictures, source)


def start_from(origin: Path | None, run: TrainingConfig, flow: Flow) -> None:
    """Initialise the network of a new run with the weights of ``origin`` whose shapes match. Collective.

    Args:
        origin: a run or checkpoint, or None to change nothing.
        run: the flags of the run; the weights of a run that resumes are not changed.
        flow: the flow whose network is initialised.

    Raises:
        UsageError: if ``origin`` is neither a run nor a checkpoint, or has another architecture.
    """
    if origin is None or run.origin is not None or checkpoint.list_checkpoints(run.checkpoints):
        return
    state = PartialState()
    source, (taken, fresh) = checkpoint.read(
        origin, lambda source: (source, checkpoint.load_matching(flow.network, source)), state
    )
    sizes = {name: weight.numel() for name, weight in flow.network.state_dict().items()}
    fits, total = sum(sizes[name] for name in taken), sum(sizes[name] for name in (*taken, *fresh))
    if 2 * fits <= total:
        fitting = f"{fits / total:.0%} of this network's weights would fit"
        flags = flags_of_checkpoint(source)
        known = {name: flags[name] for name in planning.NETWORK_FLAGS if name in flags}
        remedy = " ".join(command_line(known)) or "the --dim and --dim_mults of its run"
        raise UsageError(f"{source} is of another architecture ({fitting}): pass {remedy}")
    modules = sorted({name.rpartition(".")[0] for name in fresh})
    rest = f"; not initialised: {', '.join(modules[:8])}" + ", ..." * (len(modules) > 8) if modules else ""
    state.print(line("start from", f"{source}: {fits:,} of {total:,} weights{rest}"))
