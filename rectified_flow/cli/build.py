"""From flags to the parts of a run: the network, the flow, or a trained flow."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed

from rectified_flow.cli.model_flags import ExportedConfig, ModelConfig, SamplingConfig, SolverConfig
from rectified_flow.cli.training_flags import ColumnConfig, FlowConfig, Method, NetworkConfig, TrainConfig
from rectified_flow.condition import ConditionSpecs, Picture, chosen
from rectified_flow.data.metadata import condition_among, identity_of
from rectified_flow.distributed import check_equal, join_processes, on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import plain
from rectified_flow.flows.flow import SOURCE, Flow, sampling_defaults
from rectified_flow.flows.flow_map import DistilledFlow
from rectified_flow.flows.mean import MeanFlow
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.flows.solvers import AUTOGUIDANCE, AUTOGUIDED, NO_GUIDANCE, Guidance
from rectified_flow.flows.times import TimeDistribution
from rectified_flow.load import Trained, model_hash, read_trained
from rectified_flow.networks.network import Network, checkpoint_gradients, to_device
from rectified_flow.parts import Choice, arguments_from, choose, split_part
from rectified_flow.registry import needs_of
from rectified_flow.runs import checkpoint
from rectified_flow.spaces.space import Space, variant_conditions

CONDITION_DROPOUT = 0.1
LEAST_AUTOGUIDED = 400
"""Smallest number of training items for autoguidance by default; with fewer items, copies become more frequent."""
TIMES = {"logit_normal": "LogitNormal", "uniform": "Uniform", "u_shaped": "UShaped"}
"""Short names of time distributions."""


@dataclass(frozen=True)
class MethodParts:
    """The flow of a training method, with the arguments that differ from the flow's own defaults."""

    flow: type[Flow]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    times: str = "logit_normal"
    time_arguments: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[Method, MethodParts] = {
    "rectified": MethodParts(RectifiedFlow, time_arguments={"mean": -0.5, "std": 1.2}),
    "reflow": MethodParts(RectifiedFlow, {"distance": "pseudo_huber"}, "u_shaped"),  # arXiv:2405.20320
    "mean_flow": MethodParts(MeanFlow, time_arguments={"mean": -0.6, "std": 1.6}),
    "distill": MethodParts(DistilledFlow),
}


def join(config: Any) -> PartialState:
    """Join the processes of this launch, and check that all were started with the same flags, paths aside."""
    state = join_processes()
    check_equal(state, lambda: {f"--{name}": value for name, value in plain(config, paths=False).items()})
    return state


def open_trained(config: SamplingConfig, like: str | None = None) -> tuple[PartialState, Trained, dict[str, Any]]:
    """Join the processes, and load a trained flow with the solver options of the flags.

    Args:
        config: the flags.
        like: hash of the model that generated the picture of ``--like``, whose settings are among the flags.
    """
    state = join(config)
    set_seed(config.samples.seed)
    trained = load_trained(config.model, state)
    if like not in (None, model_hash(trained.flow)):  # settings of another model may make no sense
        raise UsageError(f"--like needs a picture of {trained.source}, and another model generated this one")
    options = _solver_options(config.solver, trained)
    scale, flow = config.solver.autoguidance, trained.flow
    if scale is None:
        is_plain = type(flow).sample is RectifiedFlow.sample and not flow.takes_source and not trained.is_taught
        is_plain = is_plain and "guidance" not in options
        scale = AUTOGUIDANCE if on_main(state, lambda: autoguides(trained.source, is_plain=is_plain)) else 1.0
    if scale != 1:  # with it, the grid edm is better on pixels, too
        options = {"grid": "edm"} | options | {"guidance": _autoguidance(config, scale, trained, state)}
    return state, trained, options


def autoguides(source: Path, *, is_plain: bool) -> bool:
    """Return whether autoguidance is the default: it needs an intact early checkpoint. Call in one process only.

    Args:
        source: the checkpoint.
        is_plain: whether its flow leads from noise to data and learned from data; no others were measured.
    """
    early = checkpoint.intact_early_of(source) if is_plain else None
    if early is None or not (source / checkpoint.STATE_FILE).exists():
        return False
    return checkpoint.load_state(source).items >= LEAST_AUTOGUIDED


def load_trained(model: ModelConfig, state: PartialState) -> Trained:
    """Load a trained flow on this process's device, from the same checkpoint on all processes. Collective."""
    source = on_main(state, lambda: checkpoint.resolve(model.checkpoint))
    check_equal(state, lambda: {f"the manifest of {source}": checkpoint.fingerprint(source)})
    trained = read_trained(source, model.checkpoint)
    prepare_parts(trained, model, state.device)
    to_device(trained.flow, state.device, model.mixed_precision)
    return trained


