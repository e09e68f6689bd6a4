"""The training programs: flags ► dataset, network, flow ► ``Trainer(...).train()``."""

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import set_seed
from tqdm.auto import tqdm

from rectified_flow.cli.command_line import recorded
from rectified_flow.cli.drawn import open_drawn
from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow, check_held_out
from rectified_flow.cli.look import look
from rectified_flow.cli.plan import print_plan
from rectified_flow.cli.processes import join
from rectified_flow.cli.recipe import with_recipe
from rectified_flow.cli.teacher import request_of, with_teacher_flags
from rectified_flow.data.catalog import open_dataset
from rectified_flow.data.config import DataConfig
from rectified_flow.data.report import summarize_pictures
from rectified_flow.data.store import ImageDataset, StoreDataset
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import UsageError, require
from rectified_flow.evaluation.config import EvaluationConfig
from rectified_flow.evaluation.evaluator import Evaluator
from rectified_flow.evaluation.heldout_loss import HeldOutPictures
from rectified_flow.evaluation.holdout import Split, hold_out
from rectified_flow.flows.distilled import DistilledFlow
from rectified_flow.flows.flow import Flow
from rectified_flow.flows.flow_map import FlowMap
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.timesteps import LogitNormal, TimeDistribution, Uniform, UShaped
from rectified_flow.machine import require_memory
from rectified_flow.networks.conditions import Condition, Kinds, Labels
from rectified_flow.networks.unet import Unet
from rectified_flow.report import line
from rectified_flow.runs.checkpoint import list_checkpoints, load_matching, read
from rectified_flow.runs.resume import check_start
from rectified_flow.spaces.autoencoder import Autoencoder
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.pretrained import open_autoencoder
from rectified_flow.spaces.space import Space
from rectified_flow.training.callbacks import Callback
from rectified_flow.training.encoding import encode_pictures
from rectified_flow.training.eval_hook import EvaluationHook
from rectified_flow.training.heldout_hook import HeldOutHook
from rectified_flow.training.trainer import Trainer

CONDITION_DROPOUT = 0.1
DEFAULT_WHOLE_FRACTION = 0.5
Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)
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
        look(config.run.output_dir, open_pictures(config.data), picture_space(config.data))
        return True
    space = planned_space(config)
    if config.program.dry_run:
        print_plan(config, build(config, PLANNED_LABELS, space))
        return True
    on_main(state, lambda: check_start(config.run, config.network.init_from))
    require_room_for_batch(config, space)
    space.prepare(state.device)
    pictures = open_pictures(config.data)
    config = with_recipe(config, len(pictures))
    check_held_out(config.data, config.evaluation)
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
    if config.data.holdout > 0:
        split = hold_out(pictures, config.data.holdout, config.run.seed, state)
        state.print(line("held out", split))
        callbacks.append(build_heldout_hook(config, dataset, split))
        dataset = dataset.subset(split.training)
        pictures, held_out = pictures.subset(split.training), pictures.subset(split.held_out)
    callbacks += build_evaluations(config.evaluation, pictures, config.run.seed, held_out)
    return Trainer(flow, dataset, config.run, callbacks=callbacks, flags=recorded(config)).train()


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


def build_rectified_flow(config: TrainRectifiedFlow, conditions: Kinds, space: Space | None = None) -> RectifiedFlow:
    """The flow of the flags, on a Unet that takes ``conditions`` if ``--use_cfg`` is given.

    Args:
        config: all flags.
        conditions: of the data.
        space: of the flow; :func:`planned_space` if not given.
    """
    flags, space = config.rectified_flow, space or planned_space(config)
    times: dict[str, TimeDistribution] = {
        "logit_normal": LogitNormal(flags.time_mean, flags.time_std, flags.time_shift),
        "uniform": Uniform(flags.time_shift),
        "u_shaped": UShaped(),
    }
    return RectifiedFlow(
        build_network(config, conditions, space),
        prediction=flags.prediction,
        time_distribution=times[config.times],
        distance=flags.loss or ("mse" if config.reflow.reflow_from is None else "pseudo_huber"),
        space=space,
        **_shared_settings(config),
    )


