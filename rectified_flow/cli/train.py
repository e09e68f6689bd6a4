"""The training programs: flags ► dataset, network, flow ► ``Trainer(...).train()``."""

import shlex
from dataclasses import replace
from math import ceil, gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed

from rectified_flow.cli import parts, plan, recipe
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
from rectified_flow.cli.dry_run import print_plan
from rectified_flow.cli.flags.data import FIELDS
from rectified_flow.cli.flags.model import UNET
from rectified_flow.cli.flags.training import (
    EvaluationConfig,
    TrainConfig,
    TrainMeanFlow,
    TrainRectifiedFlow,
    seconds_of,
)
from rectified_flow.cli.programs import command
from rectified_flow.cli.teacher import flags_of_checkpoint, inherited_flags, open_drawn, with_teacher_flags
from rectified_flow.condition import Kinds, Labels
from rectified_flow.data.build import ImageSource
from rectified_flow.data.latents import encode_pictures
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import PATIENCE, HeldOutPictures, Split, divided, hold_out, split_sources
from rectified_flow.evaluation.report import look, name_some, summarize_pictures
from rectified_flow.flags import command_line, parse, plain, recorded, refuse
from rectified_flow.flows.flow import Flow
from rectified_flow.runs import checkpoint
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.resume import check_start
from rectified_flow.spaces.fields import Fields
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.space import Space
from rectified_flow.system.machine import require_memory
from rectified_flow.system.terminal import line
from rectified_flow.training.callbacks import Callback, Pace
from rectified_flow.training.evaluations import EvaluationHook, HeldOutHook
from rectified_flow.training.trainer import Trainer

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run by default, before the limit of MEASURED_SHARE."""
MEASURED_SHARE = 0.05
"""Largest share of a run's computations for the held-out loss, unless a flag asks for its measurement."""
OF_MAP = ("import", "cache_dir", "seed", "num_workers", "rank_timeout", "log_with", "interrupted_exit_code")
"""Flags of a run that are also those of the one-step generator of ``--one_step``."""
REFLOW_FLAGS = {
    "teacher": "reflow_from",
    "teacher_paths": "reflow_pairs",
    "teacher_steps": "reflow_steps",
    "paths_dir": "pairs_dir",
}
"""Flags of ``--method reflow`` that :class:`TrainRectifiedFlow` has under another name."""
LEAST_ACTIVATIONS = {False: 80, True: 32}
"""Lower bound of the activations of the Unet in bf16, without and with gradient checkpointing: bytes for each pixel and
each of ``dim`` channels. A Unet of one level and one block has 92 and 40 at dim 128."""
PLANNED_LABELS: Kinds = {"labels": Labels(1)}
"""Labels of a dataset that a dry run does not open."""


def train_rectified_flow(config: TrainRectifiedFlow) -> bool:
    """Train a rectified flow on data, or on the pairs of another flow; return whether it finished.

    With ``--one_step``, a one-step generator then learns from it, and this run has to finish, too.
    """
    finished = _train(config)
    if not finished or not config.program.one_step or config.program.look:
        return finished
    run, own = config.run, plain(config)
    flags: dict[str, Any] = {"teacher": run.checkpoint_dir or run.output_dir, "output_dir": run.output_dir / "one-step"}
    flags |= {"budget": recipe.budget_of(config), **{name: own[name] for name in OF_MAP if name in config.given}}
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
    recipe.check_length(config)
    state = parts.join(config)
    set_seed(config.run.seed)
    config = with_teacher_flags(config)
    begun = recipe.flags_of_run(config)
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
        config, pictures = _open_pictures(config, source)
        look(config.run.output_dir, pictures, build_space(replace(config.data, autoencoder=None), source=pictures))
        return True
    return _train_on_pictures(config, source, state)


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
    if config.program.dry_run:
        print_plan(config, flow)
        return True
    on_main(state, lambda: check_start(config.run, config.network.origin))
    start_from(config.network.origin, config.run, flow)
    callbacks: list[Callback] = [Pace(None)]
    if evaluation.evaluate_every:
        callbacks += build_evaluations(evaluation, RenderedItems(items, flow.space, data.dataset), config.run.seed)
    return Trainer(flow, items, config.run, callbacks=callbacks, flags=recorded(config)).train()


