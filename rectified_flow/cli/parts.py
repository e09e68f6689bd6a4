"""From flags to parts: pictures, space, network and flow."""

from typing import Any

from accelerate import PartialState

from rectified_flow.cli.train_flags import DataConfig, TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.condition import Kinds
from rectified_flow.data.build import open_dataset
from rectified_flow.data.store import ImageDataset
from rectified_flow.distributed.join import check_equal, join_processes
from rectified_flow.errors import UsageError
from rectified_flow.flags import plain
from rectified_flow.flows.flow_map import DistilledFlow, FlowMap
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.times import LogitNormal, TimeDistribution, Uniform, UShaped
from rectified_flow.networks.unet import Unet
from rectified_flow.spaces.autoencoders import open_autoencoder
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space

CONDITION_DROPOUT = 0.1
DEFAULT_WHOLE_FRACTION = 0.5


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


def _shared_settings(config: TrainRectifiedFlow | TrainMeanFlow) -> dict[str, Any]:
    """The settings of every flow on pictures."""
    return {
        "condition_dropout": CONDITION_DROPOUT,
        "coupling": config.coupling.coupling,
    }


def join(config: Any) -> PartialState:
    """Join the processes of this launch, and check that all were started with the same flags, paths aside.

    Raises:
        UsageError: if they were not, or cannot work together.
        RunError: if the others do not come, or no connection to them is possible.
    """
    state = join_processes()
    check_equal(state, lambda: {f"--{name}": value for name, value in plain(config, paths=False).items()})
    return state
