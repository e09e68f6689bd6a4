"""The training programs: flags ► dataset, network, flow ► ``Trainer(...).train()``."""

from collections.abc import Mapping
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
from rectified_flow.condition import Condition, Labels
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
from rectified_flow.runs.resume import check_start
from rectified_flow.spaces.autoencoders import Autoencoder
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.space import Space
from rectified_flow.system.machine import require_memory
from rectified_flow.system.terminal import line
from rectified_flow.training.callbacks import Callback
from rectified_flow.training.evaluations import EvaluationHook, HeldOutHook
from rectified_flow.training.trainer import Trainer

MEASUREMENTS = 10
"""Least number of measurements of the held-out loss in a run, where no flag gives an interval."""
PLANNED_LABELS: Mapping[str, Condition] = {"labels": Labels(1)}
"""Labels of a dataset that a dry run does not open."""


def train_rectified_flow(config: TrainRectifiedFlow) -> bool:
    """Train a rectified flow on data, or on the pairs of another flow; return whether it finished."""
    return _train(config)


def train_mean_flow(config: TrainMeanFlow) -> bool:
    """Train a mean flow on data, or on the paths of another flow; return whether it finished."""
    return _train(config)


def _train(config: TrainConfig) -> bool:
    state = join(config)
    set_seed(config.run.seed)
    config = with_teacher_flags(config)
    choose_network(config.network), choose_flow(config)  # a wrong name ends here, before hours of decoding
    registered = open_registered(config.data)
    if is_items(registered):
        return _train_on_items(config, registered)
    if config.program.look:
        pictures = open_pictures(config.data)
        config = with_recipe(config, len(pictures))
        look(config.run.output_dir, pictures, picture_space(config.data))
        return True
    space = build_space(config)
    if config.program.dry_run:
        print_plan(config, build_flow(config, PLANNED_LABELS, space))
        return True
    on_main(state, lambda: check_start(config.run, config.network.init_from))
    require_room_for_batch(config, space)
    space.prepare(state.device)
    pictures = open_pictures(config.data)
    # Before anything depends on their number, on which processes would part.
    check_equal(state, lambda: {"the number of pictures": len(pictures), "their fingerprint": pictures.fingerprint})
    config = with_recipe(config, len(pictures))
    config.check_held_out(proposed_share(len(pictures)))
    space = space if isinstance(space, Latents) else build_space(config)  # which a recipe may augment
    return train(config, build_flow(config, pictures.conditions, space), pictures)


def _train_on_items(config: TrainConfig, items: Any) -> bool:
    """Train on the items of a registered dataset; return whether it finished.

    Raises:
        UsageError: if a flag is given that only pictures have a use for.
    """
    given: dict[str, object] = {"autoencoder": config.data.autoencoder, "holdout": config.data.holdout}
    given |= {"look": config.program.look, "stop_when_memorising": config.evaluation.stop_when_memorising}
    given |= {} if config.teacher_data is None else {config.teacher_data.flag: True}
    for flag, value in given.items():
        require(not value, f"--{flag} is for pictures, and --dataset {config.data.dataset} has items of another kind")
    flow = build_flow(config, getattr(items, "conditions", {}), build_space(config, items))
    if config.program.dry_run:
        print_plan(config, flow)
        return True
    _start_from(config, flow)
    callbacks = []
    if config.evaluation.evaluate_every:
        pictures = RenderedItems(items, flow.space, config.data.dataset)
        callbacks = build_evaluations(config.evaluation, pictures, config.run.seed)
    return Trainer(flow, items, config.run, callbacks=callbacks, flags=recorded(config)).train()


def train(config: TrainConfig, flow: Flow, pictures: ImageDataset) -> bool:
    """Train ``flow`` on pictures, their latents, or the data of a teacher; return whether it finished."""
    state = PartialState()
    if state.is_main_process:
        tqdm.write(line("pictures", summarize_pictures(pictures)))
    _start_from(config, flow)
    dataset = _training_data(config, flow, pictures)
    callbacks: list[Callback] = []
    held_out = None
    split = _hold_out(config, flow, pictures)
    if split is not None:
        callbacks.append(build_heldout_hook(config, dataset, split))
        dataset = dataset.subset(split.training)
        pictures, held_out = pictures.subset(split.training), pictures.subset(split.held_out)
    callbacks += build_evaluations(config.evaluation, pictures, config.run.seed, held_out)
    return Trainer(flow, dataset, config.run, callbacks=callbacks, flags=recorded(config)).train()


def _start_from(config: TrainConfig, flow: Flow) -> None:
    """Give ``flow`` the weights of ``--init_from`` or of its teacher, unless the run resumes."""
    source = config.network.init_from if config.teacher_data is None else config.teacher_data.source
    if source is not None and not list_checkpoints(config.run.checkpoints):
        start_from(source, flow)