def build_mean_flow(config: TrainMeanFlow, conditions: Kinds, space: Space | None = None) -> FlowMap:
    """The flow of the flags, as :func:`build_rectified_flow`."""
    flags, space = config.mean_flow, space or planned_space(config)
    network = build_network(config, conditions, space)
    if config.teacher.teacher is not None:
        fraction = config.teacher.whole_fraction
        return DistilledFlow(
            network,
            whole_fraction=DEFAULT_WHOLE_FRACTION if fraction is None else fraction,
            weight_power=flags.weight_power,
            weight_epsilon=flags.weight_epsilon,
            space=space,
        )
    return MeanFlow(
        network,
        objective=flags.objective,
        mean_fraction=flags.mean_fraction,
        weight_power=flags.weight_power,
        weight_epsilon=flags.weight_epsilon,
        time_distribution=LogitNormal(flags.time_mean, flags.time_std),
        earlier_distribution=LogitNormal(flags.earlier_mean, flags.earlier_std),
        guidance_scale=flags.guidance_scale,
        guidance_mixing=flags.guidance_mixing,
        space=space,
        **_shared_settings(config),
    )


def open_pictures(config: DataConfig) -> ImageDataset:
    """Open the training pictures, decoding them first if they are not in a store yet.

    Raises:
        UsageError: if they cannot be found, read or stored.
    """
    return open_dataset(
        config.dataset,
        config.dataset_path,
        image_size=config.image_size,
        cache_dir=config.cache_dir,
        skip_broken_images=config.skip_broken_images,
        aspect_ratio=config.aspect_ratio,
        crop=config.crop,
        alpha=config.alpha,
    )


def picture_space(config: DataConfig) -> Pixels:
    """The space of the pictures themselves."""
    return Pixels(config.framing.shape, horizontal_flip=config.horizontal_flip, augmentation=config.augment)


def planned_space(config: TrainRectifiedFlow | TrainMeanFlow) -> Space:
    """The space of the flags; that of latents does not know their scales yet.

    Raises:
        UsageError: if there is no such autoencoder, or the size of the pictures does not suit it or the network.
    """
    data = config.data
    if data.autoencoder is None:
        return picture_space(data)
    space = Latents(open_autoencoder(data.autoencoder), data.image_size)
    config.network.check_side(data.image_size, (space.shape or (0,))[-1])
    return space


def build_network(config: TrainRectifiedFlow | TrainMeanFlow, conditions: Kinds, space: Space) -> Unet:
    """The Unet of the flags, for the ``x`` of ``space``.

    Raises:
        UsageError: if ``--use_cfg`` is given and there are no conditions.
    """
    flags = config.network
    channels, *sides = space.shape or ()
    if flags.use_cfg and not conditions:
        raise UsageError(
            "--use_cfg needs labels and these pictures have none: put each class in a subfolder of its own"
        )
    network = Unet(
        flags.dim,
        flags.dim_mults,
        channels=channels,
        conditions={**(conditions if flags.use_cfg else {}), **space.conditions},
        image_size=min(sides),
        dropout=flags.dropout,
    )
    network.gradient_checkpointing = flags.gradient_checkpointing
    return network


def build_heldout_hook(config: TrainRectifiedFlow | TrainMeanFlow, dataset: StoreDataset, split: Split) -> HeldOutHook:
    """What measures the loss on held-out pictures."""
    pictures = HeldOutPictures(dataset.subset(split.training), dataset.subset(split.held_out), config.run.seed)
    every = config.evaluation.evaluate_every or config.run.save_every
    return HeldOutHook(pictures, every, stops=config.evaluation.stop_when_memorising)


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


def _shared_settings(config: TrainRectifiedFlow | TrainMeanFlow) -> dict[str, Any]:
    """The settings of every flow on pictures."""
    return {
        "condition_dropout": CONDITION_DROPOUT,
        "coupling": config.coupling.coupling,
    }