def prepare_parts(trained: Trained, flags: ModelConfig | ExportedConfig, device: torch.device) -> None:
    """Load the frozen parts of a flow, from the places in the flags if they have moved."""
    if flags.text_encoder is not None:
        _move_text_encoder(trained, flags.text_encoder)
    trained.flow.space.medium.prepare(device, flags.autoencoder)


def _move_text_encoder(trained: Trained, source: str) -> None:
    """Load the text encoder of the conditions of a flow from another place."""
    conditions: Any = trained.flow.network.conditions
    moved = {name: kind for name, kind in conditions.items() if hasattr(getattr(kind, "encoder", None), "source")}
    if not moved:
        raise UsageError(f"--text_encoder has no effect: {trained.source} has no captions of a text encoder")
    for name, kind in moved.items():
        conditions[name] = replace(kind, encoder=type(kind.encoder)(source, kind.encoder.fingerprint))


def _autoguidance(config: SamplingConfig, scale: float, trained: Trained, state: PartialState) -> Guidance:
    """Return autoguidance of the given scale, which uses the early checkpoint of the run. Collective."""
    flow, source = trained.flow, trained.source
    if type(flow).sample is not RectifiedFlow.sample:
        raise UsageError(f"--autoguidance has no effect: {source} holds a {type(flow).__name__}")
    path = on_main(state, lambda: checkpoint.early_of(source))
    if path is None:
        raise UsageError(f"--autoguidance needs a checkpoint of the first quarter of the run: {source.parent} has none")
    early: Any = read_trained(on_main(state, partial(checkpoint.resolve, path))).flow
    kinds = [{name: identity_of(kind) for name, kind in each.conditions.items()} for each in (early, flow)]
    if (type(early), early.space.shape, kinds[0]) != (type(flow), flow.space.shape, kinds[1]):
        remedy = "move it away, or pass --autoguidance 1"
        raise UsageError(f"--autoguidance: {path} differs from {source} in kind, shape or conditions: {remedy}")
    velocity = to_device(early, state.device, config.model.mixed_precision).exact_velocity
    guidance = replace(guidance_of(config.solver, flow), autoguidance=scale, earlier=velocity)
    is_alone = guidance.scale == 1 and not guidance.scales and config.solver.guidance_interval is None
    return replace(guidance, interval=AUTOGUIDED) if is_alone else guidance


def guidance_of(flags: SolverConfig, flow: Flow) -> Guidance:
    """Return the guidance of samples; the default scale of a flow has no effect beside scales of single conditions."""
    scale = flags.guidance_scale
    if scale is None:
        scale = 1.0 if flags.guidance else flow.default_guidance
    low, high = sorted(flags.guidance_interval or NO_GUIDANCE.interval)
    known = chosen(flow.conditions)
    scales = {condition_among(known, name): each for name, each in flags.guidance_scales.items()}
    return Guidance(scale, (low, high), scales)


def _solver_options(flags: SolverConfig, trained: Trained) -> dict[str, Any]:
    """Return the arguments of ``flow.sample`` for the flags of the solver."""
    flow, source, options = trained.flow, trained.source, dict[str, Any]()
    if flags.solver is not None:
        options["solver"] = flags.solver
        if flow.from_source and flags.solver == "stochastic":  # before files are written
            starts = f"{source} starts from pictures"
            raise UsageError(f"--solver stochastic is for paths from noise, and {starts}: choose another solver")
    if flags.time_grid is not None and (flags.time_grid != "uniform" or "grid" in sampling_defaults(flow)):
        options["grid"] = flags.time_grid
    guidance = guidance_of(flags, flow)
    if guidance.scale != 1 or guidance.scales:
        options["guidance"] = guidance
    scaled = "--guidance_scale" if flags.guidance_scale is not None else "--guidance"
    named = {"solver": "--solver", "grid": "--time_grid", "guidance": scaled}
    unused = [named[name] for name in options if name not in sampling_defaults(flow)]
    hint = ", which has no solver and is guided in training: leave it out, or train with --guidance_scale" * flow.is_map
    if unused:
        raise UsageError(f"{' '.join(unused)} has no effect: {source} holds a {type(flow).__name__}{hint}")
    known = chosen(flow.conditions)
    for name in guidance.scales:
        if name not in known:
            raise UsageError(f"--guidance {name}: {source} has no condition {name}; pass {', '.join(known) or 'none'}")
    if "guidance" in options and not known:
        raise UsageError(f"--guidance_scale needs conditions: train {source} with --use_cfg or --condition_on")
    return options