def _hold_out(config: TrainConfig, flow: Flow, pictures: ImageDataset) -> Split | None:
    """Return the split by ``--holdout``, or None if nothing is held out. Collective.

    Raises:
        UsageError: if it leaves too few on a side, unless a recipe chose it.
    """
    share, state = config.data.holdout, PartialState()
    if share == 0:
        return None
    split = hold_out(pictures, share, config.run.seed, state)
    if split.problem is not None:
        asked = "holdout" in config.program.given or config.evaluation.stop_when_memorising
        require(not asked, f"--holdout {share:g} leaves {split.problem}: change it, or pass --holdout 0")
        state.print(line("held out", f"nothing, as --holdout {share:g} leaves {split.problem}"))
        return None
    state.print(line("held out", split))
    lost = np.setdiff1d(pictures.labels, [-1, *pictures.labels[split.training]])  # -1 is no class
    if "labels" in flow.conditions and len(lost) > 0:
        named = ", ".join(pictures.class_names[label] for label in lost[:NAMED]) + ", ..." * (len(lost) > NAMED)
        state.print(f"warning: no picture is left to train on of {len(lost)} of the classes: {named}")
    return split


def _training_data(config: TrainConfig, flow: Flow, pictures: ImageDataset) -> StoreDataset:
    """Return the pictures, their latents, or the data of a teacher; ``flow`` gets the space of latents."""
    taught = config.teacher_data
    if taught is not None:
        drawn, space = open_drawn(taught, pictures, config.run, inherited_flags(config))
        if isinstance(flow.space, Latents) and isinstance(space, Latents):
            flow.space = _taught_space(space, flow.space.autoencoder)
        return drawn
    if not isinstance(flow.space, Latents):
        return pictures
    autoencoder = flow.space.autoencoder
    latents = encode_pictures(pictures, autoencoder, PartialState(), mirrored=config.data.horizontal_flip)
    flow.space = latents.space(autoencoder)
    return latents


def _taught_space(space: Latents, autoencoder: Autoencoder) -> Latents:
    """Return the teacher's space with its autoencoder, which may have moved.

    Raises:
        UsageError: if the autoencoder has other weights.
    """
    require(
        space.autoencoder.fingerprint == autoencoder.fingerprint,
        f"--autoencoder {autoencoder.name} has other weights than the teacher's: leave it out, or name the same",
    )
    space.autoencoder = autoencoder
    return space


def start_from(path: Path, flow: Flow) -> None:
    """Initialise the network of ``flow`` with the weights of a run or checkpoint whose shapes match. Collective.

    Raises:
        UsageError: if there is none, or it is of another architecture.
    """

    def load(source: Path) -> tuple[Path, set[str], set[str]]:
        return source, *load_matching(flow.network, source)

    state = PartialState()
    source, taken, fresh = read(path, load, state)
    sizes = {name: weight.numel() for name, weight in flow.network.state_dict().items()}
    fits, misses = (sum(sizes[name] for name in names) for names in (taken, fresh))
    require(
        fits > misses,
        f"{source} is of another architecture: {fits / (fits + misses):.0%} of this network's weights would fit; pass "
        "the --dim and --dim_mults in its config.json",
    )
    modules = sorted({name.rpartition(".")[0] for name in fresh})
    rest = f"; new are {', '.join(modules[:8])}" + ", ..." * (len(modules) > 8) if modules else ""
    state.print(line("start from", f"{source}: {fits:,} of {fits + misses:,} weights{rest}"))


def require_room_for_batch(config: TrainConfig, space: Space) -> None:
    """Raise a UsageError if a batch cannot fit into a CPU's memory, where the system would kill the process."""
    state, pixels = PartialState(), prod((space.shape or (0,))[1:])
    if state.device.type != "cpu" or config.network.network != UNET:
        return
    count = config.run.split_batch(state.num_processes).per_process
    skips = 3 * count * config.network.dim * pixels  # at full resolution alone, of a convolution and two blocks
    remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
    require_memory(2 * skips, f"a batch of {count} images of {config.data.framing.size_text} px", remedy)


def build_heldout_hook(config: TrainConfig, dataset: StoreDataset, split: Split) -> HeldOutHook:
    """Return the callback that measures the loss on held-out pictures.

    Raises:
        UsageError: if ``--stop_when_memorising`` would have too few measurements.
    """
    pictures = HeldOutPictures(dataset.subset(split.training), dataset.subset(split.held_out), config.run.seed)
    total = config.run.total_steps(config.run.split_batch(PartialState().num_processes), len(split.training))
    often = max(1, total // MEASUREMENTS)
    every = config.evaluation.evaluate_every or min(config.run.save_every or often, often)
    stops = config.evaluation.stop_when_memorising
    require(
        not stops or config.evaluation.evaluate_every == 0 or ceil(total / every) > PATIENCE,
        f"--stop_when_memorising needs {PATIENCE + 1} measurements, and --evaluate_every {every} makes "
        f"{ceil(total / every)} in {total} steps: lower it",
    )
    return HeldOutHook(pictures, every, stops=stops)


def build_evaluations(
    config: EvaluationConfig, pictures: ImageDataset | RenderedItems, seed: int, held_out: ImageDataset | None = None
) -> list[Callback]:
    """Return the callbacks of ``--evaluate_every``.

    Raises:
        UsageError: if the feature network is unavailable.
    """
    if config.evaluate_every == 0:
        return []
    evaluator = Evaluator(
        pictures,
        config.feature_network,
        PartialState(),
        num_samples=config.evaluation_samples,
        seed=seed,
        held_out=held_out,
    )
    return [EvaluationHook(evaluator, config.evaluate_every, keeps_best=not config.stop_when_memorising)]