def _open_pictures(config: TrainConfig, source: ImageSource | None) -> tuple[TrainConfig, ImageDataset]:
    """Open the pictures, and return them with the flags that suit them. Collective."""
    pictures = _with_conditions(open_pictures(config.data, source), config, source)
    # Checked first, since different numbers of pictures would desynchronise the processes.
    facts = {"the number of pictures": len(pictures), "their fingerprint": pictures.fingerprint}
    check_equal(PartialState(), lambda: facts)
    chosen = recipe.with_recipe(config, len(pictures), pictures.info.originals)
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


def _train_on_pictures(config: TrainConfig, source: ImageSource | None, state: PartialState) -> bool:
    """Train on pictures, on their latents, or on the data of a teacher; return whether the run finished.

    Checks that need no data come first, since the decoding of the pictures can take hours.
    """
    space, dry_run = build_space(config.data, source=source), config.program.dry_run
    if not plan.chooses_network(config):
        check_sides(config, space)
    if dry_run and not recipe.may_choose(config) and not config.columns.condition_on:
        print_plan(config, parts.build_flow(config, PLANNED_LABELS, space))
        return True
    if not dry_run:
        require_room_for_batch(plan.smallest(config), space)
        on_main(state, lambda: check_start(config.run, config.network.origin))
        space.prepare(state.device)
    config, pictures = _open_pictures(config, source)
    budget, latents = recipe.budget_of(config), space if isinstance(space, Latents) else None
    fields = build_space(config.data, source=pictures) if config.data.is_fields else None
    config = plan.with_plan(config, len(pictures), pictures.conditions, latents or fields)
    space = latents or build_space(config.data, source=pictures)  # the recipe may add augmentation
    if dry_run:
        flow = parts.build_flow(config, pictures.conditions, space)
        print_plan(config, flow, len(pictures))
        return True
    check_sides(config, space)
    config.check_held_out(recipe.proposed_share(len(pictures)))
    require_room_for_batch(config, space)
    flow = parts.build_flow(config, pictures.conditions, space)
    taught = config.teacher_data
    start_from(config.network.origin if taught is None else taught.source, config.run, flow)
    state.print(line("pictures", summarize_pictures(pictures)))
    if isinstance(space, Fields):
        state.print(line("fields", describe_fields(space, pictures)))
    dataset = _open_rows(config, flow, pictures, state)
    asked = "holdout" in config.given or config.evaluation.stop_when_memorising
    split = _hold_out(pictures, config.data.holdout, config.run.seed, asked=asked, labelled="labels" in flow.conditions)
    callbacks: list[Callback] = [Pace(None if budget is None else seconds_of(budget))]
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


