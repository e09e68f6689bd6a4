"""From the ``config.json`` of a run or checkpoint to a config."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os.path import lexists
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.config import NetworkConfig, TrainConfig
from rectified_flow.cli.distill import REMEDY, DistillationData, recipe_of
from rectified_flow.data.config import RunData
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import based_on, command_line, config_from, flags_in, plain, replaced, rules_of, values_of
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import prepare_folders, read_config

C = TypeVar("C", bound=TrainConfig)


def config_in(document: Mapping[str, Any], source: object, kind: type[C]) -> C:
    """Return the config that the ``config.json`` of a run records; flags that it lacks have their defaults."""
    return _with_data_seed(config_from(kind, flags_in(document), source))


def _with_data_seed(config: C) -> C:
    return replaced(config, {"data_seed": config.run.seed}) if config.data.data_seed is None else config


def config_of(path: Path, kind: type[C] = TrainConfig) -> C:  # type: ignore[assignment]
    """Return the config of a run by its folder or checkpoint."""
    document = read_config(path / checkpoint.CONFIG_FILE)
    if "network" not in flags_in(document):
        raise UsageError(f"{path} was not trained by rectified-flow train: pass one of its runs")
    return config_in(document, path / checkpoint.CONFIG_FILE, kind)


def begun_config(config: C) -> C | None:
    """Return the config that the run of ``config`` began with, or None if it begins now. Call in one process only."""
    run = config.run
    found = checkpoint.list_checkpoints(run.checkpoint_dir or checkpoint.place_of(run.output_dir))
    distilled = DistillationData.of(config)
    if not found and distilled is not None and _stored_source(distilled) is not None:
        found = [run.output_dir]  # killed while the data of the teacher were generated
    for newest in reversed(found):
        with suppress(UsageError):  # the trainer reports a damaged checkpoint; runs of Python record no flags
            return config_of(newest, type(config))
    return None


def resolved(config: C) -> tuple[C, bool]:
    """Return the flags of a run, and whether the run has begun before. Collective.

    The given flags take precedence over those that the run began with, or over the data and the network of its teacher.
    """
    state = PartialState()
    begun = on_main(state, lambda: begun_config(config))
    if begun is not None:
        check_method(config, begun)
        given, teacher, of_run = config.given, begun.teacher.teacher, config.teacher.teacher
        if teacher is not None and of_run is not None and teacher.resolve().is_relative_to(of_run.resolve()):
            given -= {"teacher"}  # the run of the teacher may have a newer checkpoint by now
        known = based_on(begun, config, given | {"output_dir", "resume"})
        total = known.run.global_batch_size
        if total is not None and "global_batch_size" not in config.given:  # the number of processes may have changed
            share, most = max(total // state.num_processes, 1), known.run.batch_size
            batch = most and next(each for each in range(min(share, most), 0, -1) if share % each == 0)
            sizes = {"global_batch_size": share * state.num_processes, "batch_size": batch}
            known = replaced(known, sizes | {"gradient_accumulation_steps": config.run.gradient_accumulation_steps})
        return known, True
    config = _with_data_seed(replaced(config, {"method": config.method}))
    if config.method in ("mean_flow", "distill") and "lr_decay" not in config.given:
        config = replaced(config, {"lr_decay": "cosine"})
    distilled = DistillationData.of(config)
    return (config if distilled is None else on_main(state, lambda: _with_teacher(config, distilled))), False


def check_method(config: TrainConfig, begun: TrainConfig) -> None:
    """Raise a UsageError if a run began with another method than that of ``config``."""
    if begun.method != config.method:
        folder = config.run.output_dir
        raise UsageError(f"{folder} belongs to a run with --method {begun.method}: choose another --output_dir")


def check_one_step(config: TrainConfig) -> None:
    """Check that the folder of the one-step generator that ``config`` describes is free, or that it began there."""
    if not lexists(config.run.output_dir):
        return
    prepare_folders(config.run)
    begun, distilled = begun_config(config), DistillationData.of(config)
    if begun is not None:
        check_method(config, begun)
    if distilled is not None:
        _stored_source(distilled)


def _stored_source(distilled: DistillationData) -> Path | None:
    """Return the teacher's checkpoint of data that exist already; None if there are none."""
    stored = recipe_of(distilled)
    if stored is None:
        return None
    source = Path(stored.source)
    if not source.resolve().is_relative_to(distilled.teacher.resolve()):
        raise UsageError(f"{distilled.folder} contains {distilled.kind} of {source}: {REMEDY}")
    if not source.exists():
        raise UsageError(f"{source}, the source of {distilled.kind} in {distilled.folder}, no longer exists: {REMEDY}")
    return source


def _with_teacher(config: C, distilled: DistillationData) -> C:
    """Return a config with the data and the network of the teacher's run, and with the teacher's checkpoint."""
    source = checkpoint.resolve(_stored_source(distilled) or distilled.teacher, (checkpoint.CONFIG_FILE,))
    teacher: TrainConfig = config_of(source)
    if distilled.kind == "paths" and teacher.flow.prediction != "velocity":
        raise UsageError(f"--teacher {source} predicts {teacher.flow.prediction}: pass a run that predicts velocity")
    is_condition = teacher.source.is_given and not teacher.source.as_start
    has_conditions = teacher.network.use_cfg or teacher.columns.condition_on or is_condition
    if distilled.recipe.guidance_scale != 1 and not has_conditions:
        raise UsageError(f"--guidance_scale needs conditions, and {source} has none")
    rules, mine, theirs = rules_of(type(config)), plain(config), plain(teacher)
    shared = config.given & {*rules_of(RunData), *rules_of(NetworkConfig), "prediction"}
    for name in sorted(shared):
        if not rules[name].local and mine[name] != theirs[name]:
            inherited = " ".join(command_line({name: theirs[name]}))
            raise UsageError(f"--{name} has no effect with --teacher: the run inherits {inherited} of {source}")
    local = {name: value for name, value in values_of(config).items() if name in shared and rules[name].local}
    data = replace(teacher.data, augment=0.0)  # augmented pictures would not be the ends of the teacher's paths
    config = replace(config, data=data, source=teacher.source, columns=teacher.columns, network=teacher.network)
    return replaced(config, {"teacher": source, "prediction": teacher.flow.prediction, **local})
