"""The recorded layers of a run's settings: flags of the run itself when it resumes, and flags of its teacher's run."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from os.path import lexists
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate import PartialState

from rectified_flow.cli.build import autoguides
from rectified_flow.cli.distill import REMEDY, DistillationData, recipe_of
from rectified_flow.cli.program_flags import ProgramConfig
from rectified_flow.cli.settings import Settings, command_line, flags_in, typed_flags
from rectified_flow.cli.training_flags import (
    NO_WEIGHTS,
    STARTER,
    ColumnConfig,
    DataConfig,
    FlowConfig,
    InitConfig,
    Method,
    NetworkConfig,
    SourceConfig,
    TrainConfig,
    TrainProgramConfig,
)
from rectified_flow.distributed import on_main
from rectified_flow.errors import UsageError
from rectified_flow.flags import Flags, flag_name, rules_of
from rectified_flow.flows.solvers import AUTOGUIDANCE_OF_PATHS
from rectified_flow.registry import as_plain, build
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import check_place, prepare_folders, read_config, wait_for_end
from rectified_flow.runs.training_config import TrainingConfig
from rectified_flow.spaces.space import Space
from rectified_flow.system.artifact import Artifact, owned_files
from rectified_flow.system.terminal import line

C = TypeVar("C", bound=TrainConfig)


def names_of(*groups: type[Flags]) -> frozenset[str]:
    """Return the names of the flags of groups."""
    return frozenset(flag_name(each.name) for group in groups for each in fields(group))


DATA_FLAGS = names_of(DataConfig, SourceConfig, ColumnConfig)
INHERITED = DATA_FLAGS | names_of(NetworkConfig) | {"prediction"}
"""Flags that a student has from the run of its teacher."""
OF_FIRST_RUN = names_of(NetworkConfig, InitConfig, FlowConfig) | {"sample_steps"}
"""Flags that apply to the first run of ``--one_step`` only: the second run inherits them, or has its own values."""
SIZE = ("image_size", "aspect_ratio", "autoencoder")
"""Flags of the size of the data that a network is trained on."""
PLACES = {"dataset_path", "source_path", "cache_dir"}
"""Flags of the data that name folders of this machine."""
OF_COMMAND = names_of(TrainProgramConfig) - names_of(ProgramConfig)
"""Flags of the whole command, such as ``--budget``."""


def handed_on(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags that the second run of ``--one_step`` has, too.

    These are the flags of this machine, of the training and of its evaluation that ``--teacher`` does not exclude.
    """
    rules = rules_of(TrainConfig)
    others = OF_COMMAND | DATA_FLAGS - PLACES | set(rules["teacher"].excludes.split())
    return {
        name: value
        for name, value in given.items()
        if name not in others and (rules[name].local or name not in OF_FIRST_RUN)
    }


def recorded_flags(path: Path) -> dict[str, Any]:
    """Return the flags that a run records, by its folder or checkpoint."""
    flags = flags_in(read_config(path / checkpoint.CONFIG_FILE))
    if "network" not in flags:
        raise UsageError(f"{path} was not trained by rectified-flow train: pass one of its runs")
    return typed_flags(TrainConfig, flags, path / checkpoint.CONFIG_FILE)


def begun_flags(
    run: TrainingConfig, distilled: DistillationData | None, *, waits: bool = True
) -> dict[str, Any] | None:
    """Return the flags that a run began with, or None if it begins now. Call in one process only.

    Args:
        run: the flags of the run.
        distilled: the data of its teacher, if there is one.
        waits: wait until no other process trains in the folder of the run, as it saves when it ends.
    """
    if waits:
        wait_for_end(run.output_dir)
    if run.checkpoint_dir is not None:  # else the run would restart from step 0 with the default dataset
        check_place(run)
    found = checkpoint.list_checkpoints(run.checkpoint_dir or checkpoint.place_of(run.output_dir))
    if not found and distilled is not None and _stored_source(distilled) is not None:
        found = [run.output_dir]  # killed while the data of the teacher were generated
    for newest in reversed(found):
        with suppress(UsageError):  # the trainer reports a damaged checkpoint; runs of Python record no flags
            return recorded_flags(newest)
    return None


def recorded_space(run: TrainingConfig) -> Space | None:
    """Return the space in the newest readable checkpoint of a run; None if there is none. Call in one process only."""
    for newest in reversed(checkpoint.list_checkpoints(run.checkpoints)):
        with suppress(UsageError):  # the trainer reports a damaged checkpoint
            return cast(Space, build(checkpoint.load_document(newest, checkpoint.FLOW_FILE)["space"]))
    return None


