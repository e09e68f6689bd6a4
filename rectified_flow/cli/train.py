"""The training programs: flags ► dataset, network, flow ► ``Trainer(...).train()``."""

from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from rectified_flow.cli.parts import (
    build_flow,
    build_space,
    choose_flow,
    choose_network,
    is_items,
    join,
    open_pictures,
    open_registered,
    picture_space,
)
from rectified_flow.cli.plan import look, print_plan
from rectified_flow.cli.recipe import proposed_share, with_recipe
from rectified_flow.cli.teacher import inherited_flags, open_drawn, with_teacher_flags
from rectified_flow.cli.train_flags import UNET, EvaluationConfig, TrainConfig, TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.condition import Kinds, Labels
from rectified_flow.data.latents import encode_pictures
from rectified_flow.data.store import NAMED, ImageDataset, StoreDataset, summarize_pictures
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import require
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.evaluation.heldout import PATIENCE, HeldOutPictures, Split, hold_out
from rectified_flow.flags import recorded
from rectified_flow.flows.flow import Flow
from rectified_flow.runs.checkpoint import list_checkpoints, load_matching, read
from rectified_flow.runs.config import TrainingConfig
from rectified_flow.runs.resume import check_start
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.space import Space
from rectified_flow.system.machine import require_memory
from rectified_flow.system.terminal import line
from rectified_flow.training.callbacks import Callback
from rectified_flow.training.evaluations import EvaluationHook, HeldOutHook
from rectified_flow.training.trainer import Trainer

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run, where no flag gives an interval."""
PLANNED_LABELS: Kinds = {"labels": Labels(1)}
"""Labels of a dataset that a dry run does not open."""


def train_rectified_flow(config: TrainRectifiedFlow) -> bool:
    """Train a rectified flow on data, or on the pairs of another flow; return whether it finished."""
    return _train(config)


def train_mean_flow(config: TrainMeanFlow) -> bool:
    """Train a mean flow on data, or on the paths of another flow; return whether it finished."""
    return _train(config)


def _train(config: TrainConfig) -> bool:
    """Train by the flags, or print a plan of the run, or a report of the pictures; return whether it finished.

    Checks that need no data come first, since the decoding of the pictures can take hours.
    """
    state = join(config)
    set_seed(config.run.seed)
    config = with_teacher_flags(config)
    choose_network(config.network)  # raises an error for an unknown name
    choose_flow(config)
    registered = open_registered(config.data)
    items = registered if is_items(registered) else None
    if items is not None:
        _check_flags_of_items(config)
    elif config.program.look:
        pictures = open_pictures(config.data, registered)
        config = with_recipe(config, len(pictures))
        look(config.run.output_dir, pictures, picture_space(config.data))
        return True
    space = build_space(config.data, items)
    if isinstance(space, Latents):
        config.network.check_side(config.data.image_size, (space.shape or (0,))[-1])
    conditions: Kinds = PLANNED_LABELS if items is None else getattr(items, "conditions", {})
    if config.program.dry_run:
        print_plan(config, build_flow(config, conditions, space))
        return True
    on_main(state, lambda: check_start(config.run, config.network.init_from))
    if items is None:
        require_room_for_batch(config, space)
        space.prepare(state.device)
        pictures = open_pictures(config.data, registered)
        # Before anything depends on the number of pictures: a different number would desynchronise the processes.
        check_equal(state, lambda: {"the number of pictures": len(pictures), "their fingerprint": pictures.fingerprint})
        config = with_recipe(config, len(pictures))
        config.check_held_out(proposed_share(len(pictures)))
        space = space if isinstance(space, Latents) else build_space(config.data)  # a recipe may augment
        conditions = pictures.conditions
    flow = build_flow(config, conditions, space)
    origin = config.network.init_from if config.teacher_data is None else config.teacher_data.source
    if origin is not None and not list_checkpoints(config.run.checkpoints):
        start_from(origin, flow)
    dataset: Any = items
    callbacks: list[Callback] = []
    if items is None:
        dataset, callbacks = _open_training_data(config, flow, pictures)
    elif config.evaluation.evaluate_every:
        rendered = RenderedItems(items, flow.space, config.data.dataset)
        callbacks = build_evaluations(config.evaluation, rendered, config.run.seed)
    return Trainer(flow, dataset, config.run, callbacks=callbacks, flags=recorded(config)).train()


def _check_flags_of_items(config: TrainConfig) -> None:
    """Raise a UsageError if a flag is given that has an effect on pictures only."""
    given: dict[str, object] = {"autoencoder": config.data.autoencoder, "holdout": config.data.holdout}
    given |= {"look": config.program.look, "stop_when_memorising": config.evaluation.stop_when_memorising}
    given |= {} if config.teacher_data is None else {config.teacher_data.flag: True}
    for flag, value in given.items():
        require(not value, f"--{flag} is for pictures, and --dataset {config.data.dataset} has items of another kind")


def _open_training_data(config: TrainConfig, flow: Flow, pictures: ImageDataset) -> tuple[StoreDataset, list[Callback]]:
    """Return the pictures to train on, their latents, or the data of a teacher, and the callbacks of the run.

    ``flow`` gets the space of the latents, whose scales are known now.
    """
    state, taught = PartialState(), config.teacher_data
    if state.is_main_process:
        tqdm.write(line("pictures", summarize_pictures(pictures)))
    dataset: StoreDataset = pictures
    autoencoder = flow.space.autoencoder if isinstance(flow.space, Latents) else None
    if taught is not None:
        dataset, space = open_drawn(taught, pictures, config.run, inherited_flags(config))
        if autoencoder is not None and isinstance(space, Latents):
            require(
                space.autoencoder.fingerprint == autoencoder.fingerprint,
                f"--autoencoder {autoencoder.name} has other weights than the teacher's: leave it out, or name the "
                "same",
            )
            space.autoencoder = autoencoder  # the folder may have moved
            flow.space = space
    elif autoencoder is not None:
        dataset = latents = encode_pictures(pictures, autoencoder, state, mirrored=config.data.horizontal_flip)
        flow.space = latents.space(autoencoder)
    callbacks: list[Callback] = []
    held_out, seed = None, config.run.seed
    asked = "holdout" in config.program.given or config.evaluation.stop_when_memorising
    split = _hold_out(pictures, config.data.holdout, seed, asked=asked, labelled="labels" in flow.conditions)
    if split is not None:
        callbacks.append(build_heldout_hook(config.run, config.evaluation, dataset, split))
        dataset = dataset.subset(split.training)
        pictures, held_out = pictures.subset(split.training), pictures.subset(split.held_out)
    return dataset, callbacks + build_evaluations(config.evaluation, pictures, seed, held_out)


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
    split = hold_out(pictures, share, seed, state)
    if split.problem is not None:
        require(not asked, f"--holdout {share:g} leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    lost = np.setdiff1d(pictures.labels, [-1, *pictures.labels[split.training]])  # -1 is no class
    if labelled and len(lost) > 0:
        named = ", ".join(pictures.class_names[label] for label in lost[:NAMED]) + ", ..." * (len(lost) > NAMED)
        state.print(f"warning: no picture is left to train on of {len(lost)} of the classes: {named}")
    return split


def start_from(path: Path, flow: Flow) -> None:
    """Initialise the network of ``flow`` with the weights of a run or checkpoint whose shapes match. Collective.

    Raises:
        UsageError: if there is none, or it is of another architecture.
    """
    state = PartialState()
    source, (taken, fresh) = read(path, lambda source: (source, load_matching(flow.network, source)), state)
    sizes = {name: weight.numel() for name, weight in flow.network.state_dict().items()}
    fits, total = sum(sizes[name] for name in taken), sum(sizes[name] for name in (*taken, *fresh))
    require(
        2 * fits > total,
        f"{source} is of another architecture: {fits / total:.0%} of this network's weights would fit; pass "
        "the --dim and --dim_mults in its config.json",
    )
    modules = sorted({name.rpartition(".")[0] for name in fresh})
    rest = f"; new are {', '.join(modules[:8])}" + ", ..." * (len(modules) > 8) if modules else ""
    state.print(line("start from", f"{source}: {fits:,} of {total:,} weights{rest}"))


def require_room_for_batch(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if a batch cannot fit into a CPU's memory, where the system would kill the process."""
    state, pixels = PartialState(), prod((space.shape or (0,))[1:])
    if state.device.type != "cpu" or config.network.network != UNET:
        return
    count = config.run.split_batch(state.num_processes).per_process
    skips = 3 * count * config.network.dim * pixels  # at full resolution alone, of a convolution and two blocks
    remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
    require_memory(2 * skips, f"a batch of {count} images of {config.data.framing.size_text} px", remedy)


def build_heldout_hook(
    run: TrainingConfig, config: EvaluationConfig, dataset: StoreDataset, split: Split
) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures.

    Raises:
        UsageError: if ``--stop_when_memorising`` would have too few measurements.
    """
    total = run.total_steps(run.split_batch(PartialState().num_processes), len(split.training))
    often = max(1, total // MEASUREMENTS)
    every = config.evaluate_every or min(run.save_every or often, often)
    require(
        not config.stop_when_memorising or config.evaluate_every == 0 or ceil(total / every) > PATIENCE,
        f"--stop_when_memorising needs {PATIENCE + 1} measurements, and --evaluate_every {every} makes "
        f"{ceil(total / every)} in {total} steps: lower it",
    )
    pictures = HeldOutPictures(dataset.subset(split.training), dataset.subset(split.held_out), run.seed)
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
    evaluator = Evaluator(pictures, network, PartialState(), num_samples=count, seed=seed, held_out=held_out)
    return [EvaluationHook(evaluator, config.evaluate_every, keeps_best=not config.stop_when_memorising)]