def _hold_out(pictures: ImageDataset, share: float, seed: int, *, asked: bool, labelled: bool) -> Split | None:
    """Return the split by ``--holdout``, or None if nothing is held out. Collective.

    Args:
        pictures: all pictures.
        share: the share to hold out.
        seed: seed of the run.
        asked: whether a flag, and not a recipe, requests held-out pictures.
        labelled: the flow is trained on labels.

    Raises:
        UsageError: if a split that was asked for leaves too few pictures on a side.
    """
    if share == 0:
        return None
    state = PartialState()
    split = hold_out(pictures, share, seed)
    if split.problem is not None:
        if asked:
            raise UsageError(f"--holdout {share:g} leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    lost = np.setdiff1d(pictures.labels, [-1, *pictures.labels[split.training]])  # -1 is no class
    if labelled and len(lost) > 0:
        named = name_some([pictures.class_names[label] for label in lost])
        state.print(f"warning: no training pictures in {len(lost)} of the classes: {named}")
    return split


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
        known = {name: flags[name] for name in recipe.NETWORK_FLAGS if name in flags}
        remedy = " ".join(command_line(known)) or "the --dim and --dim_mults of its run"
        raise UsageError(f"{source} is of another architecture ({fitting}): pass {remedy}")
    modules = sorted({name.rpartition(".")[0] for name in fresh})
    rest = f"; not initialised: {', '.join(modules[:8])}" + ", ..." * (len(modules) > 8) if modules else ""
    state.print(line("start from", f"{source}: {fits:,} of {total:,} weights{rest}"))


def check_sides(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if the levels of the Unet cannot halve the sides of the pictures, or of their latents."""
    size, levels = config.data.image_size, len(config.network.dim_mults)
    divisor = 2 ** (levels - 1)
    if isinstance(space, Latents):
        common = (space.shape or (0,))[-1]
        sides = f"has latents of side {common}, which is"
        remedy = "pass fewer levels, or a larger power of two as --image_size"
    else:
        _, height, width = config.data.framing.shape
        common = gcd(height, width)
        sides = "is" if height == width else f"with --aspect_ratio {config.data.aspect_ratio} gives sides that are"
        multiple = divisor * (size // common)
        remedy = f"pass {max(1, round(size / multiple)) * multiple}"
    if config.network.network == UNET and common % divisor > 0:
        problem = f"--image_size {size} {sides} not divisible by {divisor}"
        raise UsageError(f"{problem}, as the {levels} levels of --dim_mults require; {remedy}")


def require_room_for_batch(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if a batch cannot fit into a CPU's memory, where the system would kill the process.

    Before the memory is full, a single layer could take minutes, during which signals are not handled.

    Args:
        config: all flags.
        space: the space of the flow.
    """
    state, pixels = PartialState(), prod((space.shape or (0,))[1:])
    if state.device.type != "cpu" or config.network.network != UNET:
        return
    count = config.run.split_batch(state.num_processes).per_process
    activations = LEAST_ACTIVATIONS[config.network.gradient_checkpointing] * count * config.network.dim * pixels
    remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
    require_memory(activations, f"a batch of {count} images of {config.data.framing.size_text} px", remedy)


def build_heldout_hook(
    run: TrainingConfig, config: EvaluationConfig, training: StoreDataset, held_out: StoreDataset
) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures, and on as many training pictures.

    Raises:
        UsageError: if ``--stop_when_memorising`` would have too few measurements.
    """
    batch = run.split_batch(PartialState().num_processes)
    total = run.total_steps(batch, len(training))
    often = max(1, total // MEASUREMENTS)
    every = config.evaluate_every or min(run.save_every or often, often)
    pictures = HeldOutPictures(training, held_out, run.seed)
    if not config.evaluate_every and not config.stop_when_memorising:
        # In a step, the backward pass costs twice as much as the forward pass.
        every = max(every, ceil(pictures.passes / (3 * batch.total * MEASURED_SHARE)))
    if config.stop_when_memorising and config.evaluate_every != 0 and ceil(total / every) <= PATIENCE:
        made = f"--evaluate_every {every} makes {ceil(total / every)} in {total} steps"
        raise UsageError(f"--stop_when_memorising needs {PATIENCE + 1} measurements, but {made}: lower it")
    return HeldOutHook(pictures, every, stops=config.stop_when_memorising)


def build_evaluations(
    config: EvaluationConfig, pictures: ImageDataset | RenderedItems, seed: int, held_out: ImageDataset | None = None
) -> list[Callback]:
    """Return the callbacks of ``--evaluate_every``.

    Raises:
        UsageError: if the feature network is unavailable.
    """
    if config.evaluate_every == 0:
        return []
    network, count = config.feature_network, config.evaluation_samples
    evaluator = Evaluator(pictures, network, num_samples=count, seed=seed, held_out=held_out)
    return [EvaluationHook(evaluator, config.evaluate_every, keeps_best=not config.stop_when_memorising)]
