"""From flags to the parts of a run: dataset, space, network and flow."""

from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import Dataset

from rectified_flow.cli.flags.data import ColumnConfig, DataConfig, SourceConfig
from rectified_flow.cli.flags.model import NetworkConfig
from rectified_flow.cli.flags.sampling import SamplingConfig, SolverConfig
from rectified_flow.cli.flags.training import TrainConfig, TrainMeanFlow
from rectified_flow.condition import Kinds, Picture, WrittenCondition, chosen
from rectified_flow.data.build import ImageSource, open_dataset, read_table
from rectified_flow.data.captions import read_column
from rectified_flow.data.metadata import Column, choose_columns, identity_of
from rectified_flow.data.pairs import pair_by_name
from rectified_flow.data.store import ImageDataset
from rectified_flow.data.stream import Batches
from rectified_flow.distributed.join import check_equal, join_processes
from rectified_flow.errors import UsageError
from rectified_flow.evaluation.features import RenderedItems
from rectified_flow.flags import Choice, arguments_from, choose, plain, refuse, typed_options
from rectified_flow.flows.flow import SOURCE, Flow
from rectified_flow.flows.flow_map import DistilledFlow, FlowMap
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import Guidance
from rectified_flow.flows.times import LogitNormal, TimeDistribution
from rectified_flow.load import Trained, load_trained
from rectified_flow.networks.captions import Caption
from rectified_flow.networks.unet import Unet
from rectified_flow.registry import find, names, parameters_of
from rectified_flow.spaces.autoencoders import Autoencoder, open_autoencoder
from rectified_flow.spaces.degradations import Degradation
from rectified_flow.spaces.latents import Latents
from rectified_flow.spaces.pixels import Pixels
from rectified_flow.spaces.space import Space
from rectified_flow.system.terminal import line

CONDITION_DROPOUT = 0.1
TIMES = {"logit_normal": "LogitNormal", "uniform": "Uniform", "u_shaped": "UShaped"}
"""Short names of time distributions."""
DATA_FLAGS = (
    *("dataset", "dataset_path", "image_size", "cache_dir"),
    *("skip_broken_images", "aspect_ratio", "crop", "alpha"),
)
"""Flags that are arguments of :func:`rectified_flow.open_dataset`."""
UNET_FLAGS = {"dim": "dim", "dim_mults": "dim_mults", "dropout": "dropout"}
TIME_FLAGS = {"mean": "time_mean", "std": "time_std", "shift": "time_shift"}
FLOW_FLAGS = {"coupling": "coupling", "time_distribution": "time_distribution"}
WEIGHT_FLAGS = {"weight_power": "weight_power", "weight_epsilon": "weight_epsilon"}
MEAN_FLOW_FLAGS = {name: name for name in ("objective", "mean_fraction", "guidance_scale", "guidance_mixing")}
FLAGS_OF: dict[type[Flow], dict[str, str]] = {
    RectifiedFlow: {"prediction": "prediction", "distance": "loss"},
    MeanFlow: WEIGHT_FLAGS | MEAN_FLOW_FLAGS,
    DistilledFlow: WEIGHT_FLAGS,
}
"""Flags by the argument of the constructor that they set."""


def join(config: Any) -> PartialState:
    """Join the processes of this launch, and check that all were started with the same flags, paths aside.

    Raises:
        UsageError: if they were not, or cannot work together.
        RunError: if other processes do not join, or cannot be reached.
    """
    state = join_processes()
    check_equal(state, lambda: {f"--{name}": value for name, value in plain(config, paths=False).items()})
    return state


def open_trained(config: SamplingConfig) -> tuple[PartialState, Trained, dict[str, Any]]:
    """Join the processes, and load a trained flow with the solver options of the flags.

    Raises:
        UsageError: if the checkpoint cannot be used, or a flag has no effect on its flow.
    """
    state, model = join(config), config.model
    set_seed(config.samples.seed)
    moved: dict[str, Any] = {"autoencoder": model.autoencoder, "text_encoder": model.text_encoder}
    trained = load_trained(model.checkpoint, state, precision=model.mixed_precision, **moved)
    return state, trained, _solver_options(config.solver, trained)


