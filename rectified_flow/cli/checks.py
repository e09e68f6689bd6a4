"""Checks of the flags of a run, of its data and of its network, before any long computation."""

from collections.abc import Collection
from math import gcd
from typing import Any, NoReturn

from rectified_flow.cli.build import choose_flow, choose_network, divisor_of
from rectified_flow.cli.data import can_augment, check_source
from rectified_flow.cli.program_flags import check_outside
from rectified_flow.cli.settings import check_rules
from rectified_flow.cli.training_flags import DataConfig, FlowConfig, NetworkConfig, TrainConfig
from rectified_flow.condition import ConditionSpecs, Labels
from rectified_flow.data.sources.huggingface import LABEL_COLUMNS
from rectified_flow.data.store_writer import default_cache_dir
from rectified_flow.errors import UsageError
from rectified_flow.flags import rules_of
from rectified_flow.flows.flow_map import FlowMap, check_interval
from rectified_flow.runs.folder import SAMPLES
from rectified_flow.spaces.space import Space
from rectified_flow.system.terminal import size_text


def check_flags(values: TrainConfig, given: Collection[str]) -> None:
    """Check relations between flags of different groups, and the names of registered parts."""
    check_rules(values, given)
    method, has_teacher, run = values.method, values.teacher.teacher is not None, values.run
    if has_teacher != (method in ("distill", "reflow")):
        needed = "has no effect with --teacher" if has_teacher else "needs --teacher: pass the run of a rectified flow"
        raise UsageError(f"--method {method} {needed}")
    source = values.source.source_path
    cache_dir = values.data.cache_dir or default_cache_dir()
    written = {"output_dir": run.output_dir, "checkpoint_dir": run.checkpoints, "cache_dir": cache_dir}
    for name, folder in {"dataset_path": values.data.dataset_path, "source_path": source}.items():
        check_outside(name, folder, **written)
        check_outside(name, folder, output_dir=run.output_dir / SAMPLES)
    check_outside("dataset_path", values.data.dataset_path, source_path=source)
    network, flow = choose_network(values.network), choose_flow(values.flow, method, is_taught=has_teacher)
    if values.source.source_noise > 0 and not values.source.as_start:
        raise UsageError("--source_noise has no effect if the source is a condition: pass --source_as start")
    one_step, is_map = values.program.one_step, issubclass(flow.target, FlowMap)
    if one_step and "likelihood" in values.evaluation.evaluate_metric:
        raise UsageError("--evaluate_metric likelihood is for rectified flows, not for --one_step: leave it out")
    if one_step and is_map:
        raise UsageError(f"--one_step is for rectified flows, not --method {method}: leave it out")
    if one_step or is_map:
        check_interval(network.target)
    check_source(values.source)


def check_items(changed: Collection[str], dataset: str) -> None:
    """Raise a UsageError if a flag is for pictures, and the data are items of a registered dataset."""
    rules = rules_of(TrainConfig)
    for name in sorted(changed):
        if rules[name].for_pictures:
            raise UsageError(f"--{name} is for pictures, and --dataset {dataset} has other items: leave it out")


def check_conditions(items: Any, columns: ConditionSpecs, network: NetworkConfig, flow: FlowConfig) -> None:
    """Raise a UsageError if a flag of a new run has no effect on the conditions of its data.

    Args:
        items: the data.
        columns: those of their conditions that are columns of ``--condition_on``.
        network: the flags of the network.
        flow: the flags of the flow.
    """
    conditions: ConditionSpecs = getattr(items, "conditions", {}) if network.use_cfg else columns
    if network.use_cfg and not conditions.keys() - columns.keys():
        _refuse_unlabelled(getattr(items, "table", ()), has_columns=bool(columns))
    unequal = [name for name, kind in conditions.items() if not isinstance(kind, Labels)]
    if flow.coupling == "ot" and unequal:
        pairs = f"pairs rows with equal conditions, and values of {unequal[0]} are rarely equal"
        raise UsageError(f"--coupling ot {pairs}: leave it out, or pass labels only")


def _refuse_unlabelled(table: Collection[str], *, has_columns: bool) -> NoReturn:
    """Raise a UsageError about data without labels, which ``--use_cfg`` needs; ``table`` has the names of columns."""
    if has_columns:
        raise UsageError("--use_cfg needs labels, which the data lack: leave it out; --condition_on works without it")
    column = next((name for name in LABEL_COLUMNS if name in table), next(iter(table), "COLUMN"))
    advice = f"put the pictures of each class in a subfolder of its own, or pass --condition_on {column}=label"
    raise UsageError(f"--use_cfg needs labels: {advice} to use a column of texts as labels")


def check_space(space: Space, *, crops: bool, evaluates: bool) -> None:
    """Raise a UsageError if a flag has no effect on data of this space.

    Args:
        space: the space.
        crops: whether random crops are asked for.
        evaluates: whether samples are compared by their features during training.
    """
    if crops and "autoencoder" in space.uses and not can_augment(space):
        stored = "the latents of the centre are stored"
        raise UsageError(
            f"--crop random has no effect with this --autoencoder ({stored}): leave it out, or pass --autoencoder small"
        )
    if evaluates and "frechet" not in space.medium.metrics:
        raise UsageError("--evaluate_every is for pictures: leave it out, and run rectified-flow evaluate")


def check_sides(flags: NetworkConfig, data: DataConfig, space: Space) -> None:
    """Raise a UsageError if the network does not take the sides of the pictures, or of their latents."""
    size, shape, network = data.image_size, space.shape or data.framing.shape, choose_network(flags)
    if len(shape) < 3:  # items that are not pictures, for a registered network
        return
    height, width = shape[-2:]
    divisor, common = divisor_of(network), gcd(height, width)
    if common % divisor > 0:
        inputs = f"inputs of {size_text(width, height)}, not divisible by {divisor}"
        problem = f"--image_size {size} gives the network {inputs}, as this {network.target.__name__} requires"
        raise UsageError(f"{problem}: pass a multiple of {divisor * (size // common)}")
