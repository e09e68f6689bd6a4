"""The flags of a run that learns from a teacher, a trained flow."""

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState

from rectified_flow.cli.flags.model import TeacherData
from rectified_flow.cli.flags.training import TrainConfig, TrainRectifiedFlow
from rectified_flow.cli.training.rows import Recipe, recipe_of
from rectified_flow.distributed.collectives import on_main
from rectified_flow.errors import DamageError, UsageError
from rectified_flow.flags import as_plain, checked, command_line, plain, refuse, replaced
from rectified_flow.flows.solvers import CALLS_PER_STEP
from rectified_flow.runs import checkpoint
from rectified_flow.runs.folder import flags_of_checkpoint

Config = TypeVar("Config", bound=TrainConfig)
FOLDERS = ("dataset_path", "cache_dir", "autoencoder", "source_path", "text_encoder")
"""Flags that a run inherits unless they are given. A folder may have moved since the teacher was trained."""
INHERITED = (
    *("dataset", "dataset_options", "image_size", "skip_broken_images", "aspect_ratio", "crop", "alpha"),
    *("space", "space_options", "autoencoder_options", "value_range", "transform", "show"),
    *("channels_last", "store_bits", "exclude"),
    *("paired", "skip_unpaired", "degrade", "source_as", "source_noise"),
    *("condition_on", "condition_types", "text_tokens"),
    *("network", "network_options", "dim", "dim_mults", "dropout", "use_cfg", "prediction"),
)
"""Flags that a run inherits from its teacher."""


def with_teacher_flags(config: Config) -> Config:
    """Return the flags of a run that learns from a teacher: data and network are those of the teacher's checkpoint.

    Raises:
        UsageError: if there is no such checkpoint, or the generated data are another teacher's.
    """
    taught = config.teacher_data
    if taught is None:
        return config
    source, flags, known = on_main(PartialState(), lambda: _find_source(taught, config.run.checkpoints))
    given = config.given if config.program.config is None else frozenset[str]()  # the file is of another run
    mine = plain(config)
    for name in given & set(INHERITED):
        inherited = " ".join(command_line({name: flags[name]}))
        sentence = f"has no effect with --{taught.flag}: the run inherits {inherited} of {source}; leave it out"
        refuse({name: mine[name] != as_plain(flags[name])}, sentence)
    if taught.rows == "paths":
        if flags["prediction"] != "velocity":
            raise UsageError(
                f"--teacher {source} predicts the {flags['prediction']}: pass one that predicts the velocity"
            )
        seen = flags["source_as"] == "condition" or (flags["degrade"] is not None and flags["source_as"] is None)
        if not flags["use_cfg"] and not flags["condition_on"] and not seen:
            refuse({"guidance_scale": taught.guidance_scale != 1}, f"needs conditions, and {source} has none")
    own = vars(config.data) | vars(config.source) | vars(config.columns)
    folders = {name: own[name] or flags[name] for name in FOLDERS}
    steps = {taught.steps_flag: known.steps} if known and mine[taught.steps_flag] is None else {}
    return replaced(config, {**flags, **folders, **steps, taught.flag: source})


def inherited_flags(config: TrainConfig) -> dict[str, Any]:
    """Return the flags of a run that its teacher determines."""
    flags = {"prediction": "velocity"} | plain(config)
    return {name: flags[name] for name in (*INHERITED, *FOLDERS)}


def calls_for(taught: TeacherData) -> int:
    """Return the number of calls of the teacher's network for a pair or a path."""
    doubled = sum(scale != 1 for scale in (taught.guidance_scale, taught.autoguidance))
    return taught.steps * CALLS_PER_STEP[taught.solver] * 2**doubled


def _find_source(taught: TeacherData, checkpoints: Path) -> tuple[Path, dict[str, Any], Recipe | None]:
    """Return the teacher's checkpoint, the flags that a run inherits, and the recipe of data that exist already.

    Raises:
        UsageError: if there is no such checkpoint, a flag is missing or has another type, or the run's folders hold
            checkpoints or data of another run.
    """
    saved = checkpoint.list_checkpoints(checkpoints)
    for newest in saved[-1:]:
        with suppress(DamageError):  # the run itself reports it
            if flags_of_checkpoint(newest).get(taught.flag) is None:
                raise UsageError(f"{checkpoints} belongs to a run without --{taught.flag}: choose another --output_dir")
    known = recipe_of(taught)
    if known is None:
        source, flags = checkpoint.read(
            taught.source, lambda source: (source, flags_of_checkpoint(source)), names=(checkpoint.CONFIG_FILE,)
        )
        origin = source
    else:
        source, flags, origin = Path(known.source), known.flags, taught.folder
        remedy = f"choose another --output_dir, or --{taught.rows}_dir"
        if not source.resolve().is_relative_to(taught.source.resolve()):
            raise UsageError(f"{origin} contains {taught.rows} of {source}: {remedy}")
        # A run without checkpoints starts from the teacher's weights.
        if checkpoint.fingerprint(source) == checkpoint.MISSING and not saved:
            raise UsageError(f"{source}, the teacher of the {taught.rows} in {origin}, no longer exists: {remedy}")
    if "prediction" not in flags:
        raise UsageError(f"--{taught.flag} {origin} was not trained by train_oxford.py: pass one of its runs")
    flags = plain(TrainRectifiedFlow()) | flags  # defaults for flags that are newer than the teacher
    return source, checked(TrainRectifiedFlow, {name: flags[name] for name in (*INHERITED, *FOLDERS)}, origin), known