def _solver_options(flags: SolverConfig, trained: Trained) -> dict[str, Any]:
    """Return the arguments of ``flow.sample`` for the flags of the solver.

    Raises:
        UsageError: if a flag has no effect on the flow.
    """
    flow, source, options = trained.flow, trained.source, dict[str, Any]()
    if flags.solver is not None:
        options["solver"] = flags.solver
    if flags.time_grid != "uniform":
        options["grid"] = flags.time_grid
    if flags.guidance_scale != 1 or flags.guidance:
        options["guidance"] = Guidance(flags.guidance_scale, flags.guidance_interval, flags.guidance_scales)
    named = {"solver": "--solver", "grid": "--time_grid", "guidance": "--guidance_scale"}
    unused = [named[name] for name in options if name not in signature(flow.sample).parameters]
    hint = ", which needs no solver and is guided in training, by --guidance_scale" * isinstance(flow, FlowMap)
    if unused:
        raise UsageError(f"{' '.join(unused)} has no effect: {source} holds a {type(flow).__name__}{hint}")
    known = chosen(flow.conditions)
    for name in flags.guidance_scales:
        if name not in known:
            raise UsageError(f"--guidance {name}: {source} has no condition {name}; pass {', '.join(known) or 'none'}")
    if "guidance" in options and not known:
        raise UsageError(f"--guidance_scale needs conditions: train {source} with --use_cfg or --condition_on")
    return options


def open_registered(config: DataConfig) -> tuple[Dataset[Any] | None, ImageSource | None]:
    """Return ``(items, None)`` or ``(None, source)`` for a registered ``--dataset``, else ``(None, None)``."""
    if config.dataset_path is None and config.dataset in names("dataset"):
        choice = choose("dataset", "dataset", config.dataset, config.dataset_options)
        opened = choice.build(image_size=config.image_size, cache_dir=config.cache_dir)
        return (None, opened) if hasattr(opened, "load") else (opened, None)
    named = {"dataset_options": config.dataset_options}
    refuse(named, f"has no effect: --dataset {config.dataset} is not a registered dataset; leave it out")
    return None, None


def open_pictures(config: DataConfig, source: ImageSource | None = None) -> ImageDataset:
    """Open the training pictures, decoding them first if they are not in a store yet.

    Args:
        config: the flags of the data.
        source: the image source of a registered ``--dataset``, in place of the one that the flags name.

    Raises:
        UsageError: if they cannot be found, read or stored.
    """
    return open_dataset(**{name: getattr(config, name) for name in DATA_FLAGS}, source=source)


def check_source(data: DataConfig, flags: SourceConfig) -> None:
    """Check the flags of the sources before any picture is decoded.

    Raises:
        UsageError: if the pictures to start from are no folder, or are among those to generate, or if the pictures
            cannot be degraded.
    """
    if flags.degrade is not None and data.space is None:
        _, height, width = data.framing.shape
        try:
            if (degradation := choose_degradation(flags.degrade)) is not None:
                degradation.check_sides(height, width)
        except ValueError as error:
            raise UsageError(f"--degrade {flags.degrade} does not suit --image_size: {error}") from error
    if flags.source_path is None:
        return
    if not flags.source_path.is_dir():
        raise UsageError(f"--source_path {flags.source_path} is not a folder")
    if data.dataset_path is not None and flags.source_path.resolve().is_relative_to(data.dataset_path.resolve()):
        raise UsageError(
            f"--source_path {flags.source_path} lies in --dataset_path {data.dataset_path}, whose pictures are "
            "generated: pass two folders side by side"
        )


def add_source(pictures: ImageDataset, data: DataConfig, flags: SourceConfig, seed: int = 0) -> ImageDataset:
    """Return the pictures with those of ``--source_path`` as their sources, if the flag is given.

    Args:
        pictures: the pictures to generate.
        data: the flags of these pictures, by which the sources are read, too.
        flags: the flags of the sources.
        seed: seed of the pairs, without ``--paired``.

    Raises:
        UsageError: if the sources cannot be read, or with ``--paired`` if pictures have no partner.
    """
    if flags.source_path is None:
        return pictures
    try:
        source = open_pictures(replace(data, dataset_path=flags.source_path))
    except UsageError as error:
        raise UsageError(str(error).replace("--dataset_path", "--source_path")) from error
    if not flags.paired:
        return pictures.with_source(source, seed=seed)
    folder = data.dataset_path or Path(data.dataset)
    return pair_by_name((folder, pictures), (flags.source_path, source), skip_unpaired=flags.skip_unpaired)