def with_record(settings: Settings[C]) -> tuple[Settings[C], bool]:
    """Return the settings with what the run or its teacher has recorded, and whether the run has begun. Collective."""
    values, state = settings.values, PartialState()
    distilled = distillation_of(values)
    begun = on_main(state, lambda: begun_flags(values.run, distilled, waits=not values.program.dry_run))
    given = {**settings.layers.get("file", {}), **settings.layers.get("given", {})}
    inheritable = {name: value for name, value in given.items() if name in INHERITED - {"augment"}}
    if begun is not None:
        if distilled is not None:
            _check_inherited(values.run.output_dir, begun, inheritable)
        check_method(values.method, begun, values.run.output_dir)
        found: dict[str, Any] = {}
        if distilled is not None and (recorded := begun.get("teacher")) is not None:
            found["teacher"] = on_main(state, lambda: _same_teacher(recorded, distilled))
            if found["teacher"] is None:
                problem = f"has no effect, as the teacher of {values.run.output_dir} is {recorded}"
                remedy = "pass this path to resume, even if it no longer exists, or choose another --output_dir"
                raise UsageError(f"--teacher {distilled.teacher} {problem}: {remedy}")
        asked, began = values.init.init_from, begun.get("init_from")
        if "init_from" in settings.given and asked != began:
            kept = f"--init_from {asked} has no effect, as the run in {values.run.output_dir} has begun"
            state.print(line("note", f"{kept} from {began or 'random weights'}: choose another --output_dir"))
        if "global_batch_size" not in settings.given:
            begun |= _split_again(begun, state.num_processes)
        return settings.with_layer("recorded", begun).resolving(found), True
    chosen: dict[str, Any] = {"method": values.method}
    if values.method in ("mean_flow", "distill"):
        chosen["lr_decay"] = "cosine"
    if distilled is None:
        size = {}
        if values.is_planned:
            size = on_main(state, lambda: _size_of_origin(values.init.init_from, settings.given))
        if size:
            state.print(line("size", f"{' '.join(command_line(size))}, as in {values.init.init_from}"))
        return settings.with_layer("chosen", {**chosen, **size, "data_seed": values.run.seed}), False
    source, stored = on_main(state, lambda: (_source_of(distilled), recipe_of(distilled)))
    if stored is not None:
        chosen |= {"teacher_samples": stored.pairs, "teacher_steps": stored.steps, "autoguidance": stored.autoguidance}
    theirs = on_main(state, lambda: recorded_flags(source))
    teacher = Settings(TrainConfig, {"recorded": theirs}).values
    if values.method == "distill" and stored is None:
        is_plain = teacher.method == "rectified" and not teacher.source.is_given and values.flow.guidance_scale == 1
        may_autoguide = on_main(state, lambda: autoguides(source, is_plain=is_plain))
        chosen["autoguidance"] = AUTOGUIDANCE_OF_PATHS if may_autoguide else 1.0
    is_condition = teacher.source.is_given and not teacher.source.as_start
    has_conditions = teacher.network.use_cfg or bool(teacher.columns.condition_on) or is_condition
    _check_teacher(source, teacher.flow.prediction, distilled, has_conditions=has_conditions)
    _check_inherited(source, theirs, inheritable)
    # Augmented pictures would not be the ends of the teacher's paths.
    inherited = {name: value for name, value in theirs.items() if name in INHERITED} | {"augment": 0.0}
    return settings.with_layer("teacher", inherited).with_layer("chosen", chosen).resolving({"teacher": source}), False


def distillation_of(values: TrainConfig) -> DistillationData | None:
    """Return the data that the teacher of a run generates; None without a teacher."""
    scale, run = values.flow.guidance_scale, values.run
    return DistillationData.of(values.teacher, values.method, scale, seed=run.seed, output_dir=run.output_dir)


def _size_of_origin(origin: Path | None, given: Collection[str]) -> dict[str, Any]:
    """Return the size and the autoencoder of the run of ``--init_from``, whose weights suit no other data so well."""
    rules = rules_of(TrainConfig)
    others = {"space", *(name for name, rule in rules.items() if "autoencoder" in rule.excludes.split())}
    if origin in (None, STARTER, NO_WEIGHTS) or not others.isdisjoint(given):
        return {}
    source = checkpoint.resolve(origin, (checkpoint.CONFIG_FILE,))
    with suppress(UsageError):  # trained by a program of the user's own, which records no flags
        flags = recorded_flags(source)
        return {name: flags[name] for name in SIZE if name not in given}
    return {}