def build_flow(values: TrainConfig, conditions: ConditionSpecs, space: Space) -> Flow:
    """Build the network and the flow of the flags.

    Args:
        values: the flags.
        conditions: the conditions of the data: labels, which count with ``--use_cfg`` only, and columns.
        space: the space of the data.

    Raises:
        UsageError: if a flag has no effect on the network or the flow, such as columns on a network without conditions.
    """
    network, source = values.network, values.source
    flow = choose_flow(values.flow, values.method, is_taught=values.teacher.teacher is not None)
    columns = columns_of(values.columns, conditions)
    shape = space.shape or ()
    kinds = {**(conditions if network.use_cfg else columns), **variant_conditions(space)}
    flags = {name: "condition_on" if name in columns else "use_cfg" for name in kinds}
    flags |= dict.fromkeys(variant_conditions(space), "augment")
    if source.is_given and not source.as_start:
        kinds[SOURCE], flags[SOURCE] = Picture(shape), "degrade" if source.source_path is None else "source_as"
    module = choose_network(network).build(
        shape=shape,
        channels=shape[0] if shape else None,
        image_size=min(shape[1:], default=None),
        conditions=kinds,
    )
    # A network may leave out some of the conditions that a flag offers.
    effective = {flags[name] for name in getattr(module, "conditions", {}) if name in flags}
    for name, flag in flags.items():
        if flag not in effective:
            raise UsageError(f"--{flag} has no effect: {type(module).__name__} takes no condition {name}; leave it out")
    if network.gradient_checkpointing:
        checkpoint_gradients(module)
    arguments: dict[str, Any] = {}
    if source.is_given:
        arguments = {"from_source": source.as_start, "source_noise": source.source_noise}
        if not arguments.keys() <= set(needs_of(flow.target)):
            name = "degrade" if source.source_path is None else "source_path"
            raise UsageError(f"--{name} has no effect: {flow.target.__name__} generates pictures from noise only")
    return flow.build(module, space=space, condition_dropout=CONDITION_DROPOUT, **arguments)


def columns_of(flags: ColumnConfig, conditions: ConditionSpecs) -> ConditionSpecs:
    """Return those of the conditions of the data that are columns of ``--condition_on``."""
    return {name: kind for name, kind in conditions.items() if flags.condition_on and name != "labels"}


def choose_network(config: NetworkConfig) -> Choice:
    """Return the network of the flags."""
    choice = choose("network", "network", config.network)
    given = arguments_from(config, ("dim", "dim_mults", "dropout"), choice.target)
    own = {"dropout": config.dropout} if "dropout" in needs_of(choice.target) else {}  # by default, a Unet has none
    return replace(choice, arguments=own | given | dict(choice.arguments))


def takes_conditions(network: Choice) -> bool:
    """Return whether a network takes the conditions of the data, which augmentation requires."""
    return "conditions" in needs_of(network.target)


def divisor_of(network: Choice) -> int:
    """Return the number that must divide the sides of the data, for a network."""
    return network.target.divisor_of(network.arguments) if issubclass(network.target, Network) else 1


def choose_flow(flags: FlowConfig, method: Method, *, is_taught: bool = False) -> Choice:
    """Return the flow of the flags, with its time distribution.

    Args:
        flags: the flags of the flow.
        method: the training method.
        is_taught: whether there is a teacher, whose guidance ``--guidance_scale`` is then.
    """
    parts = METHODS[method]
    name, options = split_part(flags.flow)
    choice = choose("flow", "flow", (name or parts.flow.__name__, *options))
    target = choice.target
    arguments = dict(parts.arguments) if issubclass(target, parts.flow) else {}
    names = ("prediction", "coupling") if is_taught else ("prediction", "coupling", "guidance_scale")
    arguments |= arguments_from(flags, names, target)
    if is_taught and flags.guidance_scale != 1 and issubclass(target, RectifiedFlow):
        arguments["guided_data"] = True
    if "time_distribution" not in needs_of(target):
        if flags.time_distribution:
            raise UsageError(f"--time_distribution has no effect: {target.__name__} draws no times")
    elif flags.time_distribution or parts.times != "logit_normal":
        name, options = split_part(flags.time_distribution)
        name = TIMES.get(name, name) or TIMES[parts.times]
        times = choose("time_distribution", TimeDistribution, (name, *options))
        defaults = dict(parts.time_arguments) if name == TIMES[parts.times] else {}
        arguments["time_distribution"] = replace(times, arguments=defaults | dict(times.arguments)).build()
    return replace(choice, arguments=arguments | dict(choice.arguments))