def add_columns(
    pictures: ImageDataset,
    flags: ColumnConfig,
    *,
    source: ImageSource | None = None,
    kinds: Kinds | None = None,
    seed: int = 0,
) -> ImageDataset:
    """Add the columns of ``--condition_on`` to the pictures as conditions, and print a summary of each. Collective.

    Args:
        pictures: the pictures.
        flags: the flags of the columns.
        source: the image source of a registered ``--dataset``.
        kinds: the conditions of a trained flow. Columns take their kinds from it, and other columns are left out.
        seed: seed of the choice among several captions.

    Raises:
        UsageError: if a column does not exist or does not suit its kind, or the text encoder is unavailable.
    """
    if not flags.condition_on:
        return pictures
    state, columns = PartialState(), dict[str, Column]()
    types = dict(option.partition("=")[::2] for option in flags.condition_types)
    table = read_table(pictures, source)
    for found in choose_columns(table, flags.condition_on, types, pictures.info.source):
        kind = None if kinds is None else kinds.get(found.name)
        if kinds is None:
            kind = found.build_kind(flags.text_encoder, flags.text_tokens)
            state.print(line(found.column, found.summary(kind)))
        if isinstance(kind, WrittenCondition):
            columns[found.name] = read_column(found, kind, pictures, state)
    if flags.text_encoder and not any(isinstance(each.kind, Caption) for each in columns.values()):
        raise UsageError("--text_encoder has no effect: no column of --condition_on has captions; leave it out")
    return pictures.with_columns(columns, seed=seed)


def check_classes(flow: Flow, source: object, pictures: ImageDataset | RenderedItems) -> None:
    """Raise a UsageError if the flow of the checkpoint ``source`` and the pictures have different classes."""
    if flow.class_names not in ([], pictures.class_names):
        differ = f"{source} was trained on different classes than {pictures.info.source}"
        raise UsageError(f"{differ}: pass the training pictures of the checkpoint with --dataset_path")


def check_columns(flow: Flow, source: object, pictures: ImageDataset) -> None:
    """Raise a UsageError if a column of the pictures has other values than those that the flow was trained on."""
    for name, column in pictures.columns.items():
        known = flow.conditions.get(name)
        if known is None or identity_of(known) != identity_of(column.kind):
            differ = f"the column {name} of {pictures.info.source} differs from the one that {source} was trained on"
            raise UsageError(f"{differ}: restore the metadata, or train again")


def build_space(data: DataConfig, items: Any = None) -> Space:
    """Build the space of the flags; a space of latents does not know their scales yet.

    Args:
        data: the flags of the data.
        items: a registered dataset of items, the first of which has the shape of the data.

    Raises:
        UsageError: if there is no such space or autoencoder, or the size of the pictures does not suit it.
    """
    if data.space is not None:
        choice = choose("space", Space, data.space, data.space_options)
        shape = data.framing.shape
        if items is not None:
            shape = tuple(Batches(items).__getitems__([0])[choice.target.key].shape[1:])
        space: Space = choice.build(
            shape=shape, horizontal_flip=data.horizontal_flip, augmentation=data.augment, image_size=data.image_size
        )
        return space
    if data.autoencoder is None:
        return picture_space(data)
    if data.autoencoder in names(Autoencoder):
        choice = choose("autoencoder", Autoencoder, data.autoencoder, data.autoencoder_options)
        return Latents(choice.build(), data.image_size)
    return Latents(open_autoencoder(data.autoencoder), data.image_size)


def picture_space(config: DataConfig) -> Pixels:
    """Return the space of the pictures themselves."""
    return Pixels(config.framing.shape, horizontal_flip=config.horizontal_flip, augmentation=config.augment)