def _split_again(begun: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return the sizes of a recorded global batch for another number of processes, which may not divide it."""
    total, most = begun.get("global_batch_size"), begun.get("batch_size")
    if total is None:
        return {}
    share = max(total // processes, 1)
    # The largest part of a process's share that is no larger than the recorded one, and that the share is made of.
    batch = most and next(each for each in range(min(share, most), 0, -1) if share % each == 0)
    return {"global_batch_size": share * processes, "batch_size": batch, "gradient_accumulation_steps": None}


def _same_teacher(recorded: Path, distilled: DistillationData) -> Path | None:
    """Return where the recorded checkpoint of a teacher is now; None if the given teacher is another one.

    If the given teacher is the recorded checkpoint or its run, the recorded path is returned, even if it no longer
    exists. If the teacher was copied or moved, the path of the checkpoint with the same contents is returned.
    """
    given, stored = distilled.teacher, recipe_of(distilled)
    if _is_of(recorded, given):
        return recorded
    copy = given if given.name == recorded.name else checkpoint.place_of(given) / recorded.name
    return copy if stored is not None and checkpoint.fingerprint(copy) == stored.teacher else None


def _is_of(source: Path, teacher: Path) -> bool:
    """Return whether a checkpoint is the teacher or one of its run; the checkpoints may be outside of the run."""
    place = teacher.parent if teacher.name == checkpoint.BEST else checkpoint.place_of(teacher)
    return any(source.resolve().is_relative_to(each.resolve()) for each in (teacher, place))


def check_method(method: str, begun: Mapping[str, Any], folder: Path) -> None:
    """Raise a UsageError if a run began with another method."""
    before = begun.get("method") or "rectified"
    if before != method:
        raise UsageError(f"{folder} belongs to a run with --method {before}: choose another --output_dir")


def check_one_step(run: TrainingConfig, method: Method, distilled: DistillationData | None) -> None:
    """Check that the folder of a one-step generator is free, or that it began there. Call in one process only."""
    if not lexists(run.output_dir):
        return
    prepare_folders(run)
    begun = begun_flags(run, distilled)
    if begun is not None:
        check_method(method, begun, run.output_dir)
    if distilled is not None:
        store = Artifact(distilled.folder, distilled.kind, ())
        for place in (store.path, store.stage):  # otherwise a user's file would be refused only after half of the time
            owned_files(place, distilled.kind)


def _stored_source(distilled: DistillationData) -> Path | None:
    """Return the teacher's checkpoint of data that exist already; None if there are none."""
    stored = recipe_of(distilled)
    if stored is None:
        return None
    source = _same_teacher(Path(stored.source), distilled)
    if source is None:
        raise UsageError(f"{distilled.folder} contains {distilled.kind} of {stored.source}: {REMEDY}")
    if not source.exists():
        raise UsageError(f"{source}, the source of {distilled.kind} in {distilled.folder}, no longer exists: {REMEDY}")
    return source


def _source_of(distilled: DistillationData) -> Path:
    """Return the checkpoint of the teacher."""
    return checkpoint.resolve(_stored_source(distilled) or distilled.teacher, (checkpoint.CONFIG_FILE,))


def _check_teacher(source: Path, prediction: str, distilled: DistillationData, *, has_conditions: bool) -> None:
    """Raise a UsageError if a student cannot learn from a teacher with such a prediction and conditions."""
    if distilled.kind == "paths" and prediction != "velocity":
        raise UsageError(f"--teacher {source} predicts {prediction}: pass a run that predicts velocity")
    if distilled.recipe.guidance_scale != 1 and not has_conditions:
        raise UsageError(f"--guidance_scale needs conditions, and {source} has none")


def _check_inherited(source: Path, theirs: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise a UsageError if a given flag contradicts the one of the teacher's run; those of this machine may differ."""
    rules = rules_of(TrainConfig)
    for name, value in sorted(given.items()):
        if not rules[name].local and value != theirs.get(name):
            inherited = " ".join(command_line({name: as_plain(theirs.get(name), name)}))
            raise UsageError(f"--{name} has no effect with --teacher: the run inherits {inherited} of {source}")
