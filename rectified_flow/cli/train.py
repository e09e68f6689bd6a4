"""The training programs: flags ► dataset, network, flow ► ``Trainer(...).train()``."""

from collections.abc import Callable, Mapping
from math import ceil, prod
from pathlib import Path
from typing import TypeVar

import numpy as np
from accelerate import PartialState
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from rectified_flow.cli.command_line import recorded
from rectified_flow.cli.parts import (
    build_mean_flow,
    build_rectified_flow,
    join,
    open_pictures,
    picture_space,
    planned_space,
)
from rectified_flow.cli.plan import look, print_plan
from rectified_flow.cli.recipe import proposed_share, with_recipe
from rectified_flow.cli.teacher import open_drawn, request_of, with_teacher_flags
from rectified_flow.cli.train_flags import EvaluationConfig, TrainMeanFlow, TrainRectifiedFlow, check_held_out
from rectified_flow.condition import Condition, Kinds, Labels
from rectified_flow.data.latents import encode_pictures
from rectified_flow.data.report import NAMED, summarize_pictures
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.distributed.join import check_equal
from rectified_flow.errors import require
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.heldout import PATIENCE, HeldOutPictures, Split, hold_out
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

Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)
MEASUREMENTS = 10
"""Of the held-out loss in a run, at least, where no flag says how often."""
PLANNED_LABELS: Mapping[str, Condition] = {"labels": Labels(1)}
"""Stand in for the labels of a dataset that a dry run does not open."""


def train_rectified_flow(config: TrainRectifiedFlow) -> bool:
    """Train a rectified flow, on pictures or on the pairs of another flow; returns whether it finished."""
    return _train(config, build_rectified_flow)


def train_mean_flow(config: TrainMeanFlow) -> bool:
    """Train a mean flow, on pictures or on the paths of another flow; returns whether it finished."""
    return _train(config, build_mean_flow)


def _train(config: Config, build: Callable[[Config, Kinds, Space], Flow]) -> bool:
    state = join(config)
    set_seed(config.run.seed)
    config = with_teacher_flags(config)
    if config.program.look:
        pictures = open_pictures(config.data)
        config = with_recipe(config, len(pictures))
        look(config.run.output_dir, pictures, picture_space(config.data))
        return True
    space = planned_space(config)
    if config.program.dry_run:
        print_plan(config, build(config, PLANNED_LABELS, space))
        return True
    on_main(state, lambda: check_start(config.run, config.network.init_from))
    require_room_for_batch(config, space)
    space.prepare(state.device)
    pictures = open_pictures(config.data)
    # Before anything depends on their number, on which processes would part.
    check_equal(state, lambda: {"the number of pictures": len(pictures), "their fingerprint": pictures.fingerprint})
    config = with_recipe(config, len(pictures))
    check_held_out(config.data, config.evaluation, proposed_share(len(pictures)))
    space = space if isinstance(space, Latents) else planned_space(config)  # which a recipe may augment
    return train(config, build(config, pictures.conditions, space), pictures)


def train(config: TrainRectifiedFlow | TrainMeanFlow, flow: Flow, pictures: ImageDataset) -> bool:
    """Train ``flow`` on pictures, on their latents, or on what a teacher draws; returns whether it finished."""
    state, request = PartialState(), request_of(config)
    if state.is_main_process:
        tqdm.write(line("pictures", summarize_pictures(pictures)))
    source = config.network.init_from if request is None else request.source
    if source is not None and not list_checkpoints(config.run.checkpoints):
        start_from(source, flow)
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


def _hold_out(config: TrainRectifiedFlow | TrainMeanFlow, flow: Flow, pictures: ImageDataset) -> Split | None:
    """The split by ``--holdout``, None if nothing is held out. Collective.

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


def _training_data(config: TrainRectifiedFlow | TrainMeanFlow, flow: Flow, pictures: ImageDataset) -> StoreDataset:
    """The pictures, their latents, or what a teacher draws; ``flow`` gets the space of latents."""
    request = request_of(config)
    if request is not None:
        drawn, space = open_drawn(config, request, pictures)
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
    """The teacher's space, whose autoencoder may have moved since."""
    require(
        space.autoencoder.fingerprint == autoencoder.fingerprint,
        f"--autoencoder {autoencoder.name} has other weights than the teacher's: leave it out, or name the same",
    )
    space.autoencoder = autoencoder
    return space


def start_from(path: Path, flow: Flow) -> None:
    """Give the network of ``flow`` the weights of a run or checkpoint that fit, the same ones on all processes.

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


def require_room_for_batch(config: TrainRectifiedFlow | TrainMeanFlow, space: Space) -> None:
    """Raise a UsageError if a batch cannot fit into a CPU's memory, where the system would kill the process."""
    state, pixels = PartialState(), prod((space.shape or (0,))[1:])
    if state.device.type != "cpu":
        return
    count = config.run.split_batch(state.num_processes).per_process
    skips = 3 * count * config.network.dim * pixels  # at full resolution alone, of a convolution and two blocks
    remedy = "lower --batch_size (--gradient_accumulation_steps makes up for it), --image_size or --dim"
    require_memory(2 * skips, f"a batch of {count} images of {config.data.framing.size_text} px", remedy)


def build_heldout_hook(config: TrainRectifiedFlow | TrainMeanFlow, dataset: StoreDataset, split: Split) -> HeldOutHook:
    """What measures the loss on held-out pictures."""
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
    config: EvaluationConfig, pictures: ImageDataset, seed: int, held_out: ImageDataset | None = None
) -> list[Callback]:
    """The evaluations that ``--evaluate_every`` asks for.

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