def build_flow(config: TrainConfig, conditions: Kinds, space: Space | None = None) -> Flow:
    """Build the network and flow of the flags.

    Args:
        config: all flags.
        conditions: conditions of the data. The network takes columns, and with ``--use_cfg`` also labels and those of
            items.
        space: the space of the flow; :func:`build_space` if not given.

    Raises:
        UsageError: if a name is not registered, an argument does not fit, or ``--use_cfg`` is given and there are no
            conditions.
    """
    network, flow = choose_network(config.network), choose_flow(config)
    space, given = space or build_space(config.data), config.network
    columns = {name: kind for name, kind in conditions.items() if config.columns.condition_on and name != "labels"}
    if given.use_cfg and not conditions.keys() - columns:
        raise UsageError(
            "--use_cfg needs labels, and these pictures have none: put each class in a subfolder of its own"
        )
    shape, source = space.shape or (), config.source
    kinds = {**(conditions if given.use_cfg else columns), **space.conditions}
    if source.is_given and not source.as_start:
        kinds[SOURCE] = Picture(shape)
    module: nn.Module = network.build(
        shape=shape,
        channels=shape[0] if shape else None,
        image_size=min(shape[1:], default=None),
        conditions=kinds,
        gradient_checkpointing=given.gradient_checkpointing,
    )
    if isinstance(module, Unet):
        module.gradient_checkpointing = given.gradient_checkpointing
    arguments: dict[str, Any] = {}
    if source.is_given:
        arguments = {"from_source": source.as_start, "source_noise": source.source_noise}
        arguments["degradation"] = choose_degradation(source.degrade)
        takes = arguments.keys() <= parameters_of(flow.target).keys()
        refuse(
            {"source_path": source.source_path, "degrade": source.degrade} if not takes else {},
            f"has no effect: {flow.target.__name__} leads from noise to pictures",
        )
    built: Flow = flow.build(network=module, space=space, condition_dropout=CONDITION_DROPOUT, **arguments)
    return built


def choose_degradation(text: str | None) -> Degradation | None:
    """Return the degradation of ``NAME`` or ``NAME:VALUE``, with the value of the constructor's first argument.

    Raises:
        UsageError: if it is not registered, or the value does not fit.
    """
    if text is None:
        return None
    name, colon, value = text.partition(":")
    known = {each.lower(): each for each in names(Degradation)}
    target = find("degrade", Degradation, known.get(name.lower(), name))
    parameters = list(parameters_of(target))
    if colon and not parameters:
        raise UsageError(f"--degrade {text}: {name} takes no value; pass {name}")
    options = [f"{parameters[0]}={value}"] if colon else []
    built: Degradation = Choice("degrade", target, typed_options("degrade", target, options)).build()
    return built


def choose_network(config: NetworkConfig) -> Choice:
    """Return the network of the flags.

    Raises:
        UsageError: if it is not registered, or a flag does not fit it.
    """
    choice = choose("network", nn.Module, config.network, config.network_options, but=Flow)  # flows are modules, too
    flags = arguments_from(config, choice.target, Unet, UNET_FLAGS)
    return Choice(choice.flag, choice.target, flags | dict(choice.arguments))


def choose_flow(config: TrainConfig) -> Choice:
    """Return the flow of the flags, with its time distribution.

    Raises:
        UsageError: if one is not registered, or a flag does not fit it.
    """
    flags, taught = config.flow, config.teacher_data is not None
    ours: type[Flow] = RectifiedFlow
    if isinstance(config, TrainMeanFlow):
        ours = DistilledFlow if taught else MeanFlow
    choice = choose("flow", Flow, flags.flow or ours.__name__, flags.flow_options)
    target = choice.target
    arguments = arguments_from(flags, target, Flow, FLOW_FLAGS) | arguments_from(flags, target, ours, FLAGS_OF[ours])
    if "distance" in arguments:
        arguments["distance"] = flags.loss or ("pseudo_huber" if taught else "mse")
    if isinstance(config, TrainMeanFlow):
        if config.teacher.whole_fraction is not None:
            arguments["whole_fraction"] = config.teacher.whole_fraction
        if "earlier_distribution" in parameters_of(target):
            arguments["earlier_distribution"] = LogitNormal(flags.earlier_mean, flags.earlier_std)
    if "time_distribution" in arguments:
        name = flags.time_distribution or ("u_shaped" if taught else "logit_normal")
        times = choose("time_distribution", TimeDistribution, TIMES.get(name, name)).target
        known = {argument: flag for argument, flag in TIME_FLAGS.items() if hasattr(flags, flag)}
        settings = arguments_from(flags, times, LogitNormal, known) | typed_options("time", times, flags.time_options)
        arguments["time_distribution"] = Choice("time_distribution", times, settings).build()
    return Choice(choice.flag, target, arguments | dict(choice.arguments))
