"""The flags of a run that learns from a trained rectified flow: what it asks for, and what it inherits."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.drawn import DATA_FLAGS, FOLDERS, FRAMING, INHERITED, NETWORK_FLAGS, Recipe, Request
from rectified_flow.cli.flags import TrainMeanFlow, TrainRectifiedFlow
from rectified_flow.data.store_writer import StoreWriter
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, require
from rectified_flow.flags import checked, command_line
from rectified_flow.flows.rectified import RectifiedFlow
from rectified_flow.runs import checkpoint
from rectified_flow.runs.document import program_flags, read_config

DEFAULT_PAIRS, DEFAULT_PATHS, DEFAULT_PATH_STEPS = 50_000, 5_000, 16
Config = TypeVar("Config", TrainRectifiedFlow, TrainMeanFlow)


def request_of(config: TrainRectifiedFlow | TrainMeanFlow) -> Request | None:
    """What the flags ask of a teacher; None if they name none."""
    return _pairs_of(config) if isinstance(config, TrainRectifiedFlow) else _paths_of(config)


def _pairs_of(config: TrainRectifiedFlow) -> Request | None:
    flags = config.reflow
    if flags.reflow_from is None:
        return None
    return Request(
        flag="reflow_from",
        source=flags.reflow_from,
        rows="pairs",
        count=flags.reflow_pairs or DEFAULT_PAIRS,
        folder=flags.pairs_dir or config.run.output_dir / "pairs",
        steps=flags.reflow_steps or RectifiedFlow.default_steps,
    )


def _paths_of(config: TrainMeanFlow) -> Request | None:
    flags = config.teacher
    if flags.teacher is None:
        return None
    return Request(
        flag="teacher",
        source=flags.teacher,
        rows="paths",
        count=flags.teacher_paths or DEFAULT_PATHS,
        folder=flags.paths_dir or config.run.output_dir / "paths",
        steps=flags.teacher_steps or DEFAULT_PATH_STEPS,
        solver="euler",  # for as many calls, twice the points of midpoint
        guidance_scale=config.mean_flow.guidance_scale,
    )


def with_teacher_flags(config: Config) -> Config:
    """The flags of a run that learns from a teacher: data and network are those of the teacher's checkpoint.

    Raises:
        UsageError: if there is no such checkpoint, or what the run has drawn is of another one.
    """
    request = request_of(config)
    if request is None:
        return config
    source, flags = on_main(PartialState(), lambda: _find_source(config, request))
    _refuse_other_flags(config, request, flags)
    data = {name: flags[name] for name in DATA_FLAGS}
    data |= {name: getattr(config.data, name) or flags[name] for name in FOLDERS}
    network = {name: flags[name] for name in NETWORK_FLAGS}
    changes: dict[str, Any] = {"data": replace(config.data, **data), "network": replace(config.network, **network)}
    if isinstance(config, TrainRectifiedFlow):
        changes["rectified_flow"] = replace(config.rectified_flow, prediction=flags["prediction"])
        changes["reflow"] = replace(config.reflow, reflow_from=source)
        return replace(config, **changes)
    require(
        flags["prediction"] == "velocity",
        f"--teacher {source} predicts the {flags['prediction']}, and a mean flow starts from weights that predict the "
        "velocity: pass a run with --prediction velocity",
    )
    require(
        network["use_cfg"] or config.mean_flow.guidance_scale == 1,
        f"--guidance_scale needs a teacher with labels: {source} was trained without --use_cfg",
    )
    return replace(config, **changes, teacher=replace(config.teacher, teacher=source))


def _find_source(config: TrainRectifiedFlow | TrainMeanFlow, request: Request) -> tuple[Path, dict[str, Any]]:
    """The teacher's checkpoint, and the flags that come with it; of rows that are drawn, those of their recipe."""
    _refuse_other_run(config, request)
    known = StoreWriter.recipe_of(request.folder, Recipe)
    if known is not None:
        source = Path(known.source)
        require(
            source.resolve().is_relative_to(request.source.resolve()),
            f"{request.folder} holds {request.rows} of {source}: choose another --output_dir for {request.source}",
        )
        require(
            checkpoint.fingerprint(source) != checkpoint.MISSING
            or bool(checkpoint.list_checkpoints(config.run.checkpoints)),
            f"{source} is gone, which draws the {request.rows} in {request.folder} and whose weights the run starts "
            f"from: remove {' and '.join(map(str, StoreWriter.folders_of(request.folder)))} to begin with another",
        )
        return source, _inherited(known.flags, request, request.folder)
    return checkpoint.read(request.source, lambda source: (source, _inherited(_flags_of(source), request, source)))


def _refuse_other_run(config: TrainRectifiedFlow | TrainMeanFlow, request: Request) -> None:
    """Refuse the folder of a run without a teacher, such as that of the teacher itself, before anything is drawn."""
    folder = config.run.checkpoints
    for newest in checkpoint.list_checkpoints(folder)[-1:]:
        with suppress(DamageError):  # of which the run itself will say more
            require(
                _flags_of(newest).get(request.flag) is not None,
                f"{folder} holds checkpoints of a run without --{request.flag}: choose another --output_dir",
            )


def _refuse_other_flags(config: TrainRectifiedFlow | TrainMeanFlow, request: Request, flags: Mapping[str, Any]) -> None:
    """Refuse a flag of the command line that the teacher determines otherwise; a file has flags of another run."""
    mine = {name: getattr(config.data, name) for name in DATA_FLAGS}
    mine |= {name: getattr(config.network, name) for name in NETWORK_FLAGS}
    mine |= {"prediction": config.rectified_flow.prediction} if isinstance(config, TrainRectifiedFlow) else {}
    given = config.program.given if config.program.config is None else frozenset()
    for name, value in mine.items():
        words = " ".join(command_line({name: flags[name]}))
        require(
            name not in given or value == flags[name],
            f"--{name} has no effect with --{request.flag}: the run inherits {words} of {request.source}; leave it out",
        )


def _flags_of(source: Path) -> dict[str, Any]:
    path = source / checkpoint.CONFIG_FILE
    return program_flags(read_config(path)) if path.exists() else {}


def _inherited(flags: Mapping[str, Any], request: Request, source: Path) -> dict[str, Any]:
    """Those of the flags of ``source`` that a run takes over."""
    flags = {"autoencoder": None, **FRAMING} | dict(flags)  # which earlier versions did not have
    names = ", ".join(name for name in INHERITED if name not in flags)
    require(not names, f"--{request.flag} {source} was not trained by train_oxford.py: it lacks the flags {names}")
    return checked(TrainRectifiedFlow, {name: flags[name] for name in INHERITED}, source)
